"""Patch fairseq 0.12 in the places where it has no hook. `install` lists all patches; each says why it exists.

A patch can go when fairseq alone passes where its test shows fairseq's own failure first (most of these tests are in
tests/fairseq_compat/test_fairseq_failures.py); its docstring says what fairseq would have to do.
"""

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import fairseq.dataclass.utils
import torch.distributed as dist
from fairseq import checkpoint_utils, utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from torch.multiprocessing import ProcessExitedException

from lln_fairseq.attention.registry import did_you_mean
from lln_fairseq.checkpoints import reading, saving
from lln_fairseq.checkpoints.compatibility import check_compatibility
from lln_fairseq.checkpoints.config import KNOWN
from lln_fairseq.checkpoints.run_tokenizer import save_tokenizer
from lln_fairseq.errors import InputError, exit_with_one_line, first_line, in_sweep
from lln_fairseq.training import nan_report, settings, tensorboard, wandb
from lln_fairseq.training.hooked_task import HookedTask
from lln_fairseq.training.resume import reason_for_completion, restore_training_state
from lln_fairseq.training.run_identity import check_same_run, load_own_checkpoint, run_origin
from lln_fairseq.training.worker import lock_save_dir

logger = logging.getLogger(__name__)


def install(run_worker: Callable) -> None:
    """Install the patches; again is harmless.

    Args:
        run_worker: run_worker(main, cfg, ...) runs in each worker of a training in place of fairseq's main(cfg, ...)
    """
    if hasattr(PathManager.copy, "__wrapped__"):
        return
    reading.allow_fairseq_checkpoints()
    PathManager.copy = staticmethod(functools.wraps(PathManager.copy)(saving.atomic_copy))
    _wrap(checkpoint_utils, "torch_persistent_save", saving.save)
    _wrap(checkpoint_utils, "load_checkpoint", _load_checkpoint)
    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)
    _wrap(Trainer, "load_checkpoint", _load_into_trainer)
    _wrap(Trainer, "train_step", nan_report.train_step)
    _wrap(progress_bar.WandBProgressBarWrapper, "__init__", wandb.start)
    _wrap(distributed_utils, "all_gather_list", _all_gather_list)
    _wrap(distributed_utils, "call_main", functools.partial(_call_main, run_worker))
    _wrap(fairseq.dataclass.utils, "merge_with_parent", _merge_with_parent)
    _wrap(sys, "excepthook", _excepthook)


def _wrap(owner: Any, name: str, around: Callable) -> None:
    """Replace a function by around(original, ...)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, patched)


def _load_checkpoint(original: Callable, cfg: Any, trainer: Trainer, **kwargs: Any) -> Any:
    """Check the whole configuration and the run in the save_dir, then load its checkpoint.

    fairseq-train calls this first of all with a complete trainer. fairseq ignores a missing file and other settings for
    the same run, and trains on when a run is complete or has stopped early. Remove it once fairseq has a hook for the
    begin of a training.
    """
    settings.split_global_batch(trainer.cfg)
    settings.check(trainer.cfg)
    wandb.check_wandb(trainer.cfg)
    own = load_own_checkpoint(cfg)
    check_same_run(trainer.cfg, own)
    saves = trainer.is_data_parallel_master and not cfg.no_save
    if saves and isinstance(trainer.task, HookedTask):
        trainer.task.run_origin = run_origin(trainer.cfg, own)
    loaded = original(cfg, trainer, **kwargs)
    if saves and getattr(trainer.cfg.task, "_name", None) in KNOWN["task"]:
        save_tokenizer(trainer.task, cfg.save_dir)
    state, batches = loaded
    seconds = (state or {}).get("previous_training_time", 0)
    if reason := reason_for_completion(trainer, seconds, batches.next_epoch_idx):
        logger.info(f"{cfg.save_dir} is complete: {reason}")
        trainer.cfg.optimization.max_epoch = -1
        if saves:
            saving.remove_superseded(cfg)
    else:
        tensorboard.write_configuration(trainer.cfg)
    return loaded


def _load_checkpoint_to_cpu(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Load a checkpoint without building what its configuration names: fairseq evaluates some of its options.

    Remove it once fairseq loads with weights_only and checks the types of a checkpoint's configuration.
    """
    return reading.load_checkpoint(*args, **kwargs)


def _load_into_trainer(original: Callable, trainer: Trainer, filename: str, *args: Any, **kwargs: Any) -> Any:
    """Check that a checkpoint is compatible, load it, and adapt the state that fairseq restores from it.

    fairseq answers what does not fit with pages about "the architectures". In the middle of an epoch it counts other
    batches as if they were the same, and it does not resume --ema-update-freq exactly. Remove it
    once it does.
    """
    saved_config = None
    if os.path.isfile(filename):
        saved = reading.load_checkpoint_lazily(filename)
        check_compatibility(saved, trainer.get_model(), trainer.task, filename)
        saved_config = saved.get("cfg")
    try:
        state = original(trainer, filename, *args, **kwargs)
    except Exception as error:
        cause = error.__context__ if type(error) is Exception else error  # fairseq's own says that it "cannot load"
        if isinstance(cause, InputError | OSError):
            raise cause from None
        reason = (str(cause).splitlines() or [""])[:2][-1].strip(" \t.") or type(cause).__name__
        raise InputError(
            f"{filename} does not fit this run: {reason}. Give the options that it was made with, or another "
            "--save-dir (checkpoint.save_dir) if it is another run's"
        ) from error
    if state:
        restore_training_state(trainer, filename, saved_config, state)
    return state


@exit_with_one_line()
def _call_main(run_worker: Callable, original: Callable, cfg: Any, main: Callable, *args: Any, **kwargs: Any) -> Any:
    """Check the configuration, lock the save_dir, and run every worker in `run_worker`.

    In fairseq more workers than devices and Ctrl-C end in a traceback, two trainings write into one directory, and
    --bf16 on the command line means a TPU. Remove it once fairseq checks these, and has a hook for the begin
    of a worker.
    """
    settings.check_command(cfg)
    if cfg.common.bf16 and cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        cfg.common.tpu = False
    try:
        with lock_save_dir(cfg):
            return original(cfg, functools.partial(run_worker, main), *args, **kwargs)
    except ProcessExitedException as error:  # the worker has reported why
        if in_sweep():
            raise InputError(f"a worker ended with exit code {error.exit_code}, see above") from None
        raise SystemExit(error.exit_code) from None


def _all_gather_list(original: Callable, data: Any, group: Any = None, **kwargs: Any) -> list[Any]:
    """Gather a picklable object from every worker, also without a GPU: two workers could not validate a regression.

    Remove it once fairseq's all_gather_list works on tensors in the memory of the CPU with gloo.
    """
    group = distributed_utils.get_global_group() if group is None else group
    if dist.get_backend(group) != dist.Backend.GLOO:
        return original(data, group=group, **kwargs)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, utils.move_to_cpu(data), group=group)
    return gathered


def _merge_with_parent(original: Callable, schema: Any, *args: Any, **kwargs: Any) -> Any:
    """Report an option that a dataclass does not know in one line.

    fairseq checks Hydra's options against its dataclasses too late for Hydra to do so. Remove it once it composes with
    them.
    """
    try:
        return original(schema, *args, **kwargs)
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        if isinstance(error, ConfigKeyError):
            raise InputError(f"unknown option '{key}'{did_you_mean(key, schema.__dataclass_fields__)}") from None
        raise InputError(f"option '{key}': {first_line(error)}") from None


def _excepthook(
    original: Callable, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an InputError that nobody catches in one line. Remove it once fairseq-train does so."""
    if issubclass(kind, InputError):
        print(f"error: {error}", file=sys.stderr)
    elif kind is ValueError and str(error).startswith("Cannot combine --fp16 and --tpu"):  # which to it --bf16 means
        print("error: --fp16 and --bf16 exclude each other: give one of them alone", file=sys.stderr)
    else:
        original(kind, error, traceback)
