"""Patch fairseq 0.12 in the places where it has no hook.

`install` lists every function of fairseq that is replaced, in the order in which a run meets them: its line in
ve-fairseq 0.12.3, what fairseq does wrong, and the test that shows it. If the test fails because fairseq no longer does
anything wrong, remove the patch. `original`, the first argument of every replacement, is fairseq's function.
"""

import copyreg
import functools
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import fairseq.dataclass.utils
import torch.distributed as dist
from fairseq import checkpoint_utils
from fairseq.dataclass.constants import ChoiceEnum, StrEnum, StrEnumMeta
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.tasks.fairseq_task import StatefulContainer
from fairseq.trainer import Trainer
from fairseq.utils import move_to_cpu
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

    # fairseq/dataclass/utils.py:487: an unknown option, or a value of the wrong type, ends in a traceback.
    # tests/models/test_lln_roberta.py::test_hydra_reports_bad_input_without_traceback
    _wrap(fairseq.dataclass.utils, "merge_with_parent", _merge_with_parent)

    # fairseq_cli/train.py:574: fairseq-train ends in a traceback for what a user can fix. Its exceptions end up here.
    # tests/training/test_bad_input.py::test_fp16_and_bf16_exclude_each_other
    _wrap(sys, "excepthook", _excepthook)

    # fairseq/distributed/utils.py:368: two runs write into one directory, and loader threads abort the process.
    # tests/fairseq_compat/test_fairseq_failures.py::test_prefetching_threads_end_with_training
    _wrap(distributed_utils, "call_main", functools.partial(start.start_run, run_worker))

    # fairseq/checkpoint_utils.py:208: a missing --restore-file is ignored, and a complete run makes another update.
    # tests/fairseq_compat/test_fairseq_failures.py::test_complete_run_makes_no_more_updates
    _wrap(checkpoint_utils, "load_checkpoint", start.prepare_training)

    # fairseq/trainer.py:465: a run resumes with other settings and data, or with the wrong batches of an epoch.
    # tests/training/test_run_identity.py::test_resume_rejects_changed_settings
    _wrap(Trainer, "load_checkpoint", start.restore_checkpoint)

    # fairseq/checkpoint_utils.py:306: any class is unpickled, and options in a checkpoint are evaluated as Python.
    # tests/checkpoints/test_reading.py::test_code_in_a_checkpoint_does_not_run
    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)

    # fairseq/distributed/utils.py:595: several workers of a regression need CUDA, and fail with long logging outputs.
    # tests/training/test_two_workers.py::test_two_workers_correlate_all_rows_of_a_regression
    _wrap(distributed_utils, "all_gather_list", _all_gather_list)

    # fairseq/trainer.py:797: an update without masks has the loss NaN, and a run that NaN stops does not say where.
    # tests/tasks/test_one_mask.py::test_run_on_short_rows_has_finite_losses_and_resumes_exactly
    _wrap(Trainer, "train_step", start.train_step)

    # fairseq/trainer.py:1391: a batch for which the memory does not suffice is dropped, after a table of 20 lines.
    # tests/training/test_bad_input.py::test_batch_that_does_not_fit_into_memory_ends_the_run
    _wrap(Trainer, "_log_oom", _log_oom)

    # fairseq/checkpoint_utils.py:578: a full disk leaves a part of a checkpoint, and three tracebacks.
    # tests/training/test_runs.py::test_full_disk_keeps_last_checkpoint
    _wrap(checkpoint_utils, "torch_persistent_save", saving.save)

    # fairseq/file_io.py:71: a kill while checkpoint_last.pt is copied leaves half of it.
    # tests/training/test_runs.py::test_kill_during_copy_keeps_old_checkpoint
    _wrap(PathManager, "copy", saving.atomic_copy)

    # fairseq/tasks/fairseq_task.py:40: a task cannot be copied or pickled, because the recursion is too deep.
    # tests/fairseq_compat/test_fairseq_failures.py::test_task_is_copied_and_pickled
    _wrap(StatefulContainer, "__getattr__", _get_task_state)
    # fairseq/dataclass/constants.py:32: all classes of ChoiceEnum are called "Choices", and pickle does not find them.
    copyreg.pickle(StrEnumMeta, _reduce_enum_class)


def _wrap(owner: Any, name: str, replacement: Callable) -> None:
    """Replace the function `name` of a module or class; its attribute `__wrapped__` is the original function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, patched)


def _load_checkpoint_to_cpu(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Load a checkpoint without executing code from it. `original` is not called."""
    return reading.load_checkpoint(*args, **kwargs)


def _all_gather_list(original: Callable, data: Any, group: Any = None, max_size: int = 0) -> list[Any]:
    """Return the `data` of every worker, with tensors on the CPU. `original` is not called, and max_size is ignored.

    fairseq always gathers through a tensor of max_size bytes on a GPU.
    """
    if group is None:
        group = distributed_utils.get_global_group()
    gathered: list[Any] = [None] * distributed_utils.get_world_size(group)
    dist.all_gather_object(gathered, move_to_cpu(data), group)
    return gathered


@exit_with_one_line()
def _merge_with_parent(original: Callable, schema: Any, *args: Any, **kwargs: Any) -> Any:
    """Merge options into a dataclass, and raise a UserError for an unknown option or a value of the wrong type.

    fairseq merges the options after Hydra has composed them, which is too late for Hydra to report such an error.
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
    """Print an uncaught UserError in one line, and pass all other exceptions to `original`.

    If --fp16 and --bf16 are both set, fairseq-train raises a ValueError whose message is about TPUs. A message about
    the two options is printed instead of it.
    """
    if issubclass(kind, UserError):
        print(f"error: {error}", file=sys.stderr)
    elif kind is ValueError and str(error).startswith("Cannot combine --fp16 and --tpu"):
        print("error: --fp16 and --bf16 cannot be combined: set only one of them", file=sys.stderr)
    else:
        original(kind, error, traceback)


def _log_oom(original: Callable, trainer: Trainer, error: RuntimeError) -> None:
    """Log the table of a GPU's memory only at level DEBUG. `train_step` says what the user can do."""
    if logging.getLogger("fairseq.trainer").isEnabledFor(logging.DEBUG):
        original(trainer, error)


def _get_task_state(original: Callable, container: StatefulContainer, name: str) -> Any:
    """Return an entry of a task's state, and raise AttributeError if the container has not been filled yet.

    Copying and unpickling create a container without its dictionaries and look for methods in it. fairseq then looks
    for the dictionary in the dictionary.
    """
    if name in ("_state", "_factories"):
        raise AttributeError(name)
    return original(container, name)


def _reduce_enum_class(enum_class: type[StrEnum]) -> Any:
    """Return what pickle needs to find or create a class of fairseq's enumerations. copyreg calls this."""
    if enum_class.__qualname__ != "Choices":
        return enum_class.__qualname__
    return ChoiceEnum, ([member.value for member in enum_class],)
