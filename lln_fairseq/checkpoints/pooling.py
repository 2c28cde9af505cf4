"""The pooling of an encoder of sentence vectors: how a checkpoint stores it, and how vectors are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.checkpoints.reading import plugin_state
from lln_fairseq.errors import UserError

POOLINGS = ("mean", "cls", "max")


@dataclass(frozen=True)
class Pooling:
    """The step from the last hidden states of a text to its sentence vector.

    Attributes:
        mode: "mean" of all tokens, including <s> and </s>; "cls", the first token; or "max", the largest value of every
            feature among all tokens.
        normalize: divide the vector by its Euclidean norm.
    """

    mode: str = "mean"
    normalize: bool = False

    def __str__(self) -> str:
        if self.normalize:
            return f"{self.mode}, normalized"
        return self.mode


def pool_hidden_states(hidden_states: Tensor, real: Tensor, pooling: Pooling) -> Tensor:
    """Compute the vectors (B, C) of texts from the last hidden states (B, N, C).

    `real` is bool (B, N), False at padding, so the opposite of the padding mask. A text has at least its first token.
    """
    real = real[..., None]
    if pooling.mode == "cls":
        vectors = hidden_states[:, 0]
    elif pooling.mode == "max":
        vectors = hidden_states.masked_fill(~real, -torch.inf).amax(dim=1)
    else:
        vectors = hidden_states.masked_fill(~real, 0.0).sum(dim=1) / real.sum(dim=1).clamp_min(1)
    if pooling.normalize:
        vectors = F.normalize(vectors, dim=-1)
    return vectors


def stored_pooling(state: Mapping[str, Any]) -> Pooling | None:
    """Return the pooling that `lln-fairseq convert` stored in a checkpoint, or None if the checkpoint has none.

    A checkpoint with a pooling is an encoder of sentence vectors: its masked-language-model head is not used and may be
    untrained. Masked language models and classifiers have no pooling.
    """
    stored = plugin_state(state)
    mode = stored.get("pooling")
    if mode is None:
        return None
    if mode not in POOLINGS:
        raise UserError(f"the checkpoint's pooling must be {', '.join(POOLINGS)}, got {str(mode)[:80]}")
    return Pooling(str(mode), normalize=stored.get("normalize") == "true")


def pooling_entries(pooling: Pooling | None) -> dict[str, str]:
    """Return the entries of a checkpoint's plugin state that `stored_pooling` reads; empty for None."""
    if pooling is None:
        return {}
    return {"pooling": pooling.mode, "normalize": str(pooling.normalize).lower()}
