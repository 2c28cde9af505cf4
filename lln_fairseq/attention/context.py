"""What belongs to one call of the model, which the encoder passes to every layer, and a layer to its attention."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class Context(NamedTuple):
    """What an attention can know of a call, besides queries, keys and values."""

    padding: Tensor | None = None  # bool (B, N), True = padded; None if nothing is padded
    positions: Tensor | None = None  # int64 (B, N), of the tokens in their sequence; None counts real tokens from 0
    first_lengths: Tensor | None = None  # int64 (B,), tokens of the first segment, such as the question of a pair
    group: ProcessGroup | None = None  # the workers that share the sequence, in the order of its tokens
    max_first_length: int | None = None  # no number in first_lengths is larger; None if nobody has read them

    def rows(self, part: slice) -> "Context":
        """Return the context of the sequences `part` of the batch. The workers and the bound stay the same."""
        padding = None if self.padding is None else self.padding[part]
        positions = None if self.positions is None else self.positions[part]
        first_lengths = None if self.first_lengths is None else self.first_lengths[part]
        return Context(padding, positions, first_lengths, self.group, self.max_first_length)


NO_CONTEXT = Context()


def first_segment_lengths(tokens: Tensor, eos: int) -> Tensor:
    """Return the number of tokens in the first segment of every sequence, int64 (B,), from 1 to N.

    In a pair, `<s> A </s></s> B </s>`, the first segment is `<s> A </s>`. A sequence without two adjacent </s> is not a
    pair; its first segment is its first token. The computation does not synchronize with a GPU.
    """
    is_end = tokens.eq(eos)
    is_doubled = is_end[:, :-1] & is_end[:, 1:]
    tokens_before = is_doubled.cumsum(dim=1).eq(0).sum(dim=1)  # all of them if no </s> is doubled
    return tokens_before.add(1).where(is_doubled.any(dim=1), 1)


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
