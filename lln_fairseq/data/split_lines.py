"""Split lines of text that are longer than a sample."""

import numpy as np
from fairseq.data import BaseWrapperDataset
from torch import Tensor


class ResizedDataset(BaseWrapperDataset):
    """A data set whose `sizes` are not those of the data set that it wraps."""

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])


class SplitLines(ResizedDataset):
    """A data set of lines in which a line of more than `limit` tokens is several items, one after the other.

    No token is lost: the tail of a long paragraph becomes an item of its own and begins the next block of tokens.
    fairseq makes the whole paragraph one block instead, which is then skipped in training and fatal in validation.
    No piece is a single token: sample_break_mode complete_doc takes such a line for the end of a document.
    """

    def __init__(self, dataset: BaseWrapperDataset, limit: int) -> None:
        super().__init__(dataset)
        self.limit = limit
        lengths = np.asarray(dataset.sizes, dtype=np.int64)
        pieces = np.maximum(-(-lengths // limit), 1)
        self._line = np.repeat(np.arange(len(lengths)), pieces)
        number = np.arange(len(self._line)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._start, whole = number * limit, lengths[self._line]
        lonely = (number > 0) & (whole - self._start == 1)
        self._start[lonely] -= 1
        last = number == pieces[self._line] - 1
        following = np.append(self._start[1:], 0)
        self._end = np.where(last, whole, following)

    def __getitem__(self, index: int) -> Tensor:
        return self.dataset[self._line[index]][self._start[index] : self._end[index]]

    def __len__(self) -> int:
        return len(self._line)

    @property
    def sizes(self) -> np.ndarray:
        return self._end - self._start

    @property
    def supports_prefetch(self) -> bool:
        return False
