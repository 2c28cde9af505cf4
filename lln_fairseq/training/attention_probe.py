"""Run the probe of analysis/probe.py during training (--probe-interval): measure the attention on a fixed batch.

It is for those who follow the paper's measurements, such as the entropy in Figure 1, from update to update.
"""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from lln_fairseq.errors import user_errors
from lln_fairseq.training.tensorboard import open_writer
from lln_fairseq.training.worker import is_first_worker

logger = logging.getLogger(__name__)

TENSORBOARD_RUN = "probe"  # directory below --tensorboard-logdir, next to fairseq's train, train_inner and valid


class AttentionProbe:
    """Measures the attention every --probe-interval updates. With an interval of 0, the default, it measures nothing.

    Only the first worker measures. The other workers wait for it at their next all-reduce. `cfg` is the configuration
    of the task.
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self._probe: Any = None  # built when it first runs
        self._start: int | None = None  # number of updates before the first one of this process

    def before_step(self, model: nn.Module, updates: int, datasets: Mapping[str, Any]) -> None:
        """Measure the model before its first update. Every later call, and every call in a resumed run, does nothing.

        `updates` is the number of completed updates, and `datasets` has the loaded splits by name. A model without an
        attention of this package raises UserError.
        """
        if self._start is None:
            self._start = updates
            if updates == 0:
                self._run_probe(model, 0, datasets)

    def after_update(self, model: nn.Module, updates: int, datasets: Mapping[str, Any]) -> None:
        """Measure the model if the number of completed updates is a multiple of the interval."""
        self._run_probe(model, updates, datasets)

    def _run_probe(self, model: Any, updates: int, datasets: Mapping[str, Any]) -> None:
        """Measure the model, and log how long it took; do nothing if no measurement is due in this worker."""
        interval = self.cfg.probe_interval
        if not interval or updates % interval or not is_first_worker():
            return
        while hasattr(model, "module"):  # fairseq's wrappers for several workers
            model = model.module
        if self._probe is None:
            self._probe = self._build_probe(model, datasets)
        seconds = self._probe(model, updates)
        logger.info(f"probe at update {updates}: {seconds:.2f} s")

    def _build_probe(self, model: nn.Module, datasets: Mapping[str, Any]) -> Any:
        """Choose the fixed batch, and return the probe that measures it.

        Its samples are spread evenly over the first loaded split other than "train", or over "train" if there is no
        other.
        """
        from lln_fairseq.analysis import probe  # imports scipy, which runs without the probe do not need

        with user_errors():
            probe.encoder_layers(model)
        split = "train"
        for name in datasets:
            if name != "train":
                split = name
                break
        dataset = datasets[split]
        if split != "train":
            # fairseq masks a validation set as in epoch 1 in every validation. With the same masks here, the batch is
            # the same in every run with this data and seed, whether the run was resumed or not.
            dataset.set_epoch(1)
        (batch,) = probe.spread_batches(dataset, 1, self.cfg.probe_sequences, model)
        logger.info(f"the probe measures {len(batch['src_tokens'])} sequences of split '{split}'")
        return probe.Probe(batch, open_writer(self.cfg.tensorboard_logdir, TENSORBOARD_RUN, self._start or 0))
