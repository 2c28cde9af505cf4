"""GLUE's metrics from sums that workers can add up, or from all predictions where nothing less will do.

Counts of a classification, vectors over the classes (for one row or for all of them, on any number of workers):

    hits_k       rows of class k that were predicted as k
    predicted_k  rows predicted as k
    actual_k     rows of class k
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata
from torch import Tensor


@dataclass
class Counts:
    """Sums over rows, each a vector over the classes; add two to get those of both."""

    hits: Tensor
    predicted: Tensor
    actual: Tensor

    @classmethod
    def of(cls, predictions: Tensor, targets: Tensor, num_classes: int) -> "Counts":
        """Counts of class ids (rows,) and (rows,), without leaving their device."""
        hits = targets[predictions == targets]
        return cls(*(ids.bincount(minlength=num_classes) for ids in (hits, predictions, targets)))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.hits + other.hits, self.predicted + other.predicted, self.actual + other.actual)

    @property
    def rows(self) -> int:
        return int(self.actual.sum())

    @property
    def accuracy(self) -> float:
        """Share of the rows that were predicted right, in [0, 1]."""
        return float(self.hits.sum()) / max(self.rows, 1)

    @property
    def majority(self) -> float:
        """Share of the most frequent class: the accuracy of always guessing it."""
        return float(self.actual.max()) / max(self.rows, 1)

    @property
    def f1(self) -> float:
        """F1 of class 1, 2 tp / (2 tp + fp + fn), in [0, 1]; 0 where class 1 neither occurs nor is predicted."""
        total = float(self.predicted[1] + self.actual[1])
        return 2 * float(self.hits[1]) / total if total else 0.0

    @property
    def mcc(self) -> float:
        """Matthews correlation, for any number of classes (Gorodkin's R_K), in [-1, 1]; 0 for a constant guess."""
        hits, predicted, actual = (x.double() for x in (self.hits, self.predicted, self.actual))
        rows = actual.sum()
        covariance = hits.sum() * rows - predicted @ actual
        spread = ((rows**2 - predicted @ predicted) * (rows**2 - actual @ actual)).sqrt()
        return float(covariance / spread) if spread > 0 else 0.0


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation, in [-1, 1]; 0 where one of them is constant."""
    x, y = (np.asarray(values, dtype=np.float64) for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread > 0 else 0.0


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's correlation: Pearson's of the ranks, ties at their mean rank."""
    return pearson(rankdata(x), rankdata(y))
