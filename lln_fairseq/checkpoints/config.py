"""Check the configuration in a checkpoint, so that only known options of known models and tasks reach fairseq.

A checkpoint can come from anyone, and fairseq builds every model that its configuration names. Some of fairseq's models
and optimizers even call `eval` on their options. Therefore a new configuration is built from the dataclasses of the
models, tasks and criterions in KNOWN. Each field gets its stored value, converted to the type of the field. Models and
tasks that are not in KNOWN are rejected, and so are values that are not plain (see `is_plain`). Options that are not
fields are left out.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lln_fairseq.errors import UserError, first_line
from lln_fairseq.models.options import format_softmax_layers, parse_softmax_layers
from lln_fairseq.text.special_symbols import PAD

OURS = "lln_roberta"
STOCK = "roberta"
STOCK_ATTENTION = "softmax"  # the attention of fairseq's RoBERTa, which has no option for it
KNOWN = {  # the presets of these models (roberta_large, ...) are known too
    "model": (OURS, STOCK),
    "task": ("lln_masked_lm", "lln_sentence_prediction", "masked_lm", "sentence_prediction"),
    "criterion": ("lln_sentence_prediction", "masked_lm", "sentence_prediction"),
}
NAME_ARGUMENTS = {"model": "arch", "task": "task", "criterion": "criterion"}  # the arguments with the names

# fairseq and Hugging Face's RoBERTa store position 0 in row PAD + 1 of the positional table.
POSITION_OFFSET = PAD + 1
PLAIN_TYPES = (str, int, float, bool, type(None))
# Options that state the size of a parameter, with its name and axis. They are compared with the parameter, because a
# wrong number could make fairseq allocate any amount of memory.
SIZE_OPTIONS = {
    "encoder_embed_dim": ("embed_tokens.weight", 1),
    "encoder_ffn_embed_dim": ("layers.0.fc1.weight", 0),
}


def checked_config(state: Mapping[str, Any], path: str) -> DictConfig:
    """Return a checked copy of a checkpoint's configuration, with every group that fairseq expects.

    Only the groups model, task and criterion are read from the checkpoint. The remaining groups have fairseq's
    defaults. A criterion that is not in KNOWN becomes None. The model group of a stock RoBERTa becomes a Namespace of
    the stored options, to which fairseq adds the options that are missing.

    UserError is raised if there is no configuration, if the model or the task is not in KNOWN, or if an option is not a
    plain value, does not have the type of its field, or does not fit the parameters.
    """
    options = stored_options(state)
    if not options["model"] or not options["task"]:
        raise UserError(f"{path} is not a checkpoint of fairseq: it has no configuration")
    config: dict[str, Any] = {"bpe": None, "tokenizer": None}
    for field in dataclasses.fields(FairseqConfig):
        if dataclasses.is_dataclass(field.default):
            config[field.name] = OmegaConf.to_container(OmegaConf.structured(field.default), enum_to_str=True)
    for group, stored in options.items():
        config[group] = _checked_group(group, stored, path)
    model = config["model"]
    positions = _check_sizes(model, state["model"], path)
    for group in ("model", "task"):
        # None: the fine-tuning that wrote the checkpoint took the length from the checkpoint that it began with.
        if config[group].get("max_positions", 0) is None:
            config[group]["max_positions"] = positions
    if _registered_name("model", model["_name"]) == STOCK:
        stored = {key: value for key, value in model.items() if key in options["model"] and key != "_name"}
        config["model"] = argparse.Namespace(**stored, arch=model["_name"])
    return OmegaConf.create(config, flags={"allow_objects": True})


def stored_options(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of the groups "model", "task" and "criterion" in a checkpoint, without any checks.

    The option `_name` is the name of the model, task or criterion. A group that is not stored is empty.
    """
    arguments = state.get("args")
    if isinstance(arguments, argparse.Namespace):  # a checkpoint from before Hydra: one Namespace for all groups
        groups = {}
        for group, argument in NAME_ARGUMENTS.items():
            groups[group] = {**vars(arguments), "_name": getattr(arguments, argument, None)}
        return groups
    config = state.get("cfg")
    if not isinstance(config, Mapping):
        config = {}
    return {group: _stored_group(config.get(group)) for group in KNOWN}


def _stored_group(group: Any) -> dict[str, Any]:
    """Return a group of a stored configuration as a dictionary; empty if it is neither a Namespace nor a mapping."""
    if isinstance(group, argparse.Namespace):  # the group of a model without a dataclass
        name = getattr(group, "_name", None) or getattr(group, "arch", None)
        return {**vars(group), "_name": name}
    return dict(group) if isinstance(group, Mapping) else {}


def softmax_layers(options: Mapping[str, Any]) -> str | None:
    """Return the numbers in the option softmax_layers of a checkpoint or run, as in "0,3", or None if there are none.

    fairseq's own RoBERTa has no such option.
    """
    return format_softmax_layers(parse_softmax_layers(options.get("softmax_layers")))


def plain_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration of a program as a dictionary, with interpolations resolved and enums as strings.

    Each group is a dictionary, or stays a Namespace if it is one.
    """
    config: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return config


def config_yaml(cfg: DictConfig) -> str:
    config = plain_config(cfg)
    for name, group in config.items():
        if isinstance(group, argparse.Namespace):  # the options of a model without a dataclass
            config[name] = vars(group)
    return OmegaConf.to_yaml(config)


def plain_options(group: Any) -> dict[str, Any]:
    """Return the options of a Namespace or mapping as a new dictionary, without values that are not plain (`is_plain`).

    For any other value the result is empty.
    """
    if isinstance(group, argparse.Namespace):
        group = vars(group)
    if not isinstance(group, Mapping):
        return {}
    return {key: value for key, value in group.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Return True for a string, a number, a bool, None, or a list of such values.

    Return False for strings that have a meaning for omegaconf: strings that contain "${", and "???".
    """
    values = value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, PLAIN_TYPES):
            return False
        if isinstance(item, str) and ("${" in item or item == "???"):
            return False
    return True


def _checked_group(group: str, stored: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return the checked options of a group, with the defaults of options that are not stored or stored as None.

    Stored options that are not fields of the group's dataclass are left out. So are defaults that are not plain values.
    The result is None for a criterion that is not in KNOWN, because only training needs the loss.
    """
    name = stored.get("_name")
    registered_name = _registered_name(group, name)
    if registered_name not in KNOWN[group]:
        if group == "criterion":
            return None
        raise UserError(
            f"{path} holds the {group} {str(name)[:80]!r}, but only these are supported: {', '.join(KNOWN[group])}"
        )
    schema = OmegaConf.structured(_dataclass(group, registered_name))
    values = {key: value for key, value in stored.items() if key in schema._content and value is not None}
    for key, value in values.items():
        if not is_plain(value):
            raise UserError(f"{path}: the {group}'s option {key} is not a plain value: {str(value)[:80]!r}")
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(schema, values), enum_to_str=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: the {group}'s option {error.full_key}: {first_line(error)}") from error
    return plain_options(merged) | {"_name": name}


def _registered_name(group: str, name: Any) -> Any:
    """Return the registered name of a model, such as "roberta" for the preset "roberta_large".

    A name that is no preset, or that belongs to another group than "model", is returned unchanged.
    """
    if group == "model" and isinstance(name, str):
        return ARCH_MODEL_NAME_REGISTRY.get(name, name)
    return name


def _dataclass(group: str, name: str) -> type:
    if group == "model":
        return MODEL_DATACLASS_REGISTRY[OURS if name == STOCK else name]  # ours has every option of the stock model
    if group == "task":
        return TASK_DATACLASS_REGISTRY[name]
    return REGISTRIES[group]["dataclass_registry"][name]


def parameter_sizes(parameters: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in SIZE_OPTIONS and the number of layers that a RoBERTa's parameters have, by option."""
    stack = _layer_stack(parameters)
    sizes = {}
    for option, (key, axis) in SIZE_OPTIONS.items():
        if key in stack and stack[key].dim() > axis:
            sizes[option] = stack[key].shape[axis]
    sizes["encoder_layers"] = len({key.split(".")[1] for key in stack if key.startswith("layers.")})
    return sizes


def _layer_stack(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with the part of their names that follows the name of the encoder."""
    return {key.rpartition("sentence_encoder.")[2]: value for key, value in parameters.items()}


def _check_sizes(options: Mapping[str, Any], parameters: Mapping[str, Any], path: str) -> int | None:
    """Raise UserError if a size in a model's options differs from its parameters, or max_positions exceeds the table.

    Options that are missing or None are accepted, and so is a smaller max_positions. Return the number of positions in
    the positional table, or None if there is no table.
    """
    for option, size in parameter_sizes(parameters).items():
        if options.get(option) not in (None, size):
            raise UserError(f"{path}: {option} is {options[option]}, but its parameters have {size}")
    rows = len(_layer_stack(parameters).get("embed_positions.weight", ()))
    if rows and (options.get("max_positions") or 0) > rows:
        raise UserError(
            f"{path}: max_positions is {options['max_positions']}, but its positional table has {rows} rows"
        )
    return rows - POSITION_OFFSET if rows else None
