"""Report where a NaN or an overflow began, and what to try, when a training cannot go on."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.trainer import Trainer

from lln_fairseq.errors import InputError, TrainingError, first_line


def train_step(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Call fairseq's Trainer.train_step, and raise TrainingError that names the module, update and loss scales.

    fairseq says neither where a NaN began nor what to try.
    """
    with _warnings_of("fairseq.nan_detector") as found:
        try:
            return original(trainer, *args, **kwargs)
        except FloatingPointError as error:
            if isinstance(error, InputError):
                raise
            raise TrainingError(_explain(trainer, error, found)) from error


@contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    messages: list[str] = []
    handler: Any = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _explain(trainer: Trainer, error: FloatingPointError, found: list[str]) -> str:
    monitor = getattr(trainer.task, "loss_scale", None)  # of our own tasks
    scales = monitor.recent_scales if monitor else ()
    history = f" Last loss scales: {', '.join(f'{scale:g}' for scale in scales)}." if scales else ""
    instead = ", bf16 instead of fp16 (common.bf16=true common.fp16=false)" if trainer.cfg.common.fp16 else ""
    return (
        f"update {trainer.get_num_updates() + 1}: {first_line(error)} {_origin(trainer, found)}{history} The state is "
        f"in {trainer.cfg.checkpoint.save_dir}/crash.pt. Try, from the last good checkpoint: a lower learning rate or "
        f"a longer warm-up, --clip-norm 1, a larger batch{instead}."
    )


def _origin(trainer: Trainer, found: list[str]) -> str:
    """Return where a NaN was first seen. `found` has the warnings of fairseq's NanDetector, of its second try."""
    if found:
        return f"First seen: {found[0]}."
    bad = [name for name, p in trainer.get_model().named_parameters() if not torch.isfinite(p).all()]
    return f"Not finite: parameter {bad[0]}." if bad else "Every module's output is finite in a second try."
