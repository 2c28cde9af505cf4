"""Write to TensorBoard what fairseq does not: scalars of every layer, and the settings of the run.

train_inner/inverse_loss_scale, train_inner/overflows          with fp16
attention/{sigma_q, sigma_k, tau_sm, tau_lln, alpha, beta}/layer_NN
the configuration as text, and what changes the result of a run for the HPARAMS tab

Nothing is computed between log intervals.
"""

import argparse
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.logging import metrics
from omegaconf import OmegaConf
from torch import Tensor, nn

from lln_fairseq.analysis import layer_scalars
from lln_fairseq.checkpoints.config import plain_config
from lln_fairseq.training.loss_scale import LossScaleMonitor
from lln_fairseq.training.run_identity import result_settings
from lln_fairseq.training.worker import is_first_worker

SCALARS = "layer_scalars"  # key of the logging output: a sum over batches
COUNT = "layer_scalars_count"  # key of the logging output: the number of batches in the sum
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

# Settings that a run may change when it resumes, but that tell the jobs of a sweep apart.
BUDGET = (
    "optimization.max_update",
    "optimization.max_epoch",
    "task.global_batch",
    "dataset.batch_size",
    "dataset.max_tokens",
    "checkpoint.finetune_from_model",
)


class LayerScalars:
    """Log the scalars of every layer's attention at the log interval, and the overflows of fp16 at every update.

    Sums travel in the logging output, as fairseq's own do: right for gradient accumulation and several workers.
    """

    def __init__(self, cfg: Any, loss_scale: LossScaleMonitor) -> None:
        self.cfg = cfg
        self.loss_scale = loss_scale
        self.is_training = False
        self._updates = 0  # before the current one
        self._writer: Any = None

    @contextmanager
    def observe(self, model: nn.Module, updates: int) -> Iterator[list[Tensor]]:
        """Collect the scalars of every layer while the model runs; an empty list between log intervals."""
        self._updates = updates
        self.is_training = True
        if not self.cfg.tensorboard_logdir or (updates + 1) % self.cfg.log_interval:
            yield []
            return
        with layer_scalars.observe(model) as layers:
            yield layers

    def add_to(self, log: dict[str, Any], layers: list[Tensor]) -> dict[str, Any]:
        """Return the logging output of a batch with the scalars that `observe` collected."""
        if not layers:  # nothing was observed, or a model of fairseq's own
            return log
        return {**log, SCALARS: torch.stack(layers).double(), COUNT: 1}

    def log(self, logging_outputs: list[dict[str, Any]]) -> None:
        """Log what the batches of a training update collected."""
        if not self.is_training:
            return
        if self.loss_scale.scaler is not None:
            metrics.log_scalar("overflows", self.loss_scale.overflows, weight=0, priority=710, round=0)
            metrics.log_derived("inverse_loss_scale", _inverse_loss_scale, priority=705)
        observed = [log for log in logging_outputs if SCALARS in log]
        if observed and is_first_worker():
            count = sum(float(log[COUNT]) for log in observed)
            total = sum(log[SCALARS] for log in observed)
            self._write_layers((total / count).tolist(), self._updates + 1)

    def _write_layers(self, layers: list[list[float]], updates: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(os.path.join(self.cfg.tensorboard_logdir, RUN))
            self._writer.add_custom_scalars(LAYOUT)
        for number, values in enumerate(layers):
            for name, value in zip(layer_scalars.NAMES, values, strict=True):
                if math.isfinite(value):
                    self._writer.add_scalar(f"{name}/layer_{number:02d}", value, updates)
        self._writer.flush()


def _inverse_loss_scale(meters: Any) -> float:
    # fairseq logs the loss scale itself after everything else: only derived, later, it is that of the same update
    if "loss_scale" not in meters:
        return 0.0
    return 1 / meters["loss_scale"].val


def write_configuration(cfg: Any) -> None:
    """Write the configuration of a training that begins, if it logs to TensorBoard.

    The HPARAMS tab finds the metrics by itself: the last value of each scalar below the run's directory.
    """
    directory = cfg.common.tensorboard_logdir
    if not directory or not is_first_worker():
        return
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    config = plain_config(cfg)
    for name, group in config.items():
        if isinstance(group, argparse.Namespace):  # the options of a model without dataclass
            config[name] = vars(group)
    # torch's own definition of the experiment would show the settings and metrics of this run alone
    _, start, _ = hparams(hparams_columns(config), {})
    with SummaryWriter(directory) as writer:
        writer.add_text("configuration", "    " + OmegaConf.to_yaml(config).replace("\n", "\n    "))
        writer.file_writer.add_summary(start)


def hparams_columns(config: Mapping[str, Any]) -> dict[str, float | str]:
    """Return a number or text by setting, for the HPARAMS tab.

    What is off or not given is left out: the tab shows an empty cell, or no column if no run has a value.
    """
    settings = dict(result_settings(config))
    for key in BUDGET:
        group, name = key.split(".")
        settings[key] = config[group].get(name)
    settings["precision"] = next((kind for kind in ("amp", "bf16", "fp16") if config["common"][kind]), "fp32")
    columns: dict[str, float | str] = {}
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None or value is False or value == "":
            continue
        columns[key] = value if type(value) in (int, float) else str(value)
    return columns
