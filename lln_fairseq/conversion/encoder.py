"""What a foreign encoder is to us, whatever file it came from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lln_fairseq.data.special_symbols import PAD
from lln_fairseq.errors import InputError

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


def first_few(names: list[str], count: int = 3) -> str:
    """The names for a message: a, b, c and 7 more."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def require_shapes(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    source: Path,
    stated: str,
) -> None:
    """Raise InputError if a tensor is missing or has another shape; `stated` says where the shapes come from."""
    if missing := [name for name in shapes if name not in tensors]:
        raise InputError(f"{source} lacks {first_few(missing)}")
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            raise InputError(f"{source}: {name} is {_by(found)}, and {stated} {_by(shape)}")


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
