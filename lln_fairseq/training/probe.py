"""Measures the attention of the model while it trains, on a fixed batch: --probe-interval, see analysis/probe.py."""

import logging
import os
import time
from typing import Any

from torch import nn

from lln_fairseq.errors import input_errors
from lln_fairseq.training.tensorboard import is_first_worker

logger = logging.getLogger(__name__)

RUN = "probe"  # TensorBoard's run, a directory beside those of fairseq


class AttentionProbe:
    """Goes in front of a fairseq task. The other workers wait for the first one at their next all-reduce."""

    _probe: Any = None
    _probed = 0.0  # seconds spent so far
    _begin = 0.0

    def train_step(self, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int,
                   *args: Any, **kwargs: Any) -> tuple:  # fmt: skip
        if self._begin == 0.0:
            self._begin = time.perf_counter()
            if update_num == 0:
                self._look(model, 0)
        return super().train_step(sample, model, criterion, optimizer, update_num, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        super().optimizer_step(optimizer, model, update_num)
        self._look(model, update_num + 1)  # not called for an update that fp16 skips

    def _look(self, model: Any, update: int) -> None:
        interval = self.cfg.probe_interval
        if not interval or update % interval or not is_first_worker():
            return
        while hasattr(model, "module"):  # what fairseq wraps around a model for several workers
            model = model.module
        if self._probe is None:
            self._probe = self._make_probe(model)
        seconds = self._probe(model, update)
        self._probed += seconds
        share = self._probed / (time.perf_counter() - self._begin)
        so_far = f"; probes took {share:.1%} of the training so far" if update else ""
        logger.info(f"probe at update {update}: {seconds:.2f} s{so_far}")

    def _make_probe(self, model: nn.Module) -> Any:
        """Raises: InputError for a model of fairseq's own."""
        from torch.utils.tensorboard import SummaryWriter

        from lln_fairseq.analysis import probe  # imports scipy, which a training without probe does not need

        with input_errors():
            probe.encoder_layers(model)
        # A validation set if one is loaded. fairseq masks it as in epoch 1 in every validation, so the batch is the
        # same in every run with this data and seed, resumed or not.
        split = next((name for name in self.datasets if name != "train"), "train")
        dataset = self.dataset(split)
        if split != "train":
            dataset.set_epoch(1)
        (batch,) = probe.spread_batches(dataset, 1, self.cfg.probe_sequences, model)
        logger.info(f"the probe's batch: {len(batch['src_tokens'])} sequences of split '{split}'")
        return probe.Probe(batch, SummaryWriter(os.path.join(self.cfg.tensorboard_logdir, RUN)))
