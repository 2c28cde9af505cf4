"""What a foreign encoder is to us, whatever file it came from."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lln_fairseq.data.special_symbols import PAD

DICTIONARY = "dict.txt"
OFFSET = PAD + 1  # fairseq and Hugging Face count positions from the padding's id + 1

EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
HEAD = "encoder.lm_head."


@dataclass
class Encoder:
    """Parameters under fairseq's names, the options of the model, dict.txt and the files of the tokenizer."""

    parameters: dict[str, Tensor]
    options: dict[str, Any]
    symbols: list[str]  # of dict.txt: symbol i has the id 4 + i
    files: dict[str, bytes]  # the tokenizer's, by the names that data_prep knows; empty where there are none
    notes: list[str] = field(default_factory=list)  # what is not as in the source, for the user

    @property
    def has_head(self) -> bool:
        """Whether it can predict masked tokens."""
        return any(name.startswith(HEAD) for name in self.parameters)


def first_few(names: list[str], count: int = 3) -> str:
    """The names for a message: a, b, c and 7 more."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
