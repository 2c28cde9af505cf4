"""Define the base class of attention mechanisms, and the registry behind `--attention NAME`.

A mechanism is one file: a dataclass with its options, a subclass of `Attention` and a decorator.

    @dataclass
    class BandConfig:
        width: int = option(64, "tokens on each side")

    @register_attention("band", BandConfig)
    class BandAttention(Attention): ...

The command-line flag --band-width, the Hydra key model.band_width, the contract tests and the benchmark rows are
derived from the registry. Mechanisms that replace a whole encoder layer are registered with `layers.register_layer`.
"""

import dataclasses
import difflib
import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.context import NO_CONTEXT, Context


class Attention(nn.Module):
    """Base class of the attention mechanisms.

    Queries, keys and values are already split into heads: `models/multihead_attention.py` does the projections.

    Args:
        config: an instance of the dataclass that the mechanism is registered with.
        num_heads, head_dim: H and D of the tensors that forward receives.
        max_positions: the largest number of tokens in a sequence.
        dropout: probability of dropping an attention weight during training. A mechanism that never forms attention
            weights ignores it.
    """

    # Properties of a mechanism. tests/attention/test_contract.py tests every property that a class does not switch off.
    has_matrix = True  # forward(q, k, v) equals P v for a single matrix P
    rows_sum_to_one = True  # the rows of P sum to 1
    batch_independent = True  # the output of a sequence does not depend on the rest of the batch
    # The options that replace the defaults when `lln-fairseq linearize` trains the mechanism to match softmax.
    linearize_options: ClassVar[Mapping[str, Any]] = {}
    learns_transfer = True  # the first stage of `lln-fairseq linearize` can bring the output nearer to softmax
    constants = "calibrated"  # constants of the moment matching of α and β, for mechanisms that have α and β

    def __init__(self, config: Any, num_heads: int, head_dim: int, max_positions: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Compute the attention output (B, H, N, D).

        In all methods, q, k and v are queries, keys and values (B, H, N, D), and `context` is what belongs to the call,
        such as the padding. The outputs of padding tokens are finite but meaningless. All other outputs are independent
        of the values at padding, even if these are NaN.
        """
        raise NotImplementedError

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Compute the matrix P (B, H, N, N) for which forward(q, k, v) in evaluation mode equals P v. Padded keys have
        0.

        This default calls forward with unit vectors as values, D columns of P at a time, and returns P without a graph.
        A mechanism can override it with the formula of P, which should not share code with forward: the contract tests
        compare both.

        Raises:
            ValueError: if `has_matrix` is False. The message must contain "no single attention matrix".
        """
        if not self.has_matrix:
            raise ValueError(f"{type(self).__name__} has no single attention matrix: its output is not P v")
        length, dim = q.shape[-2:]
        was_training = self.training
        self.eval()
        columns = []
        with torch.no_grad():
            for units in torch.eye(length, dtype=q.dtype, device=q.device).split(dim, dim=1):
                width = units.shape[1]
                v = F.pad(units, (0, dim - width)).expand(q.shape)
                columns.append(self.forward(q, k, v, context)[..., :width])
        self.train(was_training)
        return torch.cat(columns, dim=-1)

    def feature_maps(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor] | None:
        """Return φ(Q) and φ(K) of a linear attention, each (B, H, N, F), or None if P cannot be written in this form.

        P is φ(Q) φ(K)ᵀ with 0 in the columns of padding and every row divided by its sum. F does not depend on N. The
        analysis uses the features to compute spectral gaps exactly at any length.
        """
        return None

    def alpha_beta(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor] | None:
        """Return the α and β that LLN attention uses for these queries and keys, each (B, H), with gradients to learned
        gains.

        The analysis derives the temperature τ from them. A mechanism that contains no LLN attention returns None.
        """
        return None

    def branches(self) -> dict[str, "Attention"]:
        """Return the attentions that this mechanism combines by their names in reports, so that each can be measured by
        itself.

        They have the options of this mechanism and share its learned parameters. If the mechanism is not a combination,
        the dictionary is empty.
        """
        return {}

    def set_depth(self, layer: int, layers: int) -> None:
        """Adapt the mechanism to layer `layer`, from 0, of an encoder with `layers` layers; by default, do nothing.

        It is called once for every layer, after all layers have been built. Override it in a mechanism that depends on
        the depth.
        """

    @property
    def active_dropout(self) -> float:
        if self.training:
            return self.dropout
        return 0.0

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self.config).items())


class RegistryEntry(NamedTuple):
    """A registered class and the dataclass of its options."""

    cls: type[Any]
    config: type


ATTENTION_REGISTRY: dict[str, RegistryEntry] = {}  # attentions of queries, keys and values
LAYER_REGISTRY: dict[str, RegistryEntry] = {}  # replacements of a whole encoder layer
MECHANISMS = ChainMap(ATTENTION_REGISTRY, LAYER_REGISTRY)  # everything that --attention accepts

_ModuleClass = TypeVar("_ModuleClass", bound=type[nn.Module])


@dataclasses.dataclass
class NoOptions:
    """The options of a mechanism that has none."""


def register_attention(name: str, config: type = NoOptions) -> Callable[[_ModuleClass], _ModuleClass]:
    """Return a class decorator that registers a subclass of `Attention` and returns it unchanged.

    Args:
        name: the value of --attention that selects the class.
        config: the dataclass of the options, whose fields are declared with `option`.

    Raises (when the decorator is applied):
        ValueError: if an attention or a layer is already registered under the name.
        TypeError: if `config` is not a dataclass.
    """
    return register_in(ATTENTION_REGISTRY, name, config)


def register_in(registry: dict[str, RegistryEntry], name: str, config: type) -> Callable[[_ModuleClass], _ModuleClass]:
    """Return the decorator of `register_attention` for one of the two registries."""

    def register(cls: _ModuleClass) -> _ModuleClass:
        if name in MECHANISMS:
            raise ValueError(f"attention '{name}' is registered twice: by {MECHANISMS[name].cls} and by {cls}")
        if not dataclasses.is_dataclass(config):
            raise TypeError(f"the options of attention '{name}' must be a dataclass, got {config}")
        registry[name] = RegistryEntry(cls, config)
        return cls

    return register


def option(default: Any, help: str, choices: tuple[str, ...] | None = None, at_least: int | None = None) -> Any:
    """Declare a field of an options dataclass.

    Args:
        default: the default value. With None, the class that has the option computes a default itself.
        help: the help text of the command-line flag.
        choices: the allowed values of a string option. None means that any value is allowed.
        at_least: the smallest allowed value of a number. None means that there is no minimum. If the option itself is
            None, it is not compared with the minimum.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "at_least": at_least})


def build_attention(
    name: str, *, num_heads: int, head_dim: int, max_positions: int, dropout: float = 0.0, **options: Any
) -> Attention:
    """Build the attention that is registered under a name.

    Args:
        name: a key of ATTENTION_REGISTRY.
        num_heads, head_dim, max_positions, dropout: passed to the constructor of `Attention`.
        options: values for the fields of the options dataclass; fields that are left out keep their defaults.

    Raises:
        ValueError: if the name or an option is unknown (the message lists the known ones), if an option has a value
            that is not allowed, or if the name belongs to a mechanism that replaces a whole encoder layer.
    """
    config = parse_config(name, options)
    reject_layer_mechanism(name, "cannot be built as an attention of queries, keys and values: use build_layer")
    cls = ATTENTION_REGISTRY[name].cls
    return cls(config, num_heads=num_heads, head_dim=head_dim, max_positions=max_positions, dropout=dropout)


def reject_layer_mechanism(name: str, reason: str) -> None:
    """Raise ValueError if the mechanism `name` replaces a whole encoder layer. An unknown name raises nothing.

    The message is "NAME replaces the whole encoder layer, and REASON", with `reason` for REASON.
    """
    if name in LAYER_REGISTRY:
        raise ValueError(f"{name} replaces the whole encoder layer, and {reason}")


def parse_config(name: str, options: dict[str, Any]) -> Any:
    """Return an instance of the options dataclass of the mechanism `name`. Options not given keep their defaults.

    Raises:
        ValueError: if the name or an option is unknown, if a value is not among the choices or below the minimum, or if
            a number is passed as a string.
    """
    if name not in MECHANISMS:
        raise ValueError(f"unknown attention '{name}'{did_you_mean(name, MECHANISMS)}")
    config_class = MECHANISMS[name].config
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    types = get_type_hints(config_class)
    for key, value in options.items():
        if key not in fields:
            raise ValueError(f"attention '{name}' has no option '{key}'{did_you_mean(key, fields)}")
        _check_value(name, key, value, types[key], fields[key].metadata)
    return config_class(**options)


def _check_value(name: str, key: str, value: Any, type_hint: Any, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError if a value is not among the choices, or does not suit an option that is a number.

    Other types are not checked. `metadata` is what `option` has stored in the field.
    """
    choices = metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"option '{key}' of attention '{name}' is '{value}', choose from {', '.join(choices)}")
    types = {type_hint, *get_args(type_hint)}
    is_numeric = not types.isdisjoint({int, float})
    if is_numeric and (isinstance(value, str) or (value is None and NoneType not in types)):
        raise ValueError(f"attention '{name}': {key} must be a number, got '{value}'")
    if is_numeric and isinstance(value, float) and float not in types:
        raise ValueError(f"attention '{name}': {key} must be a whole number, got {value}")
    if isinstance(value, float) and not abs(value) <= torch.finfo(torch.float32).max:
        raise ValueError(f"attention '{name}': {key} must be finite in float32, got {value}")
    minimum = metadata.get("at_least")
    if minimum is not None and value is not None and value < minimum:
        raise ValueError(f"attention '{name}': {key} must be at least {minimum}, got {value}")


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse strings such as "mix=average" and "block_size=16" into {"mix": "average", "block_size": 16}.

    A value that is valid JSON (such as a number, true, false or null) is converted; any other value stays a string. If
    an option occurs twice, the last value counts. A string without "=" raises ValueError.
    """
    options = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise ValueError(f"options must be written OPTION=VALUE, got '{pair}'")
        options[key] = _parse_value(text)
    return options


def parse_attention_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse an attention spec, NAME or NAME:OPTION=VALUE,OPTION=VALUE, into the name and the options.

    Benchmarks and comparisons name mechanisms this way. Values are converted as in `parse_options`. Neither name nor
    options are looked up in the registry; `layers.check_attention_spec` does that.
    """
    name, _, options = spec.partition(":")
    return name, parse_options(pair for pair in options.split(",") if pair)


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown word, such as "; did you mean 'A'? (known: A, B)".

    If no known word is similar, only " (known: A, B)" is returned. If `known` is empty, it is " (known: none)".
    """
    names = sorted(known)
    listing = f" (known: {', '.join(names) or 'none'})"
    matches = difflib.get_close_matches(word, names, n=1)
    if not matches:
        return listing
    return f"; did you mean '{matches[0]}'?{listing}"
