"""Define the base class and the registration of mechanisms that replace a whole encoder layer.

Such a mechanism takes the place of self-attention and the feed-forward part together. It is defined in one file:

    @register_layer("gate", GateConfig)
    class GateLayer(EncoderLayer):
        def __init__(self, config, dim, dropout, attention_dropout, activation_dropout):
            super().__init__([GatedUnit(dim, activation_dropout) for _ in range(config.units)], dropout)

Its command-line flags, Hydra keys, contract tests and benchmark rows are derived from the registry, as for an
attention. Code that needs queries and keys, or RoBERTa's own layers, rejects these mechanisms with
`registry.reject_layer_mechanism`.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import (
    LAYER_REGISTRY,
    build_attention,
    did_you_mean,
    parse_attention_spec,
    parse_config,
    register_in,
)


class EncoderLayer(nn.Module):
    """A sequence of units, each with a residual connection: x + dropout(unit(x)).

    A unit is called as unit(x, padding). It gets the tokens x (B, N, C) and the padding, bool (B, N) or None, and
    returns (B, N, C). Padding must not influence the output for other tokens. Every unit must normalize its own input,
    whether or not --encoder-normalize-before is set. The encoder then adds a final layer norm.

    Args:
        units: the units, in the order in which they are applied.
        dropout: dropout probability of the output of each unit.
    """

    positions = True  # the encoder adds position embeddings to the token embeddings

    def __init__(self, units: Iterable[nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.dropout = dropout

    def forward(self, x: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Apply the units in turn to tokens (T, B, C), and return the same shape; x itself if it has no elements.

        Padding tokens can have any values; they are set to 0 in a copy.
        """
        if not x.numel():
            return x
        x = x.transpose(0, 1)
        if context.padding is not None:
            x = x.masked_fill(context.padding[:, :, None], 0.0)
        for unit in self.units:
            x = x + F.dropout(unit(x, context.padding), self.dropout, self.training)
        return x.transpose(0, 1)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Change nothing. fairseq calls this on every layer to rename the parameters of old checkpoints."""


_LayerClass = TypeVar("_LayerClass", bound=type[EncoderLayer])


def register_layer(name: str, config: type) -> Callable[[_LayerClass], _LayerClass]:
    """Return a class decorator that registers an `EncoderLayer` for --attention NAME, as `register_attention` does.

    `build_layer` calls the class with the arguments (config, dim, dropout, attention_dropout, activation_dropout).
    """
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
    """Build the layer that is registered under a name, in training mode.

    Args:
        name: a key of LAYER_REGISTRY.
        dim: number of features C of a token.
        dropout: dropout probability of the output of a unit.
        attention_dropout: dropout probability of attention weights.
        activation_dropout: dropout probability of the input of a unit's last projection.
        options: values for the fields of the options dataclass; fields that are left out keep their defaults.

    Raises:
        ValueError: if the name or an option is unknown, if an option has a value that is not allowed, or if the name
            belongs to an attention.
    """
    config = parse_config(name, options)
    if name not in LAYER_REGISTRY:
        hint = did_you_mean(name, LAYER_REGISTRY)
        raise ValueError(f"'{name}' is an attention and does not replace a layer{hint}")
    return LAYER_REGISTRY[name].cls(config, dim, dropout, attention_dropout, activation_dropout)


def check_attention_spec(spec: str) -> None:
    """Raise ValueError if the mechanism that an attention spec names cannot be built with the options in the spec.

    The check builds the mechanism with one head of 64 features, and discards it. A spec is NAME or
    NAME:OPTION=VALUE,OPTION=VALUE.
    """
    name, options = parse_attention_spec(spec)
    if name in LAYER_REGISTRY:
        build_layer(name, dim=64, **options)
    else:
        build_attention(name, num_heads=1, head_dim=64, max_positions=64, **options)
