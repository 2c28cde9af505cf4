"""Pairs of texts as token ids: which tokens belong to the first text, and which to the second.

Exported models ship this file, so it imports nothing but torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The forms of a pair, by the models that have them.
ROBERTA_PAIRS = "roberta"  # <s> A </s></s> B </s>
DISTILBERT_PAIRS = "distilbert"  # <s> A </s> B </s>
BERT_PAIRS = "bert"  # <s> A </s> B </s>, and the tokens behind the first </s> get an embedding of their own
PAIR_FORMS = (ROBERTA_PAIRS, DISTILBERT_PAIRS, BERT_PAIRS)


def first_segment_lengths(tokens: Tensor, eos: int, pair_form: str = ROBERTA_PAIRS, pad: int = 1) -> Tensor:
    """Return the number of tokens in the first segment of every sequence, int64 (B,), from 1 to N.

    In a pair, the first segment is `<s> A </s>`. If a sequence is not a pair, its first segment is its first token: it
    has no two adjacent </s>, or in a form with one </s> between the texts, nothing but padding follows its first </s>.
    The computation does not synchronize with a GPU.
    """
    is_end = _ends_first_text(tokens, eos, pair_form, pad)
    tokens_before = is_end.cumsum(dim=1).eq(0).sum(dim=1)  # all of them if the sequence is not a pair
    return torch.where(is_end.any(dim=1), tokens_before + 1, 1)


def second_text(tokens: Tensor, eos: int, pad: int) -> Tensor:
    """Return True for the tokens behind the first </s> of every sequence that are not padding, bool (B, N).

    These are the tokens of the second text of a pair in BERT's form.
    """
    is_end = _ends_first_text(tokens, eos, BERT_PAIRS, pad)
    return is_end.cumsum(dim=1).gt(is_end) & tokens.ne(pad)


def _ends_first_text(tokens: Tensor, eos: int, pair_form: str, pad: int) -> Tensor:
    """Return True for every </s> that can end the first text of a pair, bool (B, N): the first one of them does."""
    following = F.pad(tokens, (0, 1), value=pad)[:, 1:]
    if pair_form == ROBERTA_PAIRS:
        return tokens.eq(eos) & following.eq(eos)
    return tokens.eq(eos) & following.ne(pad)
