"""The second seam: what replaces a whole encoder layer, self-attention and feed-forward part. One file each, too.

    @register_layer("gate", GateConfig)
    class GateLayer(EncoderLayer):
        def __init__(self, config, dim, dropout, attention_dropout, activation_dropout):
            super().__init__([GatedUnit(dim, activation_dropout) for _ in range(config.units)], dropout)

Options, flags, Hydra keys, contract tests and benchmark rows are as those of an attention, see registry.py. What needs
queries and keys, or RoBERTa's own layers, refuses these names: `require_attention`.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.registry import (
    LAYER_REGISTRY,
    build_attention,
    checked_config,
    did_you_mean,
    parse_attention_spec,
    register_in,
)


class EncoderLayer(nn.Module):
    """Units one after the other, each in its residual connection: x + dropout(unit(x)).

    A unit has its norm in front, whatever --encoder-normalize-before says, and computes x (B, N, C), mask (B, N) with
    True = padded or None -> (B, N, C) without letting padding into the real tokens. The encoder ends with a norm.
    """

    positions = True  # whether the encoder adds embeddings of the positions to those of the tokens

    def __init__(self, units: Iterable[nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.units, self.dropout = nn.ModuleList(units), dropout

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None = None) -> Tensor:
        """x (T, B, C), mask (B, T) with True = padded -> (T, B, C). Padding may hold anything."""
        if not x.numel():
            return x
        x = x.transpose(0, 1)
        mask = None if encoder_padding_mask is None else encoder_padding_mask.bool()
        if mask is not None:
            x = x.masked_fill(mask[:, :, None], 0.0)
        for unit in self.units:
            x = x + F.dropout(unit(x, mask), self.dropout, self.training)
        return x.transpose(0, 1)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """fairseq asks its layers to rename what old checkpoints call otherwise."""


_T = TypeVar("_T", bound=type[EncoderLayer])


def register_layer(name: str, config: type) -> Callable[[_T], _T]:
    """Class decorator, as register_attention; the class takes what build_layer gives it: its config, the width and the
    probabilities of dropout."""
    return register_in(LAYER_REGISTRY, name, config)


def build_layer(
    name: str,
    *,
    dim: int,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    activation_dropout: float = 0.0,
    **options: Any,
) -> EncoderLayer:
    """The layer registered as `name` for tokens of `dim` features, with `options` for the fields of its dataclass.

    `dropout` is of what a unit adds, `attention_dropout` of attention weights, `activation_dropout` of what enters a
    unit's last projection. Raises: ValueError as build_attention does.
    """
    config = checked_config(name, options)
    if name not in LAYER_REGISTRY:
        raise ValueError(f"'{name}' is an attention and no layer{did_you_mean(name, LAYER_REGISTRY)}")
    return LAYER_REGISTRY[name].cls(config, dim, dropout, attention_dropout, activation_dropout)


def check_attention_spec(row: str) -> None:
    """Raises: ValueError for a row, as parse_attention_spec reads it, that cannot be built."""
    name, options = parse_attention_spec(row)
    if name in LAYER_REGISTRY:
        build_layer(name, dim=64, **options)
    else:
        build_attention(name, num_heads=1, head_dim=64, max_positions=64, **options)
