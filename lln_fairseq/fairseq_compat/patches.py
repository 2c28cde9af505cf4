"""The places where fairseq has no hook for what its user must know: every patch of the host is in this file.

    PathManager.copy            a kill while a checkpoint is copied left half a checkpoint_last.pt
    torch_persistent_save       a full disk ended in three tracebacks
    load_checkpoint             asked-for files that do not exist, and other settings for the same run, were ignored; a
                                run that was complete, or had stopped early, trained on when it was started again;
                                what turns text into the model's ids stayed with the data
    load_checkpoint_to_cpu      built whatever the file's configuration named, and its options were evaluated
    Trainer.load_checkpoint     what does not fit ended in pages about "the architectures"; in the middle of an epoch
                                other batches were counted as if they were the same; --ema-update-freq was not
                                resumed exactly
    Trainer.train_step          NaN and the minimum loss scale did not say where and what to try
    call_main                   more workers than devices and Ctrl-C ended in a traceback; --bf16 meant a TPU; two
                                trainings in one directory
    all_gather_list             needed a GPU: two workers without one could not validate a regression
    WandBProgressBarWrapper     what wandb cannot do ended in a traceback; without wandb nothing was logged
    merge_with_parent           an option that a dataclass does not know ended in a traceback
    get_valid_stats             by run_state.begin: a metric that there is not ended in a KeyError
    sys.excepthook              an InputError that nobody catches ended in a traceback

Each patch does what the host does and adds to it; `install` may be called again.
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
from lln_fairseq.checkpoints import reading as checkpoints
from lln_fairseq.checkpoints import saving
from lln_fairseq.checkpoints.compatibility import check_fit
from lln_fairseq.checkpoints.config import KNOWN
from lln_fairseq.checkpoints.lock import one_training
from lln_fairseq.checkpoints.run_tokenizer import keep_tokenizer
from lln_fairseq.errors import InputError, first_line, in_sweep, one_line_instead_of_a_traceback
from lln_fairseq.training import nan_report as nan
from lln_fairseq.training import run_state, settings, tensorboard_run
from lln_fairseq.training import wandb as wandb_run
from lln_fairseq.training.position import position
from lln_fairseq.training.run_identity import check_same_run, origin

logger = logging.getLogger(__name__)


def install(worker: Callable) -> None:
    """Puts the patches in place, once. `worker(main, cfg, ...)` runs in each worker of a training in place of main."""
    if hasattr(PathManager.copy, "__wrapped__"):
        return
    checkpoints.allow_fairseq_checkpoints()
    PathManager.copy = staticmethod(functools.wraps(PathManager.copy)(saving.atomic_copy))
    _wrap(checkpoint_utils, "torch_persistent_save", saving.save)
    _wrap(checkpoint_utils, "load_checkpoint", _begin)
    _wrap(
        checkpoint_utils, "load_checkpoint_to_cpu", lambda original, *args, **kw: checkpoints.load_to_cpu(*args, **kw)
    )
    _wrap(Trainer, "load_checkpoint", _load)
    _wrap(Trainer, "train_step", nan.step)
    _wrap(progress_bar.WandBProgressBarWrapper, "__init__", wandb_run.start)
    _wrap(distributed_utils, "all_gather_list", _gather)
    _wrap(distributed_utils, "call_main", functools.partial(_call_main, worker))
    _wrap(fairseq.dataclass.utils, "merge_with_parent", _merge)
    _wrap(sys, "excepthook", _show)


def _wrap(owner: Any, name: str, around: Callable) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, patched)


def _begin(original: Callable, cfg: Any, trainer: Trainer, **kwargs: Any) -> Any:
    # fairseq-train calls this first of all with a complete trainer: here the whole configuration is known.
    settings.split_global_batch(trainer.cfg)
    settings.check(trainer.cfg)
    wandb_run.check_wandb(trainer.cfg)
    check_same_run(trainer.cfg)
    saves = trainer.is_data_parallel_master and not cfg.no_save
    if saves and hasattr(trainer.task, "origin"):
        trainer.task.origin = origin(trainer.cfg)
    loaded = original(cfg, trainer, **kwargs)
    if saves and getattr(trainer.cfg.task, "_name", None) in KNOWN["task"]:
        keep_tokenizer(trainer.task, cfg.save_dir)
    state, batches = loaded
    seconds = (state or {}).get("previous_training_time", 0)
    if reason := run_state.complete(trainer, seconds, batches.next_epoch_idx):
        logger.info(f"{cfg.save_dir} is complete: {reason}")
        trainer.cfg.optimization.max_epoch = -1
        if saves:
            saving.remove_superseded(cfg)
    else:
        tensorboard_run.write_configuration(trainer.cfg)
    return loaded


def _load(original: Callable, trainer: Trainer, filename: str, *args: Any, **kwargs: Any) -> Any:
    if os.path.isfile(filename):
        check_fit(filename, trainer.get_model(), trainer.task)
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
        _take_up(trainer, filename, state)
        if trainer.cfg.ema.store_ema:  # fairseq counts the updates since the last average from 0 again
            trainer.ema.update_freq_counter = trainer.get_num_updates() % max(trainer.cfg.ema.ema_update_freq, 1)
    return state


def _take_up(trainer: Trainer, filename: str, state: dict[str, Any]) -> None:
    """Changes what fairseq takes up next of a checkpoint's state: scores, and the position in the epoch."""
    cfg, iterator = trainer.cfg.checkpoint, state["train_iterator"]
    if cfg.reset_dataloader or filename == cfg.finetune_from_model:  # then it takes up neither
        return
    name = type(trainer.task).__name__
    ours = state.get(name, {})
    if not isinstance(ours, dict):  # fairseq asks whether it is true, which a tensor cannot say
        raise InputError(f"the checkpoint is damaged: its {name} holds no state of a task")
    if cfg.reset_meters:
        ours.pop("patience", None)
    complete = run_state.complete(trainer, state.get("previous_training_time", 0), iterator["epoch"])
    done = iterator["iterations_in_epoch"]
    iterator["iterations_in_epoch"] = 0 if complete else position(filename, done, trainer.cfg)


@one_line_instead_of_a_traceback()
def _call_main(worker: Callable, original: Callable, cfg: Any, main: Callable, *args: Any, **kwargs: Any) -> Any:
    settings.check_command(cfg)
    if cfg.common.bf16 and cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        cfg.common.tpu = False
    try:
        with one_training(cfg):
            return original(cfg, functools.partial(worker, main), *args, **kwargs)
    except ProcessExitedException as error:  # a worker has said why
        if in_sweep():
            raise InputError(f"a worker ended with exit code {error.exit_code}, see above") from None
        raise SystemExit(error.exit_code) from None


def _gather(original: Callable, data: Any, group: Any = None, **kwargs: Any) -> list[Any]:
    """Gather a picklable object from every worker; fairseq's own function can do it only through GPU memory."""
    group = distributed_utils.get_global_group() if group is None else group
    if dist.get_backend(group) != dist.Backend.GLOO:
        return original(data, group=group, **kwargs)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, utils.move_to_cpu(data), group=group)
    return gathered


def _merge(original: Callable, schema: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq checks Hydra's options against its dataclasses too late for Hydra to print an error in one line."""
    try:
        return original(schema, *args, **kwargs)
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        if isinstance(error, ConfigKeyError):
            raise InputError(f"unknown option '{key}'{did_you_mean(key, schema.__dataclass_fields__)}") from None
        raise InputError(f"option '{key}': {first_line(error)}") from None


def _show(original: Callable, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, InputError):
        print(f"error: {error}", file=sys.stderr)
    elif kind is ValueError and str(error).startswith("Cannot combine --fp16 and --tpu"):  # which to it --bf16 means
        print("error: --fp16 and --bf16 exclude each other: give one of them alone", file=sys.stderr)
    else:
        original(kind, error, traceback)
