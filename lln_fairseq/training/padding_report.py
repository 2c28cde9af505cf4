"""Report how much of what a training computes is padding: a batch is as long as its longest row."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from lln_fairseq.training.worker import is_first_worker

WASTE = 0.05  # the share of padding above which the report gives advice

logger = logging.getLogger(__name__)


class PaddingReport:
    """Log the share of text once, when the batches of a training are made."""

    def __init__(self) -> None:
        self._logged = False

    def log(self, dataset: Any, batches: Sequence[Sequence[int]], advice: str) -> None:
        """Log the share of text in the batches, and the advice if much is padding.

        Args:
            dataset: the training data
            batches: the rows of each batch
            advice: options with which less padding is computed, or ""
        """
        if self._logged or not is_first_worker():
            return
        self._logged = True
        share, tokens = share_of_text(row_lengths(dataset), batches)
        line = f"padding: {share:.1%} of the {tokens} tokens that an epoch computes are text"
        if 1 - share > WASTE and advice:
            line += f"; less is wasted with {advice}"
        logger.info(line)


def row_lengths(dataset: Any) -> list[np.ndarray]:
    """Return the length of each row, one array for each input of the model."""
    inner = dataset
    while not hasattr(inner, "lengths") and hasattr(inner, "dataset"):
        inner = inner.dataset
    found = inner.lengths if hasattr(inner, "lengths") else dataset.sizes
    if not isinstance(found, list):
        found = [found]
    return [np.asarray(lengths) for lengths in found]


def share_of_text(lengths: Sequence[np.ndarray], batches: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Return the number of real tokens over the number of computed ones, in (0, 1], and the latter.

    Args:
        lengths: the length of each row, one array for each input
        batches: the rows of each batch
    """
    real = 0
    computed = 0
    rows = np.fromiter(map(len, batches), dtype=np.int64, count=len(batches))
    order = np.concatenate([np.asarray(batch, dtype=np.int64) for batch in batches])
    starts = np.cumsum(rows) - rows
    for part in lengths:
        ordered = part[order].astype(np.int64)
        real += int(ordered.sum())
        computed += int((np.maximum.reduceat(ordered, starts) * rows).sum())
    return (real / computed if computed else 1.0), computed
