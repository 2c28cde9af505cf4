"""Log, in about ten lines, what a run will do, for a user who is about to leave it alone for hours."""

import logging
import math
import shlex
from typing import Any

import torch
from fairseq.data.iterators import EpochBatchIterating
from fairseq.trainer import Trainer

from lln_fairseq.checkpoints.compatibility import option_value
from lln_fairseq.checkpoints.config import STOCK_ATTENTION, plain_options, softmax_layers
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.models.options import attention_options
from lln_fairseq.training.padding_report import row_lengths
from lln_fairseq.training.schedule import total_updates, warn_of_unfit_schedule

CONFIGURATION = "config.yaml"  # in save_dir; a resumed run replaces it

# The logger of fairseq-train, the only one whose messages --log-file gets.
logger = logging.getLogger("fairseq_cli.train")


def log_summary(trainer: Trainer, iterator: EpochBatchIterating) -> None:
    """Log what a run will do, before its first update or after it was resumed."""
    cfg = trainer.cfg
    model = trainer.get_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        ("data", _data(cfg, trainer.task)),
        ("model", _model(cfg, model)),
        ("attention", _attention(cfg, model)),
        ("parameters", f"{parameters:,}"),
        ("updates", _updates(trainer, len(iterator))),
        ("batch", _batch(trainer, len(iterator))),
        ("precision", _precision(trainer)),
        ("saves to", _directory(cfg)),
        ("watch", _watch(cfg)),
    ]
    done = trainer.get_num_updates()
    if done:
        lines.append(("resumes", f"after update {done:,}, with the learning rate {trainer.get_lr():g}"))
    for name, value in lines:
        logger.info(f"{name:<11}{value}")
    warn_of_unfit_schedule(trainer, len(iterator))


def _data(cfg: Any, task: Any) -> str:
    splits = [f"{len(dataset):,} rows in {name}" for name, dataset in sorted(task.datasets.items())]
    return f"{cfg.task.data}: {', '.join(splits)}"


def _model(cfg: Any, model: Any) -> str:
    options = getattr(model, "args", None) or cfg.model
    sizes = []
    for size in ("layers", "embed_dim", "attention_heads"):
        sizes.append(getattr(options, f"encoder_{size}", "?"))
    start = cfg.checkpoint.finetune_from_model or "random weights"
    if cfg.checkpoint.restore_file != LAST:
        start = cfg.checkpoint.restore_file
    return f"{cfg.model._name}: layers {sizes[0]}, width {sizes[1]}, heads {sizes[2]}, from {start}"


def _attention(cfg: Any, model: Any) -> str:
    """Return the name of the attention and its options, without those that are None."""
    options = getattr(model, "args", None) or cfg.model
    name = getattr(options, "attention", None)
    if name is None:
        return STOCK_ATTENTION
    words = [str(name)]
    plain = plain_options(options)
    for key, value in attention_options(name, options).items():
        text = option_value(f"{name}_{key}", value, plain)
        if text != "None":
            words.append(f"{key}={text}")
    layers = softmax_layers(plain)
    if layers is not None:
        words.append(f"(softmax in layers {layers})")
    return " ".join(words)


def _updates(trainer: Trainer, batches: int) -> str:
    """Describe the number of updates and the schedule; `batches` is the number of batches of a worker in an epoch."""
    cfg = trainer.cfg
    updates = total_updates(cfg, batches)
    in_epoch = math.ceil(batches / cfg.optimization.update_freq[0])
    text = "unlimited" if math.isinf(updates) else f"{updates:,} ({updates / in_epoch:.3g} epochs)"
    schedule = f"learning rate {cfg.optimization.lr[0]:g}, {cfg.lr_scheduler._name}"
    warmup = getattr(trainer.lr_scheduler.cfg, "warmup_updates", 0)
    if warmup:
        schedule += f" after a warm-up of {warmup:,} updates"
    return f"{text}, {schedule}"


def _batch(trainer: Trainer, batches: int) -> str:
    """Describe the limits of an update, and its mean numbers of rows and of tokens without padding."""
    cfg = trainer.cfg
    limits = []
    if cfg.dataset.batch_size:
        limits.append(f"{cfg.dataset.batch_size} rows")
    if cfg.dataset.max_tokens:
        limits.append(f"{cfg.dataset.max_tokens:,} tokens")
    workers = cfg.distributed_training.distributed_world_size
    frequency = cfg.optimization.update_freq[0]
    dataset = trainer.task.dataset(cfg.dataset.train_subset)
    tokens = sum(int(lengths.sum()) for lengths in row_lengths(dataset))
    updates = math.ceil(batches / frequency)
    return (
        f"at most {' and '.join(limits)} x {frequency} (update_freq) x {workers} (workers); on average "
        f"{len(dataset) / updates:.0f} rows, {tokens / updates:,.0f} tokens"
    )


def _precision(trainer: Trainer) -> str:
    """Describe the precision and the device."""
    common = trainer.cfg.common
    kind = "fp32"
    for name in ("fp16", "bf16", "amp"):
        if common[name]:
            kind = name
    if common.memory_efficient_fp16 or common.memory_efficient_bf16:
        kind = f"memory-efficient {kind}"
    if getattr(trainer.cfg.task, "autocast", False):
        kind = "fp32 with autocast to bf16"
    if trainer.device.type == "cuda":
        return f"{kind} on {torch.cuda.get_device_name(trainer.device)}"
    return f"{kind} on CPU"


def _directory(cfg: Any) -> str:
    if cfg.checkpoint.no_save:
        return "nothing (no_save)"
    return f"{cfg.checkpoint.save_dir} ({CONFIGURATION} has all settings)"


def _watch(cfg: Any) -> str:
    if not cfg.common.tensorboard_logdir:
        return "no curves: set --tensorboard-logdir (common.tensorboard_logdir)"
    return f"tensorboard --logdir {shlex.quote(cfg.common.tensorboard_logdir)}"
