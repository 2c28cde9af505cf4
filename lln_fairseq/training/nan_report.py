"""Explain why a run stopped at a NaN or an overflow: where the value first appeared, and what to try."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fairseq.trainer import Trainer

from lln_fairseq.errors import TrainingError, UserError, first_line


@contextmanager
def explain_nan(trainer: Trainer) -> Iterator[None]:
    """Turn a FloatingPointError in the `with` block, which makes an update, into a TrainingError that explains it.

    Its message names the update, the last loss scales, and where the NaN was seen first: the module that fairseq's
    NanDetector reports, for which fairseq repeats the step, or else the first parameter that is not finite.
    """
    with _collect_warnings("fairseq.nan_detector") as warnings:
        try:
            yield
        except UserError:  # also a FloatingPointError if it is a TrainingError, which needs no explanation
            raise
        except FloatingPointError as error:
            raise TrainingError(_explain(trainer, error, warnings)) from error


class _MessageCollector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _collect_warnings(logger_name: str) -> Iterator[list[str]]:
    """Yield a list to which the messages of a logger's warnings and errors are appended during the `with` block."""
    collector = _MessageCollector()
    logger = logging.getLogger(logger_name)
    logger.addHandler(collector)
    try:
        yield collector.messages
    finally:
        logger.removeHandler(collector)


def _explain(trainer: Trainer, error: FloatingPointError, warnings: list[str]) -> str:
    """Return the message of the TrainingError. `warnings` are the messages that fairseq's NanDetector has logged."""
    history = ""
    monitor = getattr(trainer.task, "loss_scale", None)  # only tasks of this package have one
    if monitor is not None and monitor.recent_scales:
        scales = ", ".join(f"{scale:g}" for scale in monitor.recent_scales)
        history = f" Last loss scales: {scales}."
    precision = ""
    if trainer.cfg.common.fp16:
        precision = ", bf16 instead of fp16 (common.bf16=true common.fp16=false)"
    return (
        f"update {trainer.get_num_updates() + 1}: {first_line(error)} {_describe_origin(trainer, warnings)}{history} "
        f"The state is saved in {trainer.cfg.checkpoint.save_dir}/crash.pt. Start a new run (checkpoint.save_dir) from "
        "the last good checkpoint (checkpoint.finetune_from_model), and try a lower learning rate or a longer warm-up, "
        f"--clip-norm 1, a larger batch{precision}."
    )


def _describe_origin(trainer: Trainer, warnings: list[str]) -> str:
    """Return a sentence that says where the NaN was first seen.

    fairseq repeats the failed step with a NanDetector on every module; its first warning names the first bad output. If
    there is no warning, the sentence names the first parameter with a NaN or infinite value.
    """
    if warnings:
        return f"First seen: {warnings[0]}."
    for name, parameter in trainer.get_model().named_parameters():
        if not torch.isfinite(parameter).all():
            return f"Not finite: parameter {name}."
    return "When the step was repeated, the output of every module was finite."
