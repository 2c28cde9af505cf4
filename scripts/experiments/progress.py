"""Show the updates of a training and its loss in a progress bar."""

from tqdm import tqdm


def show_update(bar: tqdm, updates: int, loss: str) -> None:
    """Move the bar to `updates`, the number of completed updates, and show the current loss, which is in bits."""
    if not bar.n:
        bar.initial = updates  # the estimate of the remaining time leaves out updates of an earlier, interrupted run
    bar.set_postfix_str(f"loss {loss} bits", refresh=False)
    bar.update(updates - bar.n)
