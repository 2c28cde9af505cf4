"""Patch fairseq 0.12 in the places where it has no hook. `install` lists all patches.

The docstring of each patch says why the patch exists, and what fairseq would have to change so that it can be removed.
`original`, an argument of every patch, is fairseq's function. For each patch, a test shows that fairseq fails without
it. Most of these tests are in tests/fairseq_compat/test_fairseq_failures.py. If fairseq no longer fails there, remove
the patch.
"""

import copyreg
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import fairseq.dataclass.utils
from fairseq import checkpoint_utils
from fairseq.dataclass.constants import ChoiceEnum, StrEnum, StrEnumMeta
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.tasks.fairseq_task import StatefulContainer
from fairseq.trainer import Trainer
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from torch.multiprocessing import ProcessExitedException

from lln_fairseq.attention.registry import did_you_mean
from lln_fairseq.checkpoints import reading, saving
from lln_fairseq.checkpoints.compatibility import check_compatibility
from lln_fairseq.checkpoints.config import KNOWN
from lln_fairseq.checkpoints.run_tokenizer import save_tokenizer
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.fairseq_compat import log_filters
from lln_fairseq.training import nan_report, settings, tensorboard
from lln_fairseq.training.exit import exit_with_one_line, in_sweep
from lln_fairseq.training.hooked_task import HookedTask
from lln_fairseq.training.resume import reason_for_completion, restore_training_state
from lln_fairseq.training.run_identity import check_same_run, load_run_checkpoint, run_origin
from lln_fairseq.training.schedule import plan_schedule
from lln_fairseq.training.summary import log_summary
from lln_fairseq.training.worker import lock_save_dir

logger = logging.getLogger(__name__)


def install(run_worker: Callable) -> None:
    """Install all patches of fairseq. A second call does nothing.

    Args:
        run_worker: a function that runs fairseq's main in a worker. It is called as run_worker(main, cfg, ...) where
            fairseq would call main(cfg, ...).
    """
    if hasattr(PathManager.copy, "__wrapped__"):
        return
    reading.allow_fairseq_checkpoints()
    log_filters.install_filters()
    PathManager.copy = staticmethod(functools.wraps(PathManager.copy)(saving.atomic_copy))
    _wrap(checkpoint_utils, "torch_persistent_save", saving.save)
    _wrap(checkpoint_utils, "load_checkpoint", _load_checkpoint)
    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)
    _wrap(Trainer, "load_checkpoint", _load_into_trainer)
    _wrap(Trainer, "train_step", nan_report.train_step)
    _wrap(distributed_utils, "call_main", functools.partial(_call_main, run_worker))
    _wrap(fairseq.dataclass.utils, "merge_with_parent", _merge_with_parent)
    _wrap(sys, "excepthook", _excepthook)
    _wrap(StatefulContainer, "__getattr__", _get_task_state)
    copyreg.pickle(StrEnumMeta, _reduce_enum_class)


def _wrap(owner: Any, name: str, replacement: Callable) -> None:
    """Replace the function `name` of a module or class.

    The new function calls replacement(original, ...) with its own arguments. Its attribute `__wrapped__` is the
    original function.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, patched)


def _load_checkpoint(original: Callable, cfg: Any, trainer: Trainer, **kwargs: Any) -> Any:
    """Check the configuration, check that the run in save_dir is the requested run, and load its checkpoint.

    fairseq-train calls this once, after building its trainer and before its training loop.

    Without this patch, fairseq ignores a missing --restore-file and changed settings, and it makes another update when
    a run is complete or has stopped early. Remove the patch once fairseq has a hook that runs before the training loop.

    Args:
        original: fairseq's function.
        cfg: the checkpoint options.
        trainer: the trainer. Its configuration, trainer.cfg, is changed in place: batch_size and update_freq are set to
            match task.global_batch. If the run is complete, max_epoch is set to -1, so that the loop does nothing.
        kwargs: passed to `original`.

    Returns: the checkpoint's extra_state, or None for a new run, and the iterator over the batches.
    Raises: UserError for the first check that fails.
    """
    settings.split_global_batch(trainer.cfg)
    settings.check_training(trainer.cfg)
    dataset = trainer.cfg.dataset
    if isinstance(trainer.task, HookedTask) and not dataset.disable_validation:
        trainer.task.check_validation_splits(dataset.valid_subset.split(","))
    run_state = load_run_checkpoint(cfg)
    check_same_run(trainer.cfg, run_state, getattr(trainer.task, "labels", []))
    saves = trainer.is_data_parallel_master and not cfg.no_save
    if saves and isinstance(trainer.task, HookedTask):
        trainer.task.run_origin = run_origin(trainer.cfg, run_state)
    extra_state, iterator = original(cfg, trainer, **kwargs)
    if saves and getattr(trainer.cfg.task, "_name", None) in KNOWN["task"]:
        save_tokenizer(trainer.task, cfg.save_dir)
    plan_schedule(trainer, len(iterator))
    seconds = (extra_state or {}).get("previous_training_time", 0)
    reason = reason_for_completion(trainer, seconds, iterator.next_epoch_idx)
    if reason:
        logger.info(f"{cfg.save_dir} is complete: {reason}")
        trainer.cfg.optimization.max_epoch = -1
        if saves:
            saving.remove_superseded(cfg)
    else:
        tensorboard.write_configuration(trainer.cfg)
        log_summary(trainer, iterator)
    return extra_state, iterator


def _load_checkpoint_to_cpu(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Load a checkpoint without executing code from it. `original` is not called.

    fairseq unpickles any class, and evaluates some options in the checkpoint's configuration as Python. Remove this
    patch once fairseq loads with weights_only and checks the types of these options.
    """
    return reading.load_checkpoint(*args, **kwargs)


def _load_into_trainer(original: Callable, trainer: Trainer, filename: str, *args: Any, **kwargs: Any) -> Any:
    """Check that a checkpoint is compatible, load it into the trainer, and correct the state that fairseq resumes from.

    Without this patch, fairseq buries the reason for an incompatible checkpoint in pages of output. If the batch size
    has changed and a run resumes in the middle of an epoch, fairseq skips the wrong sequences. It also does not resume
    --ema-update-freq exactly. Remove the patch once fairseq resumes both correctly.

    Args:
        original: fairseq's function.
        trainer: the trainer.
        filename: the path of the checkpoint.
        args, kwargs: passed to `original`.

    Returns: the checkpoint's extra_state with the corrections, or None if the file does not exist.
    Raises: UserError if the checkpoint is damaged or does not fit the run, and OSError if it cannot be read.
    """
    saved_config = None
    if os.path.isfile(filename):
        saved = reading.load_checkpoint_lazily(filename)
        check_compatibility(saved, trainer.get_model(), trainer.task, filename)
        saved_config = saved.get("cfg")
    try:
        extra_state = original(trainer, filename, *args, **kwargs)
    except Exception as error:
        cause: BaseException | None = error
        if type(error) is Exception:  # fairseq's "Cannot load model parameters ...", which hides the error before it
            cause = error.__context__
        if isinstance(cause, UserError | OSError):
            raise cause from None
        raise UserError(
            f"{filename} does not fit this run: {_load_error_reason(cause)}. Use the options that it was trained with, "
            "or another --save-dir (checkpoint.save_dir) if it belongs to another run"
        ) from error
    if extra_state:
        restore_training_state(trainer, filename, saved_config, extra_state)
    return extra_state


def _load_error_reason(cause: BaseException | None) -> str:
    """Return the line of an error's message that states the reason.

    This is the second line, because the first line of torch's errors about parameters is only a heading. If the message
    has one line, return that line. If the message is empty, return the name of the error's class.
    """
    lines = str(cause).splitlines()
    if not lines:
        return type(cause).__name__
    line = lines[min(1, len(lines) - 1)]
    return line.strip(" \t.") or type(cause).__name__


@exit_with_one_line()
def _call_main(run_worker: Callable, original: Callable, cfg: Any, main: Callable, *args: Any, **kwargs: Any) -> Any:
    """Check the configuration, lock save_dir, and run fairseq's `main` through `run_worker` in every worker.

    Without this patch, too many workers and Ctrl-C end in a traceback, two runs can write into the same directory, and
    --bf16 on the command line implies a TPU. Remove the patch once fairseq handles these cases and has a hook for the
    start of a worker.

    Args:
        run_worker: as for `install`.
        original: fairseq's function.
        cfg: the configuration. With --bf16, cfg.common.tpu is set to False in place if torch_xla is not installed.
        main: fairseq's function that trains or validates in one worker.
        args, kwargs: passed to `original`.
    """
    settings.check_configuration(cfg)
    if cfg.common.bf16 and cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        cfg.common.tpu = False
    try:
        with lock_save_dir(cfg):
            return original(cfg, functools.partial(run_worker, main), *args, **kwargs)
    except ProcessExitedException as error:  # the worker has printed its error
        if in_sweep():
            raise UserError(f"a worker ended with exit code {error.exit_code}, see above") from None
        raise SystemExit(error.exit_code) from None


@exit_with_one_line()
def _merge_with_parent(original: Callable, schema: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge options into a dataclass, and raise a UserError for an unknown option or a value of the wrong type.

    fairseq merges the options into its dataclasses after Hydra has composed them. This is too late for Hydra to report
    such an error in one line. Remove this patch once fairseq registers its dataclasses with Hydra.

    Args:
        original: fairseq's function.
        schema: an instance of the dataclass.
        args, kwargs: passed to `original`.

    Returns: the merged configuration.
    """
    try:
        return original(schema, *args, **kwargs)
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        if isinstance(error, ConfigKeyError):
            raise UserError(f"unknown option '{key}'{did_you_mean(key, schema.__dataclass_fields__)}") from None
        raise UserError(f"option '{key}': {first_line(error)}") from None


def _excepthook(
    original: Callable, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an uncaught UserError in one line. Remove this patch once fairseq-train does so.

    If --fp16 and --bf16 are both set, fairseq-train raises a ValueError whose message is about TPUs. A message about
    the two options is printed instead of it. All other exceptions are passed to `original`.
    """
    if issubclass(kind, UserError):
        print(f"error: {error}", file=sys.stderr)
    elif kind is ValueError and str(error).startswith("Cannot combine --fp16 and --tpu"):
        print("error: --fp16 and --bf16 cannot be combined: set only one of them", file=sys.stderr)
    else:
        original(kind, error, traceback)


def _get_task_state(original: Callable, container: StatefulContainer, name: str) -> Any:
    """Return an entry of a task's state, and raise AttributeError if the container has not been filled yet.

    Copying and unpickling create a container without its dictionaries and look for methods in it. fairseq then looks
    for the dictionary in the dictionary, until the recursion is too deep. Remove this patch once fairseq does not.
    """
    if name in ("_state", "_factories"):
        raise AttributeError(name)
    return original(container, name)


def _reduce_enum_class(enum_class: type[StrEnum]) -> Any:
    """Return what pickle needs to find or create a class of fairseq's enumerations. copyreg calls this.

    Configurations refer to classes that ChoiceEnum creates. All are called "Choices", under which pickle does not find
    them. Remove this once fairseq gives them a name.
    """
    if enum_class.__qualname__ != "Choices":
        return enum_class.__qualname__
    return ChoiceEnum, ([member.value for member in enum_class],)
