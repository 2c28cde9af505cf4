"""The seam between fairseq and the mechanisms: a base class, a registry, and options that are checked.

A mechanism is one file: a dataclass of its options, a subclass of `Attention`, and the decorator.

    @dataclass
    class WindowConfig:
        width: int = option(64, "tokens on each side")

    @register_attention("window", WindowConfig)
    class WindowAttention(Attention): ...

Command-line flags (--window-width), Hydra keys (model.window_width), contract tests and benchmark rows follow from it.
What replaces a whole encoder layer is registered the same way, see layers.py.
"""

import dataclasses
import difflib
import json
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Attention(nn.Module):
    """One attention mechanism on head-split tensors; projections and fairseq's shapes are somebody else's.

    Args:
        config: an instance of the dataclass the mechanism is registered with.
        num_heads, head_dim: H and D of the tensors to come.
        max_positions: the longest sequence to come, in tokens.
        dropout: probability of dropping an attention weight while training.
    """

    # What a mechanism rules out is declared here and tested for, see tests/attention/test_contract.py.
    has_matrix = True  # forward(q, k, v) = P v for one matrix P
    stochastic_rows = True  # and its rows sum to 1
    batch_independent = True  # a sequence gives the same output whatever its batch mates are
    constants = "calibrated"  # of the moment matching of α and β, where there are any
    # A sequence may lie on several workers, in parts that are multiples of so many tokens; None: it may not.
    shard_multiple: int | None = None

    group: ProcessGroup | None = None  # the workers that hold the sequences of a call together, in the order of tokens

    def __init__(self, config: Any, num_heads: int, head_dim: int, max_positions: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.num_heads, self.head_dim = config, num_heads, head_dim
        self.max_positions, self.dropout = max_positions, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """q, k, v (B, H, N, D), mask bool (B, N) with True = padded or None -> (B, H, N, D)."""
        raise NotImplementedError

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P (B, H, N, N) with forward(q, k, v) = P v, without dropout, on a path independent of forward's."""
        raise NotImplementedError

    def feature_maps(
        self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """φ(Q), φ(K) (B, H, N, F) of a linear mechanism: its P is φ(Q) φ(K)ᵀ with every row divided by its sum.

        None where P has no such form with F independent of N. Exact instruments at any length follow from it.
        """
        return None

    def alpha_beta(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """α and β (B, H) of the LLN attention in it for these queries and keys, without gradient; None without one.

        The temperature τ of LLN attention follows from them (lln_fairseq.analysis).
        """
        return None

    def branches(self) -> dict[str, "Attention"]:
        """Of a sum of several attentions, each alone with the same parameters, by name: what does it contribute?"""
        return {}

    def place(self, layer: int, layers: int) -> None:
        """An encoder says that this is layer `layer` of `layers`, the first one 0: for what depends on the depth."""

    @property
    def active_dropout(self) -> float:
        """The dropout probability of this call: 0 in evaluation."""
        return self.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in vars(self.config).items())


class Entry(NamedTuple):
    cls: type[Any]
    config: type


ATTENTION_REGISTRY: dict[str, Entry] = {}
LAYER_REGISTRY: dict[str, Entry] = {}  # of what replaces a whole encoder layer
MECHANISMS = ChainMap(ATTENTION_REGISTRY, LAYER_REGISTRY)  # all that --attention takes

_T = TypeVar("_T", bound=type[nn.Module])


@dataclasses.dataclass
class NoOptions:
    """The options of a mechanism that has none."""


def register_attention(name: str, config: type = NoOptions) -> Callable[[_T], _T]:
    """Class decorator: registers a mechanism with the dataclass of its options under a name."""
    return register_in(ATTENTION_REGISTRY, name, config)


def register_in(registry: dict[str, Entry], name: str, config: type) -> Callable[[_T], _T]:
    def register(cls: _T) -> _T:
        if name in MECHANISMS:
            raise ValueError(f"attention '{name}' is registered twice: {MECHANISMS[name].cls} and {cls}")
        if not dataclasses.is_dataclass(config):
            raise TypeError(f"the options of attention '{name}' must be a dataclass, got {config}")
        registry[name] = Entry(cls, config)
        return cls

    return register


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, at_least: int | None = None) -> Any:
    """A dataclass field with a help text and the values it may have: a list for strings, the lowest for numbers."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "at_least": at_least})


def build_attention(
    name: str, *, num_heads: int, head_dim: int, max_positions: int, dropout: float = 0.0, **options: Any
) -> Attention:
    """The mechanism registered as `name`, with `options` for the fields of its dataclass.

    Raises: ValueError for an unknown name or option (it lists the known ones), a value that the option cannot have, or
    what replaces a whole layer.
    """
    config = checked_config(name, options)
    require_attention(name, "here an attention of queries, keys and values is needed")
    cls = ATTENTION_REGISTRY[name].cls
    return cls(config, num_heads=num_heads, head_dim=head_dim, max_positions=max_positions, dropout=dropout)


def require_attention(name: str, reason: str) -> None:
    """Raise ValueError with the reason if `name` replaces a whole encoder layer."""
    if name in LAYER_REGISTRY:
        raise ValueError(f"{name} replaces the whole encoder layer, and {reason}")


def checked_config(name: str, options: dict[str, Any]) -> Any:
    """The dataclass of a mechanism or layer filled in. Raises: ValueError as build_attention does."""
    if name not in MECHANISMS:
        raise ValueError(f"unknown attention '{name}'{did_you_mean(name, MECHANISMS)}")
    config_class = MECHANISMS[name].config
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    types = get_type_hints(config_class)
    for key, value in options.items():
        if key not in fields:
            raise ValueError(f"attention '{name}' has no option '{key}'{did_you_mean(key, fields)}")
        choices = fields[key].metadata.get("choices")
        if choices and value not in choices:
            raise ValueError(f"option '{key}' of attention '{name}' is '{value}', choose from {', '.join(choices)}")
        if isinstance(value, str) and {types[key], *get_args(types[key])} & {int, float}:
            raise ValueError(f"attention '{name}': {key} must be a number, got '{value}'")
        lowest = fields[key].metadata.get("at_least")
        if lowest is not None and value is not None and value < lowest:
            raise ValueError(f"attention '{name}': {key} must be at least {lowest}, got {value}")
    return config_class(**options)


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """{"mix": "ratio", "block_size": 16} of ["mix=ratio", "block_size=16"]: numbers, true, false, null, else text.

    Raises: ValueError for what has no "=".
    """
    found = {}
    for pair in pairs:
        key, given, text = pair.partition("=")
        if not given:
            raise ValueError(f"'{pair}' is no OPTION=VALUE")
        found[key] = _value(text)
    return found


def parse_attention_spec(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of NAME or NAME:OPTION=VALUE,OPTION=VALUE, as benchmarks and comparisons name their rows.

    Raises: ValueError for an option that has no "=".
    """
    name, _, options = text.partition(":")
    return name, parse_options(option for option in options.split(",") if option)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, and all of them."""
    close = difflib.get_close_matches(word, list(known), n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"{hint} (known: {', '.join(sorted(known)) or 'none'})"
