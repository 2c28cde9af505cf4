"""Compute the metrics of GLUE.

Accuracy, F1 and the Matthews correlation are computed from counts that are summed over batches and workers. Pearson's
and Spearman's correlations need all predictions in one process.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata
from torch import Tensor


@dataclass
class ClassCounts:
    """Counts from which the metrics of a classification are computed. The counts of several batches can be added.

    Attributes:
        hits: (classes,), the number of rows of class k that were predicted as k, for each k.
        predicted: (classes,), the number of rows that were predicted as k.
        actual: (classes,), the number of rows of class k.
    """

    hits: Tensor
    predicted: Tensor
    actual: Tensor

    @classmethod
    def from_predictions(cls, predictions: Tensor, targets: Tensor, num_classes: int) -> "ClassCounts":
        """Count the predictions of a batch or a data set. The counts are int64, on the device of the predictions.

        The predicted and the actual classes are int64 (rows,), from 0 to num_classes - 1.
        """
        hits = targets[predictions == targets]
        return cls(
            hits=hits.bincount(minlength=num_classes),
            predicted=predictions.bincount(minlength=num_classes),
            actual=targets.bincount(minlength=num_classes),
        )

    def __add__(self, other: "ClassCounts") -> "ClassCounts":
        return ClassCounts(self.hits + other.hits, self.predicted + other.predicted, self.actual + other.actual)

    @property
    def rows(self) -> int:
        return int(self.actual.sum())

    @property
    def accuracy(self) -> float:
        """The fraction of rows that were predicted correctly, in [0, 1]. It is 0 if there are no rows."""
        return float(self.hits.sum()) / max(self.rows, 1)

    @property
    def majority(self) -> float:
        """The accuracy of always predicting the most frequent class, in [0, 1]. It is 0 if there are no rows."""
        return float(self.actual.max()) / max(self.rows, 1)

    @property
    def f1(self) -> float:
        """The F1 score of class 1, 2 tp / (2 tp + fp + fn), in [0, 1].

        It is 0 if class 1 neither occurs nor is predicted. There must be at least two classes.
        """
        total = float(self.predicted[1] + self.actual[1])
        if total == 0:
            return 0.0
        return 2 * float(self.hits[1]) / total

    @property
    def mcc(self) -> float:
        """The Matthews correlation for any number of classes (Gorodkin's R_K), in [-1, 1].

        It is 0 if all rows have the same class, or if the same class is predicted for all rows.
        """
        hits = self.hits.double()
        predicted = self.predicted.double()
        actual = self.actual.double()
        rows = actual.sum()
        covariance = hits.sum() * rows - predicted @ actual
        spread = ((rows**2 - predicted @ predicted) * (rows**2 - actual @ actual)).sqrt()
        if spread > 0:
            return float(covariance / spread)
        return 0.0  # this includes a NaN, if rounding makes the product under the root negative


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation of x (rows,) and y (rows,), computed in float64.

    If x or y is constant, or has a NaN or infinite value, return 0. The result is not clipped, so rounding can make it
    slightly exceed ±1.
    """
    x = np.asarray(x, dtype=np.float64)
    y = np.asarray(y, dtype=np.float64)
    if (x == x[0]).all() or (y == y[0]).all():  # the rounded mean can differ from the constant
        return 0.0
    x = x - x.mean()
    y = y - y.mean()
    spread = np.sqrt((x @ x) * (y @ y))
    if spread > 0:
        return float(x @ y / spread)
    return 0.0


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's correlation of x (rows,) and y (rows,): Pearson's correlation of their ranks.

    Equal values get the average of their ranks. If x or y is constant, return 0.
    """
    return pearson(rankdata(x), rankdata(y))
