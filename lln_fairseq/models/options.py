"""The options of the attention: those of every registered mechanism, and softmax_layers.

The options of the mechanisms become fields of a fairseq dataclass, from which fairseq makes flags and Hydra keys.
The layers of `best:N` are chosen in linearize/softmax_layers.py; here, softmax_layers is only read.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Collection
from typing import Any

from fairseq.dataclass import ChoiceEnum

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.errors import UserError

EVERY = re.compile(r"every:([1-9]\d*)")


def attention_fields() -> list[tuple[str, Any, dataclasses.Field]]:
    """Return (name, type, field) for every option of every mechanism, ordered by mechanism.

    The option `block_size` of `lln_diag` becomes the field `lln_diag_block_size`.
    """
    fields = []
    for mechanism, entry in sorted(MECHANISMS.items()):
        for field in dataclasses.fields(entry.config):
            fields.append((f"{mechanism}_{field.name}", _fairseq_type(field), _fairseq_field(mechanism, field)))
    return fields


def attention_options(name: str, config: Any) -> dict[str, Any]:
    """Return the options of one mechanism from the configuration of a model, with enums replaced by their values.

    `config` is a DictConfig, dataclass or Namespace with the fields of `attention_fields`; missing fields take their
    defaults. The result is empty for an unknown mechanism, which `build_attention` reports.
    """
    if name not in MECHANISMS:
        return {}
    options = {}
    for field in dataclasses.fields(MECHANISMS[name].config):
        value = getattr(config, f"{name}_{field.name}", field.default)
        options[field.name] = getattr(value, "value", value)
    return options


def mechanism_by_option() -> dict[str, str]:
    """Map each option of a registered mechanism to the mechanism, such as lln_diag_block_size to lln_diag."""
    mechanisms = {}
    for name, entry in MECHANISMS.items():
        for field in dataclasses.fields(entry.config):
            mechanisms[f"{name}_{field.name}"] = name
    return mechanisms


def parse_softmax_layers(value: str | int | None, layers: int | None = None) -> tuple[int, ...]:
    """Return the numbers of the layers in the option softmax_layers, counted from 0, in increasing order.

    Args:
        value: numbers separated by commas, "every:4" for layers 3, 7, 11, ..., or None or "" for no layer. It is an int
            if Hydra has read a single number.
        layers: the number of layers of the model. With None, "every:4" is an error, and numbers have no limit: this is
            for options in checkpoints, which always have numbers.

    Raises:
        UserError: if the value has another form, a layer does not exist, or N of "every:N" is larger than `layers`.
    """
    if value is None or value == "":
        return ()
    text = str(value)
    every = EVERY.fullmatch(text)
    numbers: Collection[int] = ()
    if every is not None and layers is not None:
        numbers = range(int(every[1]) - 1, layers, int(every[1]))
    elif all(number.strip().isdecimal() for number in text.split(",")):
        numbers = {int(number) for number in text.split(",")}
    if numbers and (layers is None or max(numbers) < layers):
        return tuple(sorted(numbers))
    if layers is None:
        raise UserError(f"softmax_layers must be numbers of layers, separated by commas, got '{text}'")
    raise UserError(
        f"softmax_layers must be numbers from 0 to {layers - 1}, separated by commas, or every:N with N from 1 to "
        f"{layers} (in linearize also best:N), got '{text}'"
    )


def format_softmax_layers(numbers: Collection[int]) -> str | None:
    """Return the option softmax_layers with these numbers, in their order, as in a checkpoint; None without numbers."""
    return ",".join(str(number) for number in numbers) or None


def _fairseq_type(field: dataclasses.Field) -> Any:
    """Return Optional[X] for X | None, an enum for a field with choices, and the type itself otherwise.

    omegaconf and fairseq's argparse generator understand only these.
    """
    if field.metadata.get("choices"):
        return ChoiceEnum(list(field.metadata["choices"]))
    if isinstance(field.type, types.UnionType):
        inner = next(member for member in field.type.__args__ if member is not type(None))
        return typing.Optional[inner]  # noqa: UP045
    return field.type


def _fairseq_field(mechanism: str, field: dataclasses.Field) -> dataclasses.Field:
    """Return a field with the same default and a help text that starts with the name of the mechanism."""
    help = f"{mechanism}: {field.metadata.get('help', '')}"
    return dataclasses.field(default=field.default, metadata={"help": help})
