"""Check the configuration in a checkpoint: only known options of known models and tasks reach fairseq.

A configuration comes with a file that anybody may have made, and fairseq builds whatever it names: some of its models
and optimizers call `eval` on their options. So nothing of it is handed on. It is written anew from the fields of the
dataclasses of the names below, each value with the type that its field declares; other names are refused, other options
left out.
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

from lln_fairseq.errors import InputError, first_line

OURS = "lln_roberta"
STOCK = "roberta"
STOCK_ATTENTION = "softmax"  # which has no option that says so
LANGUAGE_MODELS = ("lln_transformer_lm", "transformer_lm")
KNOWN = {  # and the presets of the models: roberta_large, ...
    "model": (OURS, STOCK, *LANGUAGE_MODELS),
    "task": ("lln_language_modeling", "lln_masked_lm", "lln_sentence_prediction", "masked_lm", "sentence_prediction"),
    "criterion": ("lln_sentence_prediction", "masked_lm", "sentence_prediction"),
}
NAMED_BY = {"model": "arch", "task": "task", "criterion": "criterion"}  # in a Namespace of arguments

NO_POSITIONS = 2  # first rows of the positional table: fairseq counts from the padding's id + 1
PLAIN = (str, int, float, bool, type(None))
# Sizes that the tensors show too: a number that does not fit them could ask for any amount of memory.
MEASURED = {
    "encoder_embed_dim": ("embed_tokens.weight", 1),
    "encoder_ffn_embed_dim": ("layers.0.fc1.weight", 0),
    "decoder_embed_dim": ("layers.0.fc1.weight", 1),  # its embeddings may have another width
    "decoder_ffn_embed_dim": ("layers.0.fc1.weight", 0),
}
# What fairseq evaluates as Python, for embeddings that no checkpoint may ask for.
EVALUATED = ("character_embeddings", "adaptive_input", "adaptive_softmax_cutoff")


def checked_config(state: Mapping[str, Any], path: str) -> DictConfig:
    """Return the configuration of a checkpoint, complete as fairseq wants it.

    Raises: InputError if there is none, for another model, task or criterion than those above, and for an option
    that has not its type or does not fit the parameters.
    """
    options = stored_options(state)
    if not options["model"] or not options["task"]:
        raise InputError(f"{path} is not a checkpoint of fairseq: it has no configuration")
    config: dict[str, Any] = {"bpe": None, "tokenizer": None}
    for field in dataclasses.fields(FairseqConfig):
        if dataclasses.is_dataclass(field.default):
            config[field.name] = OmegaConf.to_container(OmegaConf.structured(field.default), enum_to_str=True)
    for group, stored in options.items():
        config[group] = _checked_group(group, stored, path)
    model = config["model"]
    positions = _check_sizes(model, state["model"], path)
    for group in ("model", "task"):  # not stated: those of the checkpoint that a fine-tuning began with
        if config[group].get("max_positions", 0) is None:
            config[group]["max_positions"] = positions
    if _family("model", model["_name"]) == STOCK:  # takes what an argument parser would give
        stored = {key: value for key, value in model.items() if key in options["model"] and key != "_name"}
        config["model"] = argparse.Namespace(**stored, arch=model["_name"])
    return OmegaConf.create(config, flags={"allow_objects": True})


def stored_options(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the unchecked options of model, task and criterion; `_name` is the name in each group."""
    arguments = state.get("args")
    if isinstance(arguments, argparse.Namespace):
        return {group: {**vars(arguments), "_name": getattr(arguments, key, None)} for group, key in NAMED_BY.items()}
    groups = state.get("cfg")
    if not isinstance(groups, Mapping):
        groups = {}
    return {group: _stored_group(groups.get(group)) for group in KNOWN}


def _stored_group(group: Any) -> dict[str, Any]:
    if isinstance(group, argparse.Namespace):  # of a model without dataclass
        return {**vars(group), "_name": getattr(group, "_name", None) or getattr(group, "arch", None)}
    return dict(group) if isinstance(group, Mapping) else {}


def plain_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the configuration of a program as dictionaries, with its interpolations resolved."""
    config: Any = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return config


def plain_options(group: Any) -> dict[str, Any]:
    """Return the options of a group that are plain values, and so can be compared."""
    options = vars(group) if isinstance(group, argparse.Namespace) else group
    return {key: value for key, value in options.items() if is_plain(value)} if isinstance(options, Mapping) else {}


def is_plain(value: Any) -> bool:
    """Return False for an object, and for an interpolation or a missing value of omegaconf."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(x, PLAIN) and not (isinstance(x, str) and ("${" in x or x == "???")) for x in values)


def _checked_group(group: str, stored: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return the stored options of a group, and the defaults of the others that need no other group."""
    name = stored.get("_name")
    family = _family(group, name)
    if family not in KNOWN[group]:
        if group == "criterion":
            return None  # a loss belongs to the training
        raise InputError(f"{path} holds the {group} {str(name)[:80]!r}, and may hold {', '.join(KNOWN[group])} alone")
    schema = OmegaConf.structured(_dataclass(group, family))
    values = {key: value for key, value in stored.items() if key in schema._content and value is not None}
    for key, value in values.items():
        if group == "model" and key in EVALUATED and value:
            raise InputError(f"{path}: the model's option {key} is not supported: fairseq would run what goes with it")
        if not is_plain(value):
            raise InputError(f"{path}: the {group}'s option {key} is no plain value: {str(value)[:80]!r}")
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(schema, values), enum_to_str=True)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: the {group}'s option {error.full_key}: {first_line(error)}") from error
    return plain_options(merged) | {"_name": name}


def _family(group: str, name: Any) -> Any:
    """Return the registered model of a preset; other names as they are."""
    if group == "model" and isinstance(name, str):
        return ARCH_MODEL_NAME_REGISTRY.get(name, name)
    return name


def _dataclass(group: str, name: str) -> type:
    if group == "model":
        return MODEL_DATACLASS_REGISTRY[OURS if name == STOCK else name]  # ours has every option of the stock model
    if group == "task":
        return TASK_DATACLASS_REGISTRY[name]
    return REGISTRIES[group]["dataclass_registry"][name]


def _check_sizes(options: Mapping[str, Any], parameters: Mapping[str, Any], path: str) -> int | None:
    """Return the number of positions that the parameters have, if they have any.

    Raises: InputError for an option that does not fit the parameters.
    """
    side = "decoder" if _family("model", options["_name"]) in LANGUAGE_MODELS else "encoder"
    prefix = "decoder." if side == "decoder" else "sentence_encoder."
    stack = {key.rpartition(prefix)[2]: value for key, value in parameters.items()}
    sizes = {}
    for option, (key, axis) in MEASURED.items():
        if option.startswith(side) and key in stack and stack[key].dim() > axis:
            sizes[option] = stack[key].shape[axis]
    if not options.get(f"{side}_layers_to_keep"):
        sizes[f"{side}_layers"] = len({key.split(".")[1] for key in stack if key.startswith("layers.")})
    for option, size in sizes.items():
        if options.get(option) not in (None, size):
            raise InputError(f"{path}: {option} is {options[option]}, but its parameters have {size}")
    rows = len(stack.get("embed_positions.weight", ()))
    if rows and (options.get("max_positions") or 0) > rows:
        raise InputError(
            f"{path}: max_positions is {options['max_positions']}, but its positional table has {rows} rows"
        )
    return rows - NO_POSITIONS if rows else None
