"""What belongs to one call of the model, which the encoder passes to every layer, and a layer to its attention."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Exported models ship ops/formula.py but not this file. Packages above `models` must not import from `ops`.
from lln_fairseq.ops.formula import ROBERTA_PAIRS, ends_first_text
from lln_fairseq.ops.formula import first_segment_lengths as first_segment_lengths

# The forms of a pair of texts, by the models that have them. That of ROBERTA_PAIRS is <s> A </s></s> B </s>.
DISTILBERT_PAIRS = "distilbert"  # <s> A </s> B </s>
BERT_PAIRS = "bert"  # <s> A </s> B </s>, and the tokens behind the first </s> get an embedding of their own
PAIR_FORMS = (ROBERTA_PAIRS, DISTILBERT_PAIRS, BERT_PAIRS)


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


def second_text(tokens: Tensor, eos: int, pad: int) -> Tensor:
    """Return True for the tokens behind the first </s> of every sequence that are not padding, bool (B, N).

    These are the tokens of the second text of a pair in BERT's form.
    """
    is_end = ends_first_text(tokens, eos, BERT_PAIRS, pad)
    return F.pad(is_end.cumsum(dim=1).gt(0), (1, 0)) & tokens.ne(pad)


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
