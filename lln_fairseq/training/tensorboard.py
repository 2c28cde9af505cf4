"""What TensorBoard shows of a training beside fairseq's own scalars; nothing is computed between log intervals.

train_inner/inverse_loss_scale, train_inner/overflows          with fp16
attention/{sigma_q, sigma_k, tau_sm, tau_lln, alpha, beta}/layer_NN
"""

import math
import os
from typing import Any

import torch
from fairseq.logging import metrics

from lln_fairseq.analysis.layer_scalars import NAMES, observe

SCALARS, COUNT = "layer_scalars", "layer_scalars_count"  # keys of the logging output: a sum over batches, and how many
RUN = "attention"  # fairseq keeps a directory for each of train_inner, train, valid; this is one more

# TensorBoard's "custom scalars": the panels of the paper, as regular expressions over the tags.
LAYOUT = {
    "paper": {
        "loss (figure 8a)": ["Multiline", ["^loss$"]],
        "inverse loss scale of fp16 (figures 8b, 10b)": ["Multiline", ["^inverse_loss_scale$"]],
        "temperature (figure 1)": ["Multiline", ["^tau_sm/.*", "^tau_lln/.*"]],
        "entropy in bits (figure 1), with probe_interval": ["Multiline", ["^entropy/.*"]],
        "spectral gap (figure 1), with probe_interval": ["Multiline", ["^spectral_gap/.*"]],
        "alpha (figure 9)": ["Multiline", ["^alpha/.*"]],
        "beta (figure 9)": ["Multiline", ["^beta/.*"]],
        "standard deviation of queries and keys": ["Multiline", ["^sigma_q/.*", "^sigma_k/.*"]],
    }
}


class TensorBoardScalars:
    """Goes in front of a fairseq task that has ExactResume's `scaler` and `overflows`.

    Sums travel in the logging output, as fairseq's own do: right for gradient accumulation and several workers.
    """

    _update = 0  # the number of updates before the current one
    _is_training = False
    _writer: Any = None

    def train_step(self, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int,
                   *args: Any, **kwargs: Any) -> tuple:  # fmt: skip
        self._update, self._is_training = update_num, True
        step = super().train_step
        if not self.cfg.tensorboard_logdir or (update_num + 1) % self.cfg.log_interval:
            return step(sample, model, criterion, optimizer, update_num, *args, **kwargs)
        with observe(model) as layers:
            loss, size, log = step(sample, model, criterion, optimizer, update_num, *args, **kwargs)
        if layers:  # a model of fairseq's has none
            log = {**log, SCALARS: torch.stack(layers).double(), COUNT: 1}
        return loss, size, log

    def valid_step(self, *args: Any, **kwargs: Any) -> tuple:
        self._is_training = False
        return super().valid_step(*args, **kwargs)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        if not self._is_training:
            return
        if self.scaler:
            metrics.log_scalar("overflows", self.overflows, weight=0, priority=710, round=0)
            metrics.log_derived("inverse_loss_scale", _inverse_loss_scale, priority=705)
        found = [log for log in logging_outputs if SCALARS in log]
        if found and is_first_worker():
            count = sum(float(log[COUNT]) for log in found)
            self._write((sum(log[SCALARS] for log in found) / count).tolist(), self._update + 1)

    def _write(self, layers: list[list[float]], update: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(os.path.join(self.cfg.tensorboard_logdir, RUN))
            self._writer.add_custom_scalars(LAYOUT)
        for number, values in enumerate(layers):
            for name, value in zip(NAMES, values, strict=True):
                if math.isfinite(value):
                    self._writer.add_scalar(f"{name}/layer_{number:02d}", value, update)
        self._writer.flush()


def _inverse_loss_scale(meters: Any) -> float:
    # fairseq logs the loss scale itself after everything else: only derived, later, it is that of the same update
    return 1 / meters["loss_scale"].val if "loss_scale" in meters else 0.0


def is_first_worker() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
