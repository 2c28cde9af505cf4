"""What of a checkpoint's configuration reaches fairseq: the known options of known models and tasks, with their types.

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

OURS, STOCK = "lln_roberta", "roberta"
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
    """The configuration of a checkpoint, complete as fairseq wants it.

    Raises: InputError where there is none, for another model, task or criterion than those above, and for an option
    that has not its type or does not fit the parameters.
    """
    options = stored_options(state)
    if not options["model"] or not options["task"]:
        raise InputError(f"{path} is not a checkpoint of fairseq: it has no configuration")
    config = {
        field.name: OmegaConf.to_container(OmegaConf.structured(field.default), enum_to_str=True)
        for field in dataclasses.fields(FairseqConfig)
        if dataclasses.is_dataclass(field.default)
    }
    config |= {"bpe": None, "tokenizer": None}
    config |= {group: _checked(group, given, path) for group, given in options.items()}
    model = config["model"]
    positions = _check_sizes(model, state["model"], path)
    for group in ("model", "task"):  # not stated: those of the checkpoint that a fine-tuning began with
        if config[group].get("max_positions", 0) is None:
            config[group]["max_positions"] = positions
    if _family("model", model["_name"]) == STOCK:  # takes what an argument parser would give
        given = {key: value for key, value in model.items() if key in options["model"] and key != "_name"}
        config["model"] = argparse.Namespace(**given, arch=model["_name"])
    return OmegaConf.create(config, flags={"allow_objects": True})


def stored_options(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of model, task and criterion as the file has them, unchecked; `_name` is the name in each group."""
    groups, arguments = state.get("cfg"), state.get("args")
    if isinstance(arguments, argparse.Namespace):
        flat = vars(arguments)
        return {group: {**flat, "_name": flat.get(key)} for group, key in NAMED_BY.items()}
    groups = groups if isinstance(groups, Mapping) else {}
    return {group: _options(groups.get(group)) for group in KNOWN}


def _options(group: Any) -> dict[str, Any]:
    """A group of the configuration; an argument parser made that of a model without dataclass."""
    if isinstance(group, argparse.Namespace):
        return {**vars(group), "_name": getattr(group, "_name", None) or getattr(group, "arch", None)}
    return dict(group) if isinstance(group, Mapping) else {}


def _checked(group: str, given: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """What is given of the group's options, and the defaults of the others where they need no other group."""
    name = given.get("_name")
    family = _family(group, name)
    if group == "criterion" and family not in KNOWN[group]:
        return None  # a loss belongs to the training
    if family not in KNOWN[group]:
        raise InputError(f"{path} holds the {group} {str(name)[:80]!r}, and may hold {', '.join(KNOWN[group])} alone")
    schema = OmegaConf.structured(_dataclass(group, family))
    values = {key: value for key, value in given.items() if key in schema._content and value is not None}
    for key, value in values.items():
        if group == "model" and key in EVALUATED and value:
            raise InputError(f"{path}: the model's option {key} is not supported: fairseq would run what goes with it")
        if not is_plain(value):
            raise InputError(f"{path}: the {group}'s option {key} is no plain value: {str(value)[:80]!r}")
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(schema, values), enum_to_str=True)
    except OmegaConfBaseException as error:
        raise InputError(f"{path}: the {group}'s option {error.full_key}: {first_line(error)}") from error
    return {key: value for key, value in merged.items() if is_plain(value)} | {"_name": name}


def _family(group: str, name: Any) -> Any:
    """The registered model of a preset; other names as they are."""
    return ARCH_MODEL_NAME_REGISTRY.get(name, name) if group == "model" and isinstance(name, str) else name


def _dataclass(group: str, name: str) -> type:
    if group == "model":
        return MODEL_DATACLASS_REGISTRY[OURS if name == STOCK else name]  # ours has every option of the stock model
    return TASK_DATACLASS_REGISTRY[name] if group == "task" else REGISTRIES[group]["dataclass_registry"][name]


def is_plain(value: Any) -> bool:
    """Neither an object, nor an interpolation or a missing value of omegaconf."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(x, PLAIN) and not (isinstance(x, str) and ("${" in x or x == "???")) for x in values)


def _check_sizes(options: Mapping[str, Any], parameters: Mapping[str, Any], path: str) -> int | None:
    """The number of positions that the parameters have, if they have any."""
    side = "decoder" if _family("model", options["_name"]) in LANGUAGE_MODELS else "encoder"
    prefix = "decoder." if side == "decoder" else "sentence_encoder."
    stack = {key.rpartition(prefix)[2]: value for key, value in parameters.items()}
    there = {
        name: stack[key].shape[axis]
        for name, (key, axis) in MEASURED.items()
        if name.startswith(side) and key in stack and stack[key].dim() > axis
    }
    if not options.get(f"{side}_layers_to_keep"):
        there[f"{side}_layers"] = len({key.split(".")[1] for key in stack if key.startswith("layers.")})
    for option, size in there.items():
        if options.get(option) not in (None, size):
            raise InputError(f"{path}: {option} is {options[option]}, but its parameters have {size}")
    rows = len(stack.get("embed_positions.weight", ()))
    if rows and (options.get("max_positions") or 0) > rows:
        raise InputError(
            f"{path}: max_positions is {options['max_positions']}, but its positional table has {rows} rows"
        )
    return rows - NO_POSITIONS if rows else None
