"""The rows of a sentence prediction task, as its classifier sees them, in random batches for training."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.errors import InputError, first_line

# The rows of a batch are drawn from rows of similar length with about this many times as many tokens.
GROUP_BATCHES = 8


class TaskRows:
    """The rows of a split of a sentence prediction task, which can be drawn in batches of rows of similar length."""

    def __init__(self, task: Any, split: str, longest: int) -> None:
        """Load a split.

        Args:
            task: the task of the classifier
            split: "train" or "valid"
            longest: the maximum number of tokens that the model accepts; longer rows stay in the split

        Raises: InputError if the split is missing, damaged or empty, has no labels, or has no row of at most `longest`
            tokens.
        """
        self.split = split
        self.longest = longest
        self.directory = task.cfg.data
        self.pad = task.source_dictionary.pad()
        try:
            self.dataset = task.load_dataset(split)
        except InputError:
            raise
        except Exception as error:  # fairseq's readers raise many kinds of exceptions on damaged files
            raise InputError(f"cannot load split '{split}' of {self.directory}: {first_line(error)}") from error
        if len(self.dataset) == 0:
            raise InputError(f"{self.directory} has no row in its split '{split}'")
        if "target" not in self.dataset[0]:
            raise InputError(f"split '{split}' of {self.directory} has no labels; prepare the data again")
        self.lengths = np.maximum.reduce([np.asarray(sizes) for sizes in self.dataset.sizes])
        if self.lengths.min() > longest:
            raise InputError(f"{self.directory} has no row of at most {longest} tokens in its split '{split}'")
        self.order = self.lengths.argsort(kind="stable")  # the shortest row first
        self.ends = self.lengths[self.order].cumsum()  # tokens up to and including each row in this order

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)

    def sample(self, numbers: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Return the rows with these numbers as a fairseq batch, padded at the end, with `net_input` and `target`."""
        sample: dict[str, Any] = self.dataset.collater([self.dataset[int(number)] for number in numbers])
        return sample

    def draw(self, tokens: int, longest: int, generator: torch.Generator) -> dict[str, Any]:
        """Draw rows of similar length at random, each eligible row with about the same probability.

        Args:
            tokens: the maximum number of tokens including padding; at least one row is drawn
            longest: rows with more tokens than this are not eligible

        Returns: the batch, as `sample`
        """
        count = int(np.searchsorted(self.lengths[self.order], longest, side="right"))
        ends = self.ends[:count]
        total = int(ends[-1])
        # The rows are divided into groups with as many tokens each. A random token chooses the group: a batch of long
        # rows has fewer rows, so it must be drawn more often.
        groups = max(1, total // (GROUP_BATCHES * tokens))
        token = int(torch.randint(total, (), generator=generator))
        end_of_row = int(ends[np.searchsorted(ends, token, side="right")])
        group = (end_of_row - 1) * groups // total
        first = int(np.searchsorted(ends, _ceil_divide(group * total, groups), side="right"))
        stop = int(np.searchsorted(ends, _ceil_divide((group + 1) * total, groups), side="right"))
        rows = max(1, tokens // int(self.lengths[self.order[stop - 1]]))
        chosen = first + torch.randperm(stop - first, generator=generator)[:rows]
        return self.sample(self.order[chosen.numpy()])

    def mixed_batch(self, tokens: int, longest: int, generator: torch.Generator) -> Tensor:
        """Draw rows as `draw` does, and return the token ids (B, N) that the encoder reads.

        If the classifier encodes the two texts of a row separately, each text is a sequence of its own.
        """
        return encoder_tokens(self.draw(tokens, longest, generator), self.pad)

    def batches(self, numbers: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
        """Yield row numbers in batches of rows of similar length.

        A batch has at most `tokens` tokens including padding, unless a single row is longer.
        """
        ordered = numbers[self.lengths[numbers].argsort(kind="stable")]
        batch: list[int] = []
        for number in ordered:
            if batch and (len(batch) + 1) * self.lengths[number] > tokens:
                yield np.array(batch)
                batch = []
            batch.append(number)
        if batch:
            yield np.array(batch)


def _ceil_divide(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)


def encoder_tokens(sample: dict[str, Any], pad: int) -> Tensor:
    """Return the sequences of token ids (B, N) in a batch: its texts, and its second texts if they are separate."""
    tokens: Tensor = sample["net_input"]["src_tokens"]
    if "other_tokens" not in sample["net_input"]:
        return tokens
    other = sample["net_input"]["other_tokens"]
    length = max(tokens.shape[1], other.shape[1])
    padded = [F.pad(part, (0, length - part.shape[1]), value=pad) for part in (tokens, other)]
    return torch.cat(padded)
