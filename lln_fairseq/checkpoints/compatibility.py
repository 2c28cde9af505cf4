"""Check that a checkpoint is compatible with the data and the model that it is loaded for."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lln_fairseq.attention import MECHANISMS, require_attention
from lln_fairseq.checkpoints.config import NO_POSITIONS, STOCK_ATTENTION, stored_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily, plugin_state
from lln_fairseq.errors import InputError, input_errors

EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
LENGTHS = ("max_positions", "tokens_per_sample")  # options of our tasks
NOT_LABELS = ("<mask>", "madeupword")  # what fairseq's tools add to every dictionary

logger = logging.getLogger(__name__)


def check_compatibility(state: Mapping[str, Any], model: nn.Module, task: Any, path: str) -> None:
    """Check a checkpoint before it is loaded into a model, and log a warning if its attention differs.

    Args:
        state: the checkpoint, which may be loaded lazily
        model: the model
        task: its task
        path: the checkpoint's file, for messages
    Raises: InputError if it was made with another dictionary or has other layers.
    """
    check_dictionary(state, task, path)
    options = getattr(model, "args", {})
    stored = stored_options(state)["model"]
    if "attention" not in options or not stored:
        return
    name = options["attention"]
    stored_name = stored.get("attention", STOCK_ATTENTION)
    if name != stored_name:
        for mechanism in (str(name), str(stored_name)):  # one of them may replace whole layers
            with input_errors():
                require_attention(
                    mechanism, f"{path} has {stored_name}, this model {name}: neither has the other's parameters"
                )
        logger.warning(f"{path} was trained with attention = {stored_name}, here it is {name}")
        return
    for field in dataclasses.fields(MECHANISMS[name].config):
        key = f"{name}_{field.name}"
        if key in options and key in stored and stored[key] != options[key]:
            logger.warning(f"{path} was trained with {key} = {stored[key]}, here it is {options[key]}")


def require_roberta_layers(options: Mapping[str, Any], path: Any) -> None:
    """Raise InputError for the options of a model that has layers of its own kind."""
    with input_errors():
        require_attention(str(options.get("attention")), f"{path} is therefore no RoBERTa")


def dictionary_hash(dictionary: Any) -> str:
    """Return the sha256 of the symbols in their order: two data sets with the same one can share a model."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()


def check_dictionary(state: Mapping[str, Any], task: Any, path: str) -> None:
    """Raise InputError if the model of the checkpoint was trained with another dictionary than the task has."""
    dictionary = task.source_dictionary
    weight = _parameter(state, EMBEDDING)
    message = f"the dictionary of {(task.cfg or task.args).data} is not the one that {path} was made with"
    if weight is not None and weight.shape[0] != len(dictionary):
        raise InputError(
            f"{message}: {len(dictionary)} symbols here, {weight.shape[0]} there. Binarise with that dict.txt"
        )
    recorded = plugin_state(state).get("dictionary")
    if recorded and recorded != dictionary_hash(dictionary):
        raise InputError(f"{message}: as many symbols, but others or in another order. Binarise with that dict.txt")


def check_labels(state: Mapping[str, Any], task: Any, path: str) -> None:
    """Raise InputError if a fine-tuned model of ours had other labels, or in another order, than the task has."""
    if not hasattr(task, "label_dictionary"):
        return
    trained = plugin_state(state).get("labels", [])
    if trained and trained != label_names(task):
        raise InputError(f"{path} was trained with the labels {trained}, {task.cfg.data} has {label_names(task)}")


def label_names(task: Any) -> list[str]:
    """Return the label of every class, in the order of label/dict.txt; empty for a regression.

    data_prep writes that file in the order of its table of tasks. fairseq-preprocess orders labels by frequency, so
    that "1" may be class 0: a class number means nothing without this list.
    """
    if task.cfg.regression_target:
        return []
    symbols = task.label_dictionary.symbols[task.label_dictionary.nspecial :]
    return [symbol for symbol in symbols if not symbol.startswith(NOT_LABELS)]


def is_finetuned(task: Any) -> bool:
    """Return True if a model of the task of this name has labels or scores to give."""
    return str(task).endswith("sentence_prediction")


def longest_sequence(path: str) -> int | None:
    """Return the number of positions of the model in a checkpoint; without a table of them, its training's length.

    Returns: None if that is not known.
    Raises: InputError for a file that is no checkpoint.
    """
    state = load_checkpoint_lazily(path)
    table = _parameter(state, POSITIONS)
    if table is not None:
        return table.shape[0] - NO_POSITIONS
    stored = stored_options(state)
    lengths = [stored["model"].get("max_positions"), *(stored["task"].get(key) for key in LENGTHS)]
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _parameter(state: Mapping[str, Any], name: str) -> Tensor | None:
    """Return a parameter by its name or the one of 2019."""
    parameters = state.get("model", {})
    return parameters.get(name, parameters.get(name.replace("encoder", "decoder", 1)))
