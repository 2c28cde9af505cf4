"""The common form of an encoder that was read from Hugging Face or fairseq."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lln_fairseq.checkpoints.pooling import Pooling

DICTIONARY = "dict.txt"
HEAD = "encoder.lm_head."  # prefix of the parameters of the masked-language-model head


@dataclass
class ImportedEncoder:
    """An encoder read from another library, described in fairseq's terms.

    Attributes:
        parameters: float32 tensors by fairseq's parameter names.
        options: options of LLNRobertaModel, with `max_positions`, and with `attention` if the source states one.
        symbols: the lines of dict.txt without counts; symbol i has the id 4 + i.
        files: contents of the tokenizer's files by the file names that data_prep uses; empty if there is no tokenizer.
        notes: one sentence for the user about each difference from the source.
        pooling: the pooling of an encoder of sentence vectors; None for a model with a head.
        is_classifier: whether the model has a classification head.
        labels: the names of its classes, in order; empty if it has one output.
        settings: what its files say about its outputs, see `checkpoints/source_settings.py`.
    """

    parameters: dict[str, Tensor]
    options: dict[str, Any]
    symbols: list[str]
    files: dict[str, bytes]
    notes: list[str] = field(default_factory=list)
    pooling: Pooling | None = None
    is_classifier: bool = False
    labels: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def choose_pooling(pooling: Pooling | None, has_head: bool, notes: list[str]) -> Pooling | None:
    """Return the pooling of an imported encoder: the one that the source states, or None with a language-model head.

    Without both, it is an encoder of sentence vectors that gets mean pooling, and a note is added to `notes`.
    """
    if pooling is not None or has_head:
        return pooling
    notes.append("the source does not state the pooling of its sentence vectors: mean is used")
    return Pooling()


def summarize_names(names: list[str], count: int = 3) -> str:
    """Return the first `count` names separated by commas, followed by "and N more" if there are more."""
    text = ", ".join(names[:count])
    if len(names) > count:
        text += f" and {len(names) - count} more"
    return text
