"""Write to TensorBoard what fairseq leaves out: scalars of every layer, and the configuration.

    train_inner/inverse_loss_scale, train_inner/overflows          with fp16, see loss_scale.py
    attention/{sigma_q, sigma_k, tau_sm, tau_lln, alpha, beta}/layer_NN
    the configuration as text, the settings that change the result of a run for the HPARAMS tab, and the paper's panels

The layer scalars are computed only in the updates that are logged, so that other updates are not slowed down.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.logging import progress_bar
from torch import Tensor, nn

from lln_fairseq.analysis import layer_scalars
from lln_fairseq.checkpoints.config import config_yaml, plain_config, plain_options
from lln_fairseq.training.run_identity import result_settings
from lln_fairseq.training.worker import is_first_worker

SCALARS = "layer_scalars"  # key of the logging output: the scalars of each layer (layers, 6), summed over its calls
COUNT = "layer_scalars_count"  # key of the logging output: the number of calls of each layer (layers, 1)
TENSORBOARD_RUN = "attention"  # directory next to fairseq's train_inner, train and valid

# The panels of the paper's figures for TensorBoard's custom scalars; tags are selected by regular expressions.
PANELS = {
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

# Settings that may change when a run resumes, but that distinguish runs in the HPARAMS tab.
BUDGET = (
    "optimization.max_update",
    "optimization.max_epoch",
    "task.global_batch",
    "dataset.batch_size",
    "dataset.max_tokens",
    "checkpoint.finetune_from_model",
)


class LayerScalars:
    """Writes the scalars of every layer's attention every --log-interval updates.

    The scalars are added to fairseq's logging output of a batch. fairseq sums them over batches and workers, so their
    means are correct with gradient accumulation and several workers. A layer that LayerDrop left out has no value in
    that update. `cfg` is the configuration of the task; without its tensorboard_logdir, nothing is computed or written.
    """

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self._start: int | None = None  # number of updates before the first one of this process
        self._updates = 0  # completed before the current update
        self._writer: Any = None

    @contextmanager
    def observe(self, model: nn.Module, updates: int) -> Iterator[list[list[Tensor]]]:
        """Compute the scalars of every attention that the model calls inside the `with` block.

        The list that is yielded is that of `layer_scalars.observe`. Without --tensorboard-logdir, and in updates that
        are not logged, it is empty. `updates` is the number of completed updates.
        """
        if self._start is None:
            self._start = updates
        self._updates = updates
        if not self.cfg.tensorboard_logdir or (updates + 1) % self.cfg.log_interval:
            yield []
            return
        with layer_scalars.observe(model) as layers:
            yield layers

    def add_to(self, log: dict[str, Any], layers: list[list[Tensor]]) -> dict[str, Any]:
        """Return a copy of a batch's logging output with the scalars in `layers`, or `log` itself if there are none."""
        if not layers:
            return log
        totals = torch.zeros(len(layers), len(layer_scalars.NAMES), dtype=torch.float64)
        for total, calls in zip(totals, layers, strict=True):
            for scalars in calls:
                total += scalars.cpu()
        counts = torch.tensor([[len(calls)] for calls in layers], dtype=torch.float64)
        return {**log, SCALARS: totals, COUNT: counts}

    def log(self, logging_outputs: list[dict[str, Any]]) -> None:
        """Write the mean of each scalar over all batches and workers to TensorBoard, not to fairseq's metrics.

        Only the first worker writes, and means that are NaN or infinite are left out.
        """
        observed = [log for log in logging_outputs if SCALARS in log]
        if observed and is_first_worker():
            count = sum(log[COUNT] for log in observed)
            total = sum(log[SCALARS] for log in observed)
            self._write_layers((total / count).tolist(), self._updates + 1)

    def _write_layers(self, layers: list[list[float]], updates: int) -> None:
        """Write the scalars of each layer, in the order of layer_scalars.NAMES."""
        if self._writer is None:
            self._writer = open_writer(self.cfg.tensorboard_logdir, TENSORBOARD_RUN, self._start or 0)
        for number, values in enumerate(layers):
            for name, value in zip(layer_scalars.NAMES, values, strict=True):
                if math.isfinite(value):
                    self._writer.add_scalar(f"{name}/layer_{number:02d}", value, updates)
        self._writer.flush()


def open_writer(logdir: str, run: str, updates: int) -> Any:
    """Return a writer for the directory `run` below the log directory, of a run that has made `updates` updates.

    TensorBoard forgets the values of later updates in the directory. They are those of a run that was killed after its
    last checkpoint, and are written again.
    """
    from torch.utils.tensorboard import SummaryWriter

    first_step = 0  # the probe also measures the model before the first update
    if updates > 0:
        first_step = updates + 1
    return SummaryWriter(os.path.join(logdir, run), purge_step=first_step)


def continue_curves(cfg: Any, updates: int) -> None:
    """Open fairseq's writers as `open_writer` does, for the directories that an earlier start of a run has left."""
    logdir = cfg.common.tensorboard_logdir
    for run in ("train_inner", "train", *cfg.dataset.valid_subset.split(",")):
        if os.path.isdir(os.path.join(logdir, run)):
            progress_bar._tensorboard_writers[run] = open_writer(logdir, run, updates)


def write_configuration(cfg: Any) -> None:
    """Write to TensorBoard the configuration of a run as text, its settings for the HPARAMS tab, and the panels.

    The HPARAMS tab adds the metrics by itself: it shows the last value of each scalar below the run's directory.
    """
    from torch.utils.tensorboard.summary import hparams

    # `hparams` also returns a definition of the experiment, which would limit the tab to this run's settings and
    # metrics. Without it, the tab shows those of all runs.
    _, session_start, _ = hparams(hparams_columns(plain_config(cfg)), {})
    with open_writer(cfg.common.tensorboard_logdir, "", 0) as writer:
        writer.add_custom_scalars(PANELS)
        writer.add_text("configuration", "    " + config_yaml(cfg).replace("\n", "\n    "))
        writer.file_writer.add_summary(session_start)


def hparams_columns(config: Mapping[str, Any]) -> dict[str, float | str]:
    """Return the value of each setting for the HPARAMS tab, as a number or as text.

    The settings are the settings that change the result of a run (see `result_settings`), the settings in BUDGET, and
    the precision. A value that is None, False or "" is left out: the tab shows an empty cell for it, or no column if no
    run has a value. A list of one element is replaced by its element.
    """
    settings = result_settings(config)
    for key in BUDGET:
        group, name = key.split(".")
        settings[key] = plain_options(config[group]).get(name)
    settings["precision"] = "fp32"
    for kind in ("fp16", "bf16", "amp"):
        if config["common"][kind]:
            settings["precision"] = kind
    if plain_options(config["task"]).get("autocast"):
        settings["precision"] = "fp32 with autocast to bf16"
    columns: dict[str, float | str] = {}
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None or value is False or value == "":
            continue
        if type(value) in (int, float):
            columns[key] = value
        else:
            columns[key] = str(value)
    return columns
