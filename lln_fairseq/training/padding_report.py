"""Report how many of the computed tokens are padding, for users whose rows have many lengths.

Every batch is as long as its longest row.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from lln_fairseq.training.worker import is_first_worker

ADVISED_PADDING = 0.05  # fraction of padding above which the report includes advice

logger = logging.getLogger(__name__)


class PaddingReport:
    """Logs once per run how many of the computed tokens are text and not padding."""

    def __init__(self) -> None:
        self._logged = False

    def log(self, dataset: Any, batches: Sequence[Sequence[int]], advice: str) -> None:
        """Log the fraction of the batches' tokens that are text. Add the advice if more than 5 % are padding.

        Only the first call in the first worker logs anything. `batches` has the row numbers of each batch.
        """
        if self._logged or not is_first_worker():
            return
        self._logged = True
        fraction, computed = text_fraction(row_lengths(dataset), batches)
        line = f"padding: {fraction:.1%} of the {computed} tokens that an epoch computes are text"
        if 1 - fraction > ADVISED_PADDING and advice:
            line += f"; to reduce padding, use {advice}"
        logger.info(line)


def row_lengths(dataset: Any) -> list[np.ndarray]:
    """Return the lengths of the rows as a list of arrays (rows,), one array per input of the model.

    A row of a task with pairs in two inputs has one length for each input. fairseq's data sets wrap each other: the
    lengths are the attribute `lengths` of the outermost data set that has it, or `dataset.sizes` if none has it.
    """
    innermost = dataset
    while not hasattr(innermost, "lengths") and hasattr(innermost, "dataset"):
        innermost = innermost.dataset
    lengths = dataset.sizes
    if hasattr(innermost, "lengths"):
        lengths = innermost.lengths
    if not isinstance(lengths, list):
        lengths = [lengths]
    return [np.asarray(array) for array in lengths]


def text_fraction(lengths: Sequence[np.ndarray], batches: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Return the fraction of text among the computed tokens, and the number of computed tokens.

    The computed tokens are the text and the padding of all batches and inputs. If all rows are empty, the result is 1.0
    and 0. `lengths` has one array (rows,) per input of the model, and `batches` the row numbers of each batch. There
    must be at least one batch, and no batch without rows.
    """
    text = 0
    computed = 0
    batch_sizes = np.fromiter(map(len, batches), dtype=np.int64, count=len(batches))
    order = np.concatenate([np.asarray(batch, dtype=np.int64) for batch in batches])
    starts = np.cumsum(batch_sizes) - batch_sizes
    for input_lengths in lengths:
        ordered = input_lengths[order].astype(np.int64)
        longest = np.maximum.reduceat(ordered, starts)
        text += int(ordered.sum())
        computed += int((longest * batch_sizes).sum())
    if computed == 0:
        return 1.0, 0
    return text / computed, computed
