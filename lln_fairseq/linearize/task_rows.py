"""Make batches of rows of similar length: of texts, or of a sentence prediction task as its classifier reads them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lln_fairseq.errors import UserError, first_line
from lln_fairseq.text.samples import batch_by_length

# A batch is drawn from a group of rows of similar length. The group has about this many times as many tokens.
GROUP_BATCHES = 8


class RowSampler:
    """Makes batches of rows of similar length.

    Attributes:
        lengths: the number of tokens of each row, (rows,)
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.order = lengths.argsort(kind="stable")  # the shortest row first
        self.ends = lengths[self.order].cumsum()  # tokens up to and including each row in this order

    def __len__(self) -> int:
        return len(self.lengths)

    def draw_numbers(self, tokens: int, longest: int, generator: torch.Generator) -> np.ndarray:
        """Draw a batch of distinct rows of similar length at random, and return their numbers, at least one.

        All rows of at most `longest` tokens, of which there must be one, are drawn with about the same probability. The
        batch has at most `tokens` tokens, padding included, or a single longer row.
        """
        count = int(np.searchsorted(self.lengths[self.order], longest, side="right"))
        ends = self.ends[:count]
        total = int(ends[-1])
        # The rows are divided into groups with equally many tokens. A random token chooses the group: a batch of long
        # rows has fewer rows, so it must be drawn more often.
        groups = max(1, total // (GROUP_BATCHES * tokens))
        token = int(torch.randint(total, (), generator=generator))
        end_of_row = int(ends[np.searchsorted(ends, token, side="right")])
        group = (end_of_row - 1) * groups // total
        first = int(np.searchsorted(ends, _ceil_divide(group * total, groups), side="right"))
        stop = int(np.searchsorted(ends, _ceil_divide((group + 1) * total, groups), side="right"))
        rows = max(1, tokens // int(self.lengths[self.order[stop - 1]]))
        chosen = first + torch.randperm(stop - first, generator=generator)[:rows]
        return self.order[chosen.numpy()]

    def batches(self, numbers: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
        """Yield the rows with these numbers in batches, see `batch_by_length`."""
        for batch in batch_by_length(self.lengths[numbers], tokens):
            yield numbers[batch]


class SampleRows(RowSampler):
    """Rows that were encoded as token ids: `samples` has the ids of each row, int64 (N,)."""

    def __init__(self, samples: Sequence[Tensor], pad: int) -> None:
        super().__init__(np.array([len(sample) for sample in samples]))
        self.samples = samples
        self.pad = pad

    def tokens(self, numbers: Sequence[int] | np.ndarray) -> Tensor:
        """Return rows as ids (B, N), padded at the right, in the order of their numbers."""
        return pad_sequence([self.samples[int(number)] for number in numbers], batch_first=True, padding_value=self.pad)

    def mixed_batch(self, tokens: int, longest: int, generator: torch.Generator) -> Tensor:
        """Draw a batch of ids (B, N) as `draw_numbers` does."""
        return self.tokens(self.draw_numbers(tokens, longest, generator))


class TaskRows(RowSampler):
    """The rows of one split of a sentence prediction task.

    If the classifier encodes the two texts of a row separately, the length of the row is that of the longer text.
    """

    def __init__(self, task: Any, split: str, longest: int) -> None:
        """Load a split, rows of more than `longest` tokens included.

        UserError is raised if it is missing, damaged or empty, has no labels, or has no row of at most `longest`
        tokens.
        """
        self.split = split
        self.longest = longest
        self.directory = task.cfg.data
        self.pad = task.source_dictionary.pad()
        try:
            self.dataset = task.load_dataset(split)
        except UserError:
            raise
        except Exception as error:  # fairseq's readers raise many kinds of exceptions on damaged files
            raise UserError(f"cannot load split '{split}' of {self.directory}: {first_line(error)}") from error
        if len(self.dataset) == 0:
            raise UserError(f"{self.directory} has no row in its split '{split}'")
        if "target" not in self.dataset[0]:
            raise UserError(f"split '{split}' of {self.directory} has no labels; prepare the data again")
        super().__init__(np.maximum.reduce([np.asarray(sizes) for sizes in self.dataset.sizes]))
        if self.lengths.min() > longest:
            raise UserError(f"{self.directory} has no row of at most {longest} tokens in its split '{split}'")

    def sample(self, numbers: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return rows in this order as one batch in fairseq's form, a dict with `net_input` and `target`."""
        sample: dict[str, Any] = self.dataset.collater([self.dataset[int(number)] for number in numbers])
        return sample

    def draw(self, tokens: int, longest: int, generator: torch.Generator) -> dict[str, Any]:
        """Draw a batch as `draw_numbers` does, and return it in fairseq's form, as `sample` returns it."""
        return self.sample(self.draw_numbers(tokens, longest, generator))

    def mixed_batch(self, tokens: int, longest: int, generator: torch.Generator) -> Tensor:
        """Draw a batch as `draw` does, and return only its `encoder_tokens`."""
        return encoder_tokens(self.draw(tokens, longest, generator), self.pad)


def _ceil_divide(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)


def encoder_tokens(sample: dict[str, Any], pad: int) -> Tensor:
    """Return the token ids (B, N) of a batch in fairseq's form as the encoder reads them.

    If the classifier encodes the two texts of a row separately (`other_tokens`), the second ones are further rows.
    """
    tokens: Tensor = sample["net_input"]["src_tokens"]
    if "other_tokens" not in sample["net_input"]:
        return tokens
    other = sample["net_input"]["other_tokens"]
    length = max(tokens.shape[1], other.shape[1])
    padded = [F.pad(part, (0, length - part.shape[1]), value=pad) for part in (tokens, other)]
    return torch.cat(padded)
