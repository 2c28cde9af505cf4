"""Split the lines of a data set that have more tokens than a sample may have."""

import numpy as np
from fairseq.data import BaseWrapperDataset
from torch import Tensor


class ResizedDataset(BaseWrapperDataset):
    """Base class of data sets that wrap another data set and change the lengths of its items.

    A subclass overrides `sizes`. With fairseq's BaseWrapperDataset alone, `num_tokens` and `size` would return the
    lengths in the wrapped data set.
    """

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])


class SplitLines(ResizedDataset):
    """Wraps a data set of lines, and splits each line of more than `limit` tokens into several consecutive items.

    fairseq would make such a line one sample, which training skips and validation rejects.

    All items of a line except the last have `limit` tokens. If only a single token remained for the last item, it gets
    one token of the item before it, because sample_break_mode=complete_doc treats an item of one token as the end of a
    document. An empty line stays one empty item.

    Args:
        dataset: the lines, each a tensor of ids (N,).
        limit: the largest number of tokens of an item, at least 2.
    """

    def __init__(self, dataset: BaseWrapperDataset, limit: int) -> None:
        super().__init__(dataset)
        self.limit = limit
        line_lengths = np.asarray(dataset.sizes, dtype=np.int64)
        pieces = np.maximum(-(-line_lengths // limit), 1)  # per line: rounded up, and an empty line is one piece
        self._line = np.repeat(np.arange(len(line_lengths)), pieces)
        first_piece = np.cumsum(pieces) - pieces
        piece_number = np.arange(len(self._line)) - np.repeat(first_piece, pieces)  # within the line

        length_of_line = line_lengths[self._line]
        self._start = piece_number * limit
        is_single_token = (piece_number > 0) & (length_of_line - self._start == 1)
        self._start[is_single_token] -= 1

        is_last = piece_number == pieces[self._line] - 1
        next_start = np.append(self._start[1:], 0)
        self._end = np.where(is_last, length_of_line, next_start)

    def __getitem__(self, index: int) -> Tensor:
        return self.dataset[self._line[index]][self._start[index] : self._end[index]]

    def __len__(self) -> int:
        return len(self._line)

    @property
    def sizes(self) -> np.ndarray:
        """The number of tokens of each item, int64 (items,)."""
        return self._end - self._start

    @property
    def supports_prefetch(self) -> bool:
        return False
