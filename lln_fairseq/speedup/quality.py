"""How good the outputs of a model are on rows, compared with those of the original."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from lln_fairseq.linearize.attention_transfer import similarity
from lln_fairseq.scores import spearman

RESAMPLINGS = 1000
CUTOFF = 10  # of nDCG


class Metric(ABC):
    """Scores outputs on the rows of a split, from 0 to 100.

    Attributes:
        name: of the score.
        original: the outputs of the original model for the rows, (rows, outputs).
        limit: the largest drop from the original's score that is accepted.
    """

    name: str

    def __init__(self, original: Tensor, limit: float) -> None:
        self.original = original
        self.limit = limit

    @abstractmethod
    def score(self, outputs: Tensor) -> float:
        """Return the score of the outputs (rows, outputs); NaN if they are not finite."""

    @abstractmethod
    def half_width(self, outputs: Tensor) -> float:
        """Return half the width of the 95 % interval of the drop from the original's score."""

    def drop(self, outputs: Tensor) -> float:
        """Return the points by which the score is below the original's; NaN if the outputs are not finite."""
        return self.score(self.original) - self.score(outputs)


class RowMetric(Metric):
    """A score that is the mean of a value for each row, or for each group of rows."""

    @abstractmethod
    def values(self, outputs: Tensor) -> np.ndarray:
        """Return a value from 0 to 100 for every row or group."""

    def score(self, outputs: Tensor) -> float:
        if not outputs.isfinite().all():
            return float("nan")
        return float(self.values(outputs).mean())

    def half_width(self, outputs: Tensor) -> float:
        differences = self.values(self.original) - self.values(outputs)
        return float(1.96 * differences.std() / len(differences) ** 0.5)


class Accuracy(RowMetric):
    """The share of rows whose largest output is that of their label, whose numbers are `targets`, (rows,)."""

    name = "accuracy"

    def __init__(self, original: Tensor, limit: float, targets: np.ndarray) -> None:
        super().__init__(original, limit)
        self.targets = targets

    def values(self, outputs: Tensor) -> np.ndarray:
        return 100.0 * (outputs.argmax(dim=-1).numpy() == self.targets)

    def half_width(self, outputs: Tensor) -> float:
        """Return half the width of Agresti and Min's 95 % interval (2005), which is not 0 if no row changed.

        They count two rows more: half a row for each of the four ways in which two models can be right and wrong.
        """
        differences = (self.values(self.original) - self.values(outputs)) / 100
        rows = len(differences) + 2
        variance = (np.abs(differences).sum() + 1) / rows - (differences.sum() / rows) ** 2
        return float(196 * (variance / rows) ** 0.5)


class Agreement(Accuracy):
    """The share of rows for which the prediction is the original's."""

    name = "agreement"

    def __init__(self, original: Tensor, limit: float) -> None:
        super().__init__(original, limit, original.argmax(dim=-1).numpy())


class Ndcg(RowMetric):
    """nDCG@10 of the rows of each group, such as the passages of a query, ranked by the output.

    Groups without a relevant row have no value. `relevances` are the labels, and `groups` the groups of the rows.
    """

    name = f"nDCG@{CUTOFF}"

    def __init__(self, original: Tensor, limit: float, relevances: np.ndarray, groups: Sequence[str]) -> None:
        super().__init__(original, limit)
        self.relevances = relevances
        names = np.asarray(groups)
        self.members = []  # the numbers of the rows of each group
        for group in dict.fromkeys(groups):
            rows = np.flatnonzero(names == group)
            if relevances[rows].max() > 0:
                self.members.append(rows)

    def values(self, outputs: Tensor) -> np.ndarray:
        scores = outputs.view(-1).numpy()
        values = []
        for rows in self.members:
            relevances = self.relevances[rows]
            ranked = relevances[np.argsort(-scores[rows], kind="stable")]
            values.append(100 * _gain(ranked) / _gain(np.sort(relevances)[::-1]))
        return np.array(values)


def _gain(relevances: np.ndarray) -> float:
    """Return the discounted cumulative gain of the first CUTOFF rows, which are in the order of their rank."""
    first = relevances[:CUTOFF]
    return float((first / np.log2(np.arange(len(first)) + 2)).sum())


class Correlation(Metric):
    """100 times Spearman's correlation of the output with numbers: labels, or the original's outputs."""

    name = "Spearman"

    def __init__(self, original: Tensor, limit: float, targets: np.ndarray) -> None:
        super().__init__(original, limit)
        self.targets = targets

    def score(self, outputs: Tensor) -> float:
        if not outputs.isfinite().all():
            return float("nan")
        return 100 * spearman(outputs.view(-1).numpy(), self.targets)

    def half_width(self, outputs: Tensor) -> float:
        """Return 1.96 standard deviations of the drop over RESAMPLINGS resamplings of the rows."""
        generator = np.random.default_rng(0)
        original = self.original.view(-1).numpy()
        own = outputs.view(-1).numpy()
        drops = []
        for _ in range(RESAMPLINGS):
            rows = generator.integers(len(own), size=len(own))
            targets = self.targets[rows]
            drops.append(100 * (spearman(original[rows], targets) - spearman(own[rows], targets)))
        return float(1.96 * np.std(drops))


class Cosine(RowMetric):
    """100 times the cosine between the vector of a text and the original's."""

    name = "cosine"

    def values(self, outputs: Tensor) -> np.ndarray:
        cosines = nn.functional.cosine_similarity(outputs.double(), self.original.double(), dim=-1)
        return 100 * cosines.numpy()

    def same_neighbor(self, outputs: Tensor) -> float:
        """Return the share of texts, from 0 to 100, whose nearest neighbor is the same as with the original."""
        return 100 * similarity(outputs, self.original)[1]


def rows_needed(rows: int, half_width: float, limit: float) -> int:
    """Return how many rows would make the interval as narrow as `limit`."""
    return int(np.ceil(rows * (half_width / limit) ** 2))
