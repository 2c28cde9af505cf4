"""Patch fairseq 0.12 in the places where it has no hook. `install` lists all patches.

The docstring of each patch says why the patch exists, and what fairseq would have to change so that it can be removed.
The patches of what happens before the first update are in training/start.py. `original`, an argument of every patch, is
fairseq's function. For each patch, a test shows that fairseq fails without it. Most of these tests are in
tests/fairseq_compat/test_fairseq_failures.py. If fairseq no longer fails there, remove the patch.
"""

import copyreg
import functools
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

from lln_fairseq.attention.registry import did_you_mean
from lln_fairseq.checkpoints import reading, saving
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.fairseq_compat import log_filters
from lln_fairseq.training import start
from lln_fairseq.training.exit import exit_with_one_line


def install(run_worker: Callable) -> None:
    """Install all patches of fairseq. A second call does nothing.

    run_worker(main, cfg, ...) is called in every worker where fairseq would call main(cfg, ...).
    """
    if hasattr(PathManager.copy, "__wrapped__"):
        return
    reading.allow_fairseq_checkpoints()
    log_filters.install_filters()
    PathManager.copy = staticmethod(functools.wraps(PathManager.copy)(saving.atomic_copy))
    _wrap(checkpoint_utils, "torch_persistent_save", saving.save)
    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)
    _wrap(distributed_utils, "call_main", functools.partial(start.start_run, run_worker))
    _wrap(checkpoint_utils, "load_checkpoint", start.prepare_training)
    _wrap(Trainer, "load_checkpoint", start.restore_checkpoint)
    _wrap(Trainer, "train_step", start.train_step)
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


def _load_checkpoint_to_cpu(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Load a checkpoint without executing code from it. `original` is not called.

    fairseq unpickles any class, and evaluates some options in the checkpoint's configuration as Python. Remove this
    patch once fairseq loads with weights_only and checks the types of these options.
    """
    return reading.load_checkpoint(*args, **kwargs)


@exit_with_one_line()
def _merge_with_parent(original: Callable, schema: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge options into a dataclass, and raise a UserError for an unknown option or a value of the wrong type.

    fairseq merges the options into its dataclasses after Hydra has composed them. This is too late for Hydra to report
    such an error in one line. Remove this patch once fairseq registers its dataclasses with Hydra.
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
