"""Measure the attention of the model while it trains, on a fixed batch: --probe-interval, see analysis/probe.py."""

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from lln_fairseq.errors import input_errors
from lln_fairseq.training.worker import is_first_worker

logger = logging.getLogger(__name__)

RUN = "probe"  # TensorBoard's run, a directory beside those of fairseq


class AttentionProbe:
    """Run the probe in the first worker. The other workers wait for it at their next all-reduce."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self._probe: Any = None
        self._probe_seconds = 0.0  # spent so far
        self._start = 0.0

    def before_step(self, model: nn.Module, updates: int, datasets: Mapping[str, Any]) -> None:
        """Measure the untrained model, before the first update of a new run."""
        if self._start == 0.0:
            self._start = time.perf_counter()
            if updates == 0:
                self._run_probe(model, 0, datasets)

    def after_update(self, model: nn.Module, updates: int, datasets: Mapping[str, Any]) -> None:
        """Measure the model after `updates` updates, if that is a multiple of the interval."""
        self._run_probe(model, updates, datasets)

    def _run_probe(self, model: Any, updates: int, datasets: Mapping[str, Any]) -> None:
        interval = self.cfg.probe_interval
        if not interval or updates % interval or not is_first_worker():
            return
        while hasattr(model, "module"):  # what fairseq wraps around a model for several workers
            model = model.module
        if self._probe is None:
            self._probe = self._make_probe(model, datasets)
        seconds = self._probe(model, updates)
        self._probe_seconds += seconds
        message = f"probe at update {updates}: {seconds:.2f} s"
        if updates:
            share = self._probe_seconds / (time.perf_counter() - self._start)
            message += f"; probes took {share:.1%} of the training so far"
        logger.info(message)

    def _make_probe(self, model: nn.Module, datasets: Mapping[str, Any]) -> Any:
        """Raises: InputError for a model of fairseq's own."""
        from torch.utils.tensorboard import SummaryWriter

        from lln_fairseq.analysis import probe  # imports scipy, which a training without probe does not need

        with input_errors():
            probe.encoder_layers(model)
        # A validation set if one is loaded. fairseq masks it as in epoch 1 in every validation, so the batch is the
        # same in every run with this data and seed, resumed or not.
        split = next((name for name in datasets if name != "train"), "train")
        dataset = datasets[split]
        if split != "train":
            dataset.set_epoch(1)
        (batch,) = probe.spread_batches(dataset, 1, self.cfg.probe_sequences, model)
        logger.info(f"the probe's batch: {len(batch['src_tokens'])} sequences of split '{split}'")
        return probe.Probe(batch, SummaryWriter(os.path.join(self.cfg.tensorboard_logdir, RUN)))
