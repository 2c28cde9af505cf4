"""Turn the options of every registered mechanism into fields of a fairseq dataclass.

fairseq makes command-line flags and Hydra keys from these fields.
"""

import dataclasses
import types
import typing
from typing import Any

from fairseq.dataclass import ChoiceEnum

from lln_fairseq.attention import MECHANISMS


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
