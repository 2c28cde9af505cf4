"""Whether a checkpoint fits the data and the model that it is loaded for."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lln_fairseq.attention import MECHANISMS, need_attention
from lln_fairseq.checkpoints.config import NO_POSITIONS, STOCK_ATTENTION, stored_options
from lln_fairseq.checkpoints.reading import our_state, peek
from lln_fairseq.errors import InputError, input_errors

EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
LENGTHS = ("max_positions", "tokens_per_sample")  # options of our tasks
NOT_LABELS = ("<mask>", "madeupword")  # what fairseq's tools add to every dictionary

logger = logging.getLogger(__name__)


def check_fit(path: str, model: nn.Module, task: Any) -> None:
    """Says what of a checkpoint does not fit the model and the task, before it is loaded into them.

    Raises: InputError for a file that cannot be read, that was made with another dictionary or has other layers. Logs a
    warning for a model whose attention differs from the one in the checkpoint.
    """
    state = peek(path)
    check_dictionary(state, task, path)
    check_layers(state, model, path)
    for difference in attention_differences(state, model):
        logger.warning(f"{path} was trained with {difference}")


def check_layers(state: Mapping[str, Any], model: nn.Module, path: str) -> None:
    """Raises InputError where one of both, checkpoint and model, has layers of its own kind."""
    here, there = getattr(model, "args", {}), stored_options(state)["model"]
    if not there or "attention" not in here:
        return
    names = str(here["attention"]), str(there.get("attention", STOCK_ATTENTION))
    for name in names if names[0] != names[1] else ():
        with input_errors():
            need_attention(name, f"{path} has {names[1]}, this model {names[0]}: neither has the other's parameters")


def need_robertas_layers(options: Mapping[str, Any], path: Any) -> None:
    """Raises InputError for the options of a model that has layers of its own kind."""
    with input_errors():
        need_attention(str(options.get("attention")), f"{path} is therefore no RoBERTa")


def dictionary_hash(dictionary: Any) -> str:
    """sha256 of the symbols in their order: two data sets with the same one can share a model."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()


def check_dictionary(state: Mapping[str, Any], task: Any, path: str) -> None:
    """Raises InputError if the model of the checkpoint was trained with another dictionary than the task has."""
    ours, weight = task.source_dictionary, _parameter(state, EMBEDDING)
    message = f"the dictionary of {(task.cfg or task.args).data} is not the one that {path} was made with"
    if weight is not None and weight.shape[0] != len(ours):
        raise InputError(f"{message}: {len(ours)} symbols here, {weight.shape[0]} there. Binarise with that dict.txt")
    recorded = our_state(state).get("dictionary")
    if recorded and recorded != dictionary_hash(ours):
        raise InputError(f"{message}: as many symbols, but others or in another order. Binarise with that dict.txt")


def check_labels(state: Mapping[str, Any], task: Any, path: str) -> None:
    """Raises InputError if a fine-tuned model of ours had other labels, or in another order, than the task has."""
    trained = our_state(state).get("labels", []) if hasattr(task, "label_dictionary") else []
    if trained and trained != label_names(task):
        raise InputError(f"{path} was trained with the labels {trained}, {task.cfg.data} has {label_names(task)}")


def label_names(task: Any) -> list[str]:
    """The label of every class, in the order of label/dict.txt; empty for a regression.

    data_prep writes that file in the order of its table of tasks. fairseq-preprocess orders labels by frequency, so
    that "1" may be class 0: a class number means nothing without this list.
    """
    if task.cfg.regression_target:
        return []
    symbols = task.label_dictionary.symbols[task.label_dictionary.nspecial :]
    return [symbol for symbol in symbols if not symbol.startswith(NOT_LABELS)]


def is_finetuned(task: Any) -> bool:
    """Whether a model of the task of this name has labels or scores to give."""
    return str(task).endswith("sentence_prediction")


def longest_sequence(path: str) -> int | None:
    """The number of positions of the model in a checkpoint; without a table of them, the length it was trained for.

    None where that is not known. Raises: InputError.
    """
    state = peek(path)
    if (table := _parameter(state, POSITIONS)) is not None:
        return table.shape[0] - NO_POSITIONS
    stored = stored_options(state)
    lengths = (stored["model"].get("max_positions"), *(stored["task"].get(key) for key in LENGTHS))
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def _parameter(state: Mapping[str, Any], name: str) -> Tensor | None:
    """Under its name or the one of 2019."""
    parameters = state.get("model", {})
    return parameters.get(name, parameters.get(name.replace("encoder", "decoder", 1)))


def attention_differences(state: Mapping[str, Any], model: nn.Module) -> list[str]:
    """["lln_diag_block_size = 32, here it is 64", ...]: the attention and its options, checkpoint against model."""
    here, there = getattr(model, "args", {}), stored_options(state)["model"]
    if "attention" not in here or not there:
        return []
    name, before = here["attention"], there.get("attention", STOCK_ATTENTION)
    if name != before:
        return [f"attention = {before}, here it is {name}"]
    options = [f"{name}_{field.name}" for field in dataclasses.fields(MECHANISMS[name].config)]
    unlike = [key for key in options if key in here and key in there and there[key] != here[key]]
    return [f"{key} = {there[key]}, here it is {here[key]}" for key in unlike]
