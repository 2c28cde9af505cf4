"""What belongs to one call of the model, which the encoder passes to every layer, and a layer to its attention."""

from typing import NamedTuple

import torch
from torch import Tensor


class Context(NamedTuple):
    """What an attention can know of a call, besides queries, keys and values."""

    padding: Tensor | None = None  # bool (B, N), True = padded; None if nothing is padded
    first_lengths: Tensor | None = None  # int64 (B,), tokens of the first segment, such as the question of a pair
    max_first_length: int | None = None  # no number in first_lengths is larger; None if nobody has read them

    def rows(self, part: slice) -> "Context":
        """Return the context of the sequences `part` of the batch. The bound stays the same."""
        padding = None if self.padding is None else self.padding[part]
        first_lengths = None if self.first_lengths is None else self.first_lengths[part]
        return Context(padding, first_lengths, self.max_first_length)


NO_CONTEXT = Context()


def read_batch(padding: Tensor, first_lengths: Tensor | None) -> tuple[bool, int | None]:
    """Return whether anything is padded, and the largest of first_lengths; None if it is None or has no numbers.

    The host waits once for a GPU, whatever is read. Raises ValueError if a length is negative.
    """
    values = [padding.any()]
    if first_lengths is not None and len(first_lengths):
        values += first_lengths.aminmax()
    has_padding, *lengths = torch.stack([x.to(padding.device, torch.int64) for x in values]).tolist()
    if not lengths:
        return bool(has_padding), None
    shortest, longest = lengths
    if shortest < 0:
        raise ValueError(f"first_lengths must be at least 0, got {shortest}")
    return bool(has_padding), longest
