"""The places where fairseq has no hook for what its user must know: every patch of the host is in this file.

    PathManager.copy            a kill while a checkpoint is copied left half a checkpoint_last.pt
    torch_persistent_save       a full disk ended in three tracebacks
    load_checkpoint             asked-for files that do not exist were ignored, other batches "to be reported"
    load_checkpoint_to_cpu      built whatever the file's configuration named, and its options were evaluated
    Trainer.load_checkpoint     what does not fit ended in pages about "the architectures"
    Trainer.train_step          NaN and the minimum loss scale did not say where and what to try
    call_main                   more workers than devices and Ctrl-C ended in a traceback; --bf16 meant a TPU; two
                                trainings in one directory; a thread that prefetches aborted the end (exit code 134)

Each patch does what the host does and adds to it; `apply` may be called again.
"""

import errno
import functools
import importlib.util
import logging
import multiprocessing
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import BackgroundConsumer
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from torch.multiprocessing import ProcessRaisedException

import lln_fairseq
from lln_fairseq import checkpoint, command, errors, run_checks, run_lock
from lln_fairseq.errors import InputError, TrainingError, first_line, one_line_instead_of_a_traceback

LONGEST_BATCH = 10  # seconds; a loader process that was interrupted is missed after five


def apply() -> None:
    """Puts the patches in place, once."""
    if hasattr(PathManager.copy, "__wrapped__"):
        return
    errors.show_input_errors_in_one_line()
    checkpoint.allow_fairseq_checkpoints()
    PathManager.copy = staticmethod(functools.wraps(PathManager.copy)(atomic_copy))
    _wrap(checkpoint_utils, "torch_persistent_save", _save)
    _wrap(checkpoint_utils, "load_checkpoint", _begin)
    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", lambda original, *args, **kw: checkpoint.load_to_cpu(*args, **kw))
    _wrap(Trainer, "load_checkpoint", _load)
    _wrap(Trainer, "train_step", _step)
    _wrap(distributed_utils, "call_main", _call_main)


def _wrap(owner: Any, name: str, around: Callable) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, patched)


def atomic_copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Copies a file such that `dst_path` is the old or the new one, whole, whatever kills the program.

    Raises: InputError where the file system refuses, for example because it is full; `dst_path` is then as before.
    """
    part = f"{dst_path}.tmp"
    if os.path.exists(dst_path) and not overwrite:
        return False
    try:
        shutil.copyfile(src_path, part)
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, dst_path)
    except OSError as error:
        _remove(part)
        raise _cannot_save(dst_path, error.strerror) from error
    return True


def _save(original: Callable, obj: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
    log = checkpoint_utils.logger
    quiet, log.disabled = log.disabled, True  # three tracebacks of the same full disk
    try:
        return original(obj, filename, *args, **kwargs)
    except (OSError, RuntimeError) as error:
        if isinstance(filename, str):
            _remove(f"{filename}.tmp")
            reason = getattr(error, "strerror", None) or _root_cause(error)
            raise _cannot_save(filename, reason) from error
        raise
    finally:
        log.disabled = quiet


def _cannot_save(path: str, reason: str | None) -> InputError:
    folder = os.path.dirname(os.path.abspath(path))
    if reason == os.strerror(errno.ENOENT) or not os.path.isdir(folder):
        return InputError(
            f"cannot save {path}: {folder}, or what was being written in it, was removed by another program; the same "
            "command goes on from the last checkpoint that is left"
        )
    free = shutil.disk_usage(folder).free / 1e6
    return InputError(
        f"cannot save {path}: {reason} ({free:.0f} MB free); the last checkpoint that was saved is whole: make room "
        "and give the same command again to go on from it"
    )


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.remove(path)


def _begin(original: Callable, cfg: Any, trainer: Trainer, **kwargs: Any) -> Any:
    # fairseq-train calls this first of all with a complete trainer: here the whole configuration is known.
    run_checks.check_run(trainer.cfg)
    try:
        extra_state, batches = original(cfg, trainer, **kwargs)
    except RuntimeError as error:
        if "dataloader mismatch" not in str(error):
            raise
        raise InputError(
            f"{cfg.save_dir} holds a run with other batches: give the batch size, max tokens and data that it had, "
            "another --save-dir (checkpoint.save_dir), or --reset-dataloader to begin its epoch again"
        ) from error
    if extra_state is not None:
        checkpoint.check_same_run(trainer)
    return extra_state, batches


def _load(original: Callable, trainer: Trainer, filename: str, *args: Any, **kwargs: Any) -> Any:
    with checkpoint.loading(trainer.get_model(), trainer.task, filename):
        try:
            return original(trainer, filename, *args, **kwargs)
        except Exception as error:
            cause = error.__context__ if type(error) is Exception else error  # fairseq's own says that it "cannot load"
            if isinstance(cause, InputError | OSError):
                raise cause from None
            reason = (str(cause).splitlines() or [""])[:2][-1].strip(" \t.") or type(cause).__name__
            raise InputError(
                f"{filename} does not fit this run: {reason}. Give the options that it was made with, or another "
                "--save-dir (checkpoint.save_dir) if it is another run's"
            ) from error


@one_line_instead_of_a_traceback()
def _call_main(original: Callable, cfg: Any, main: Callable, *args: Any, **kwargs: Any) -> Any:
    run_checks.check_devices(cfg)
    if cfg.common.bf16 and cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        cfg.common.tpu = False
    try:
        with run_lock.one_training(cfg):
            return original(cfg, functools.partial(_main, main), *args, **kwargs)
    except ProcessRaisedException as error:  # a worker's, with all of its traceback
        if found := re.search(r"^lln_fairseq\.errors\.\w+: (.*)", str(error), re.MULTILINE):
            raise InputError(found[1]) from None
        raise


def _main(main: Callable, cfg: Any, **kwargs: Any) -> Any:
    """In a worker, a process of its own, this file is imported before fairseq imports the user directory."""
    lln_fairseq.register()
    if parent := multiprocessing.parent_process():
        command.end_with(parent.pid)
    try:
        return main(cfg, **kwargs)
    finally:
        _end_prefetching()


def _end_prefetching() -> None:
    """Python ends a thread that makes batches while it itself ends; torch's C++ code aborts the process on that."""
    for thread in threading.enumerate():
        if isinstance(thread, BackgroundConsumer):
            thread._max_len = 0  # its next batch is the last
            deadline = time.monotonic() + LONGEST_BATCH
            while thread.is_alive() and time.monotonic() < deadline:
                with suppress(queue.Empty):  # it may wait for room in its queue
                    thread._queue.get(timeout=0.01)


def _step(original: Callable, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
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
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _explain(trainer: Trainer, error: FloatingPointError, found: list[str]) -> str:
    cause = first_line(error)
    where = f" First seen: {found[0]}." if found else ""
    if not found:
        bad = [name for name, p in trainer.get_model().named_parameters() if not torch.isfinite(p).all()]
        where = f" Not finite: parameter {bad[0]}." if bad else " Every module's output is finite in a second try."
    scales = getattr(trainer.task, "loss_scales", ())
    history = f" Last loss scales: {', '.join(f'{scale:g}' for scale in scales)}." if scales else ""
    return (
        f"update {trainer.get_num_updates() + 1}: {cause}{where}{history} The state is in "
        f"{trainer.cfg.checkpoint.save_dir}/crash.pt. Try, from the last good checkpoint: a lower learning rate or a "
        "longer warm-up, --clip-norm 1, a larger batch"
        + (", bf16 instead of fp16 (common.bf16=true common.fp16=false)." if trainer.cfg.common.fp16 else ".")
    )
