"""How much of what a training computes is text: the rest is padding, since a batch is as long as its longest row."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from lln_fairseq.training.tensorboard import is_first_worker

WASTE = 0.05  # from which on something is advised

logger = logging.getLogger(__name__)


class PaddingReport:
    """Goes in front of a fairseq task; says it once, when the batches of a training are made."""

    _said = False

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        batches = super().get_batch_iterator(dataset, *args, **kwargs)
        if dataset is self.datasets.get("train") and not self._said and is_first_worker():
            self._said = True
            share, tokens = share_of_text(lengths(dataset), batches.frozen_batches)
            line = f"padding: {share:.1%} of the {tokens} tokens that an epoch computes are text"
            if 1 - share > WASTE and (advice := self.advice()):
                line += f"; less is wasted with {advice}"
            logger.info(line)
        return batches

    def advice(self) -> str:
        """The options with which less is wasted; "" where the task has them already."""
        return ""


def lengths(dataset: Any) -> list[np.ndarray]:
    """The lengths of each row, for each of its inputs."""
    inner = dataset
    while not hasattr(inner, "lengths") and hasattr(inner, "dataset"):
        inner = inner.dataset
    found = inner.lengths if hasattr(inner, "lengths") else dataset.sizes
    return [np.asarray(part) for part in (found if isinstance(found, list) else [found])]


def share_of_text(sizes: Sequence[np.ndarray], batches: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Real tokens over computed ones, in (0, 1], and how many are computed."""
    real = computed = 0
    rows = np.fromiter(map(len, batches), dtype=np.int64, count=len(batches))
    order = np.concatenate([np.asarray(batch, dtype=np.int64) for batch in batches])
    starts = np.cumsum(rows) - rows
    for part in sizes:
        found = part[order].astype(np.int64)
        real += int(found.sum())
        computed += int((np.maximum.reduceat(found, starts) * rows).sum())
    return (real / computed if computed else 1.0), computed
