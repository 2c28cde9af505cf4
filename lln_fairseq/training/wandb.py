"""Report problems with fairseq's --wandb-project in one line, and give each training run its own wandb run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fairseq.logging import progress_bar

from lln_fairseq.errors import InputError, first_line

LEAVE_OUT = "or leave --wandb-project (common.wandb_project) out"


def check_wandb(cfg: Any) -> None:
    """Raise InputError if --wandb-project is set but wandb is not installed. fairseq would only log a message."""
    # Without the package, Python imports a folder wandb/ of earlier runs as an empty package.
    if cfg.common.wandb_project and not hasattr(progress_bar.wandb, "init"):
        raise InputError(f"--wandb-project needs a package that is not installed: pip install wandb, {LEAVE_OUT}")


def init_wandb(original: Callable, bar: Any, wrapped_bar: Any, *args: Any, **kwargs: Any) -> None:
    """Start a wandb run, or continue the active one. fairseq would start another run in every epoch.

    If a run is active, `original` is not called and only bar.wrapped_bar is set.

    Args:
        original: fairseq's WandBProgressBarWrapper.__init__
        bar: the progress bar to initialize
        wrapped_bar: the progress bar that it wraps
        args, kwargs: the remaining arguments of `original`

    Raises: InputError if wandb cannot start, for example without a login or in a version that fairseq does not support.
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
def finish_wandb_run() -> Iterator[None]:
    """Finish the wandb run that was started inside the `with` block, also after an exception.

    Otherwise the next training run in this process, as in a sweep, would continue it. A run that was active before the
    block stays active.
    """
    wandb = progress_bar.wandb
    previous = getattr(wandb, "run", None)
    try:
        yield
    finally:
        if getattr(wandb, "run", None) is not previous:
            wandb.finish()
