"""Check that a checkpoint is compatible with the data and the model that it is loaded for."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.utils import split_paths
from hydra.core.hydra_config import HydraConfig
from torch import Tensor, nn

from lln_fairseq.attention import MECHANISMS, reject_layer_mechanism
from lln_fairseq.checkpoints.config import (
    POSITION_OFFSET,
    STOCK_ATTENTION,
    parameter_sizes,
    plain_options,
    softmax_layers,
    stored_options,
)
from lln_fairseq.checkpoints.reading import plugin_state
from lln_fairseq.errors import UserError, user_errors
from lln_fairseq.models.adapt import EMBEDDING, POSITIONS
from lln_fairseq.models.presets import PRESETS, SIZE_FIELDS
from lln_fairseq.ops.rotary import BASE
from lln_fairseq.text.labels import class_names
from lln_fairseq.text.pairs import ROBERTA_PAIRS
from lln_fairseq.text.vocabulary import recorded_identity

LENGTHS = ("max_positions", "tokens_per_sample")  # options of our tasks that state a length
# Options whose change is only logged, with their defaults in checkpoints that do not state them.
COMPARED_OPTIONS = {
    "rotary": False,
    "rotary_base": BASE,
    "pair_form": ROBERTA_PAIRS,
    "activation_fn": "gelu",
    "layer_norm_eps": 1e-5,
}
PRESET_HEADS = {name: sizes[SIZE_FIELDS.index("encoder_attention_heads")] for name, sizes in PRESETS.items()}
ANY_INPUTS = "any"  # the entry "inputs" of the plugin's state, see `takes_any_inputs`

logger = logging.getLogger(__name__)


def check_compatibility(state: Mapping[str, Any], model: nn.Module, task: Any, path: str) -> None:
    """Check that a checkpoint can be loaded into a model, and log a warning if its attention or an option differs.

    UserError is raised if the checkpoint was trained with another dictionary or tokenizer than the task's, or with
    other labels if its classification head is loaded, if it has other sizes or its layer norms in other places, or if
    the two attentions differ and one of them replaces whole encoder layers. The checkpoint can be loaded lazily.
    """
    check_model_dictionary(state, task, path)
    options = getattr(model, "args", {})
    stored = stored_options(state)["model"]
    check_sizes(state, options, path)
    if "attention" not in options or not stored:
        return
    if options.get("load_checkpoint_heads"):
        check_model_labels(state, task, path)
    is_pre_norm = bool(options.get("encoder_normalize_before"))
    was_pre_norm = bool(stored.get("encoder_normalize_before"))
    if is_pre_norm != was_pre_norm:
        raise UserError(
            f"{path} was trained with encoder_normalize_before = {was_pre_norm}, here it is {is_pre_norm}, and a model "
            "needs the norms that it was trained with: leave out this option, or a layout that sets it"
        )
    for key in COMPARED_OPTIONS:
        value = options.get(key, COMPARED_OPTIONS[key])
        stored_value = stored.get(key, COMPARED_OPTIONS[key])
        if value != stored_value:
            logger.warning(f"{path} was trained with {key} = {stored_value}, here it is {value}")
    layers = softmax_layers(options)
    stored_layers = softmax_layers(stored)
    if layers != stored_layers:
        logger.warning(f"{path} was trained with softmax_layers = {stored_layers}, here it is {layers}")
    name = options["attention"]
    stored_name = stored.get("attention", STOCK_ATTENTION)
    if name != stored_name:
        for mechanism in (str(name), str(stored_name)):
            with user_errors():
                reject_layer_mechanism(
                    mechanism,
                    f"{path} has {stored_name}, this model {name}: neither has the other's parameters",
                )
        logger.warning(f"{path} was trained with attention = {stored_name}, here it is {name}")
        return
    for field in dataclasses.fields(MECHANISMS[name].config):
        key = f"{name}_{field.name}"
        if key not in options or key not in stored:
            continue
        stored_value = option_value(key, stored[key], options)
        value = option_value(key, options[key], options)
        if stored_value != value:
            logger.warning(f"{path} was trained with {key} = {stored_value}, here it is {value}")


def option_value(key: str, value: Any, options: Mapping[str, Any]) -> str:
    """Return the value of an attention's option as text; a block size of None is the head dimension of the model."""
    if key.endswith("_block_size") and value is None:
        value = options["encoder_embed_dim"] // options["encoder_attention_heads"]
    return str(value)


def check_sizes(state: Mapping[str, Any], options: Any, path: str) -> None:
    """Raise UserError if the RoBERTa in a checkpoint has other sizes than the model that will load it.

    The number of heads is not compared if the checkpoint's configuration does not state it. Nothing is checked if the
    options, a mapping or Namespace, are not those of a RoBERTa.
    """
    options = plain_options(options)
    if not set(SIZE_FIELDS) <= options.keys():
        return
    stored = stored_options(state)["model"]
    name = str(stored.get("_name"))
    sizes = parameter_sizes(state["model"])
    heads = stored.get("encoder_attention_heads") or PRESET_HEADS.get(name.rpartition("_")[2])
    if isinstance(heads, int):
        sizes["encoder_attention_heads"] = heads
    differing = [key for key in SIZE_FIELDS if key in sizes and sizes[key] != options[key]]
    if not differing:
        return
    if not sizes.get("encoder_layers"):
        raise UserError(f"{path} does not hold a RoBERTa (its model is {name}): give the checkpoint of a RoBERTa")
    if HydraConfig.initialized():
        advice = "leave out model= and these options, and the run takes them from the checkpoint"
    else:
        flags = " ".join(f"--{key.replace('_', '-')} {sizes[key]}" for key in differing)
        advice = f"give {flags}"
    raise UserError(
        f"{path} has {_format_sizes(sizes, differing)}, but this run has {_format_sizes(options, differing)}: {advice}"
    )


def _format_sizes(sizes: Mapping[str, Any], keys: list[str]) -> str:
    return " ".join(f"{key}={sizes[key]}" for key in keys)


def require_roberta_layers(options: Mapping[str, Any], path: Any) -> None:
    """Raise UserError if the mechanism in a model's options replaces whole encoder layers."""
    with user_errors():
        reject_layer_mechanism(str(options.get("attention")), f"{path} is therefore not a RoBERTa")


def dictionary_hash(dictionary: Any) -> str:
    """Return the sha256 of the dictionary's symbols in their order. Data sets with equal hashes can share a model."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()


def check_model_dictionary(state: Mapping[str, Any], task: Any, path: str) -> None:
    """Raise UserError if a checkpoint was trained with a dictionary or a tokenizer that differs from the task's.

    The number of symbols is always compared with the embedding, if there is one. The symbols themselves are compared
    only if this project recorded their hash in the checkpoint, and the tokenizer only if it is recorded on both sides.
    """
    dictionary = task.source_dictionary
    embedding = _find_parameter(state, EMBEDDING)
    data = (task.cfg or task.args).data
    message = f"the dictionary of {data} is not the one that {path} was made with"
    if embedding is not None and embedding.shape[0] != len(dictionary):
        raise UserError(
            f"{message}: it has {len(dictionary)} symbols, and the checkpoint has {embedding.shape[0]}. Binarize with "
            "the checkpoint's dict.txt"
        )
    recorded_hash = plugin_state(state).get("dictionary")
    if recorded_hash and recorded_hash != dictionary_hash(dictionary):
        raise UserError(
            f"{message}: it has the same number of symbols, but different ones or another order. Binarize with the "
            "checkpoint's dict.txt"
        )
    directory = split_paths(data)[0]
    check_tokenizer(state, recorded_identity(Path(directory)), directory, path)


def check_tokenizer(state: Mapping[str, Any], identity: str, where: str, path: str) -> None:
    """Raise UserError if a checkpoint was made with another tokenizer than the one with this identity.

    The dictionary does not show it: the symbols of a tokenizer.json are numbers. Nothing is checked if `identity`, that
    of a `Vocabulary`, is "", or if the checkpoint records no tokenizer. `where` names the tokenizer in the message.
    """
    recorded = plugin_state(state).get("tokenizer")
    if recorded and identity and recorded != identity:
        raise UserError(
            f"the tokenizer of {where} is not the one that {path} was made with, although both have the same symbols: "
            "the same ids would stand for other texts. Use the checkpoint's tokenizer"
        )


def check_model_labels(state: Mapping[str, Any], task: Any, path: str) -> None:
    """Raise UserError if the labels recorded in a checkpoint differ from the task's, even if only the order differs.

    Nothing is checked if the task has no labels, or if the checkpoint records none.
    """
    if not hasattr(task, "label_dictionary"):
        return
    trained = plugin_state(state).get("labels", [])
    if trained and trained != label_names(task):
        raise UserError(f"{path} was trained with the labels {trained}, but {task.cfg.data} has {label_names(task)}")


def label_names(task: Any) -> list[str]:
    """Return the label of every class, in the order of label/dict.txt; empty for a regression.

    data_prep writes that file in the order of its table of tasks, but fairseq-preprocess orders labels by frequency, so
    that "1" can be class 0. Without this list, the number of a class has no meaning.
    """
    if task.cfg.regression_target:
        return []
    return class_names(task.label_dictionary.symbols[task.label_dictionary.nspecial :])


def is_finetuned(task: Any) -> bool:
    """Return True if this is the name of a sentence prediction task, fairseq's or this project's."""
    return str(task).endswith("sentence_prediction")


def takes_any_inputs(state: Mapping[str, Any]) -> bool:
    """Return True for a classifier from Hugging Face, which takes texts and pairs: its files do not say which."""
    return plugin_state(state).get("inputs") == ANY_INPUTS


def longest_sequence(state: Mapping[str, Any]) -> int | None:
    """Return the length in tokens of the longest sequence that the model in a checkpoint accepts.

    That is the number of positions in its positional table. Without a table, it is the first positive length among the
    model's max_positions and the task's max_positions and tokens_per_sample, or None if there is none.
    """
    table = _find_parameter(state, POSITIONS)
    if table is not None:
        return table.shape[0] - POSITION_OFFSET
    stored = stored_options(state)
    lengths = [stored["model"].get("max_positions"), *(stored["task"].get(key) for key in LENGTHS)]
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _find_parameter(state: Mapping[str, Any], name: str) -> Tensor | None:
    """Return a parameter by its name or by its name in fairseq's checkpoints of 2019; None if there is none."""
    parameters = state.get("model", {})
    old_name = name.replace("encoder", "decoder", 1)
    return parameters.get(name, parameters.get(old_name))
