"""What fairseq keeps of a run in its own functions: the best score, how long there was no better one, the writers.

It is the process's: a second training in it, as in a sweep, would go on with the scores of the first and write into its
curves. And it is gone with the process: a training that had stopped early would train on when it is started again.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from fairseq import checkpoint_utils
from fairseq.logging import progress_bar

from lln_fairseq.errors import InputError

PATIENCE = ("best", "num_runs")  # of fairseq's should_stop_early

_stop_early: Any = None


class Reported(OrderedDict):
    """The statistics of a validation, by name. Raises: InputError for one that there is not."""

    def __missing__(self, name: str) -> NoReturn:
        raise InputError(
            f"checkpoint.best_checkpoint_metric is {name}, which the validation does not report; it does: "
            f"{', '.join(self)}"
        )


def begin(main: Callable) -> None:
    """Forgets the run before this one. `main` is fairseq's; its module has what stops early and validates."""
    global _stop_early
    _stop_early = main.__globals__.get("should_stop_early")
    for function, name in ((checkpoint_utils.save_checkpoint, "best"), *((_stop_early, name) for name in PATIENCE)):
        if hasattr(function, name):
            delattr(function, name)
    statistics = main.__globals__.get("get_valid_stats")
    if statistics and not hasattr(statistics, "__wrapped__"):
        main.__globals__["get_valid_stats"] = functools.wraps(statistics)(functools.partial(_reported, statistics))
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()


def _reported(original: Callable, cfg: Any, trainer: Any, stats: dict[str, Any], *args: Any) -> dict[str, Any]:
    return original(cfg, trainer, Reported(stats), *args)


def patience() -> dict[str, float]:
    """The best score so far and the number of validations since, empty before the first one: for a checkpoint."""
    return {name: getattr(_stop_early, name) for name in PATIENCE if hasattr(_stop_early, name)}


def restore_patience(saved: dict[str, float]) -> None:
    for name in PATIENCE:
        if _stop_early is not None and isinstance(saved.get(name), int | float):
            setattr(_stop_early, name, saved[name])


def complete(trainer: Any, seconds: float, next_epoch: int) -> str:
    """Why there is nothing left to train of a run that has been restored, `seconds` after its begin; empty where there
    is."""
    cfg, updates = trainer.cfg, trainer.get_num_updates()
    limits = cfg.optimization
    if 0 < limits.max_update <= updates:
        return f"{updates} updates"
    if 0 < limits.max_epoch < next_epoch:
        return f"{updates} updates in {limits.max_epoch} epochs"
    if updates and 0 < 3600 * limits.stop_time_hours < seconds:
        return f"{updates} updates in {limits.stop_time_hours:g} hours"
    if 0 < cfg.checkpoint.patience <= patience().get("num_runs", 0):
        return f"stopped early at update {updates}, without a better score in {cfg.checkpoint.patience} validations"
    return ""
