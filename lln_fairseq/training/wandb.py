"""Make fairseq's --wandb-project fail in one line if wandb cannot start, and give each training its own run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fairseq.logging import progress_bar

from lln_fairseq.errors import InputError, first_line

LEAVE_OUT = "or leave --wandb-project (common.wandb_project) out"


def check_wandb(cfg: Any) -> None:
    """Raise InputError if the package is missing: fairseq would say so among other lines and log nothing."""
    # without it, a folder wandb/ of earlier runs is imported as a package without content
    if cfg.common.wandb_project and not hasattr(progress_bar.wandb, "init"):
        raise InputError(f"--wandb-project needs a package that is not installed: pip install wandb, {LEAVE_OUT}")


def start(original: Callable, bar: Any, wrapped_bar: Any, *args: Any, **kwargs: Any) -> None:
    """Start a run, or continue the current one: fairseq starts one at every epoch, and leaves empty folders behind.

    Raises: InputError if wandb refuses: a version that does not fit fairseq, a missing login, ...
    """
    if progress_bar.wandb.run is not None:
        bar.wrapped_bar = wrapped_bar
        return
    try:
        original(bar, wrapped_bar, *args, **kwargs)
    except Exception as error:
        version = getattr(progress_bar.wandb, "__version__", "of an unknown version")
        reason = first_line(error).rstrip(".")
        raise InputError(f"wandb {version} does not start: {reason}. Try WANDB_MODE=offline, {LEAVE_OUT}") from error


@contextmanager
def own_run() -> Iterator[None]:
    """End the run that a training started: the next one in this process, as in a sweep, would continue it."""
    wandb = progress_bar.wandb
    before = getattr(wandb, "run", None)
    try:
        yield
    finally:
        if getattr(wandb, "run", None) is not before:
            wandb.finish()
