"""The options of every registered attention as fields of a fairseq dataclass: flags and Hydra keys for nothing."""

import dataclasses
import types
import typing
from typing import Any

from fairseq.dataclass import ChoiceEnum

from lln_fairseq.attention import MECHANISMS


def attention_fields() -> list[tuple[str, Any, dataclasses.Field]]:
    """(name, type, field) for every option of every mechanism: `block_size` of `lln_diag` is `lln_diag_block_size`."""
    return [
        (f"{name}_{field.name}", _host_type(field), _host_field(name, field))
        for name, entry in sorted(MECHANISMS.items())
        for field in dataclasses.fields(entry.config)
    ]


def attention_options(name: str, config: Any) -> dict[str, Any]:
    """The options of one mechanism out of a model's config (DictConfig, dataclass or Namespace)."""
    if name not in MECHANISMS:
        return {}  # build_attention has the message
    fields = dataclasses.fields(MECHANISMS[name].config)
    values = {field.name: getattr(config, f"{name}_{field.name}", field.default) for field in fields}
    return {key: getattr(value, "value", value) for key, value in values.items()}


def _host_type(field: dataclasses.Field) -> Any:
    """What omegaconf and fairseq's argparse generator understand: Optional[X] for X | None, an enum for choices."""
    if field.metadata.get("choices"):
        return ChoiceEnum(list(field.metadata["choices"]))
    if isinstance(field.type, types.UnionType):
        return typing.Optional[next(t for t in field.type.__args__ if t is not type(None))]  # noqa: UP045
    return field.type


def _host_field(name: str, field: dataclasses.Field) -> dataclasses.Field:
    help = f"{name}: {field.metadata.get('help', '')}"
    return dataclasses.field(default=field.default, metadata={"help": help})
