"""Find the first segment of each sequence, such as the question of a pair, for attentions with global tokens."""

from torch import Tensor


def first_segment_lengths(tokens: Tensor, eos: int) -> Tensor:
    """Return the number of tokens in the first segment of every sequence.

    In a pair, `<s> A </s></s> B </s>`, the first segment is `<s> A </s>`. A sequence without two adjacent </s> is not a
    pair; its first segment is its first token. The computation does not synchronize with a GPU.

    Args:
        tokens: token ids (B, N).
        eos: the id of </s>.

    Returns:
        int64 (B,), from 1 to N.
    """
    is_end = tokens.eq(eos)
    is_doubled = is_end[:, :-1] & is_end[:, 1:]
    tokens_before = is_doubled.cumsum(dim=1).eq(0).sum(dim=1)  # all of them if no </s> is doubled
    return tokens_before.add(1).where(is_doubled.any(dim=1), 1)
