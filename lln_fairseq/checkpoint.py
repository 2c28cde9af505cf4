"""Checkpoint compatibility: loaded without switching torch's safety off, and nothing loaded in silence that differs."""

import argparse
import collections
import hashlib
import logging
import os
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode
from torch import Tensor, nn

import lln_fairseq
from lln_fairseq.errors import InputError, first_line

logger = logging.getLogger(__name__)

# argparse.Namespace: checkpoints of models without a dataclass, the stock RoBERTa among them. The others travel from
# the first worker to the rest when several workers resume.
FAIRSEQ_CLASSES = (
    argparse.Namespace,
    _TensorPlaceholder,
    DictConfig,
    ListConfig,
    AnyNode,
    Metadata,
    ContainerMetadata,
    collections.defaultdict,
    typing.Any,
    dict,
    list,
    int,
)

EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"
POSITIONS = "encoder.sentence_encoder.embed_positions.weight"
MECHANISM = ".self_attn.attention."  # parameters that belong to an attention and not to RoBERTa
STOCK_ATTENTION = "softmax"
OUR_STATE = "lln_fairseq"  # our entry in a checkpoint's extra_state


def allow_fairseq_checkpoints() -> None:
    """Adds the classes above to those that torch.load accepts with weights_only, its safe default."""
    torch.serialization.add_safe_globals(list(FAIRSEQ_CLASSES))


def dictionary_hash(dictionary: Any) -> str:
    """sha256 of the symbols in their order: two data sets with the same one can share a model."""
    return hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()


@contextmanager
def loading(model: nn.Module, task: Any, path: str) -> Iterator[None]:
    """Around the loading of a checkpoint into a model: says what does not fit, before anything is changed.

    Raises: InputError for a file that cannot be read or that was made with another dictionary. Logs a warning for a
    model whose attention differs from the one in the checkpoint.
    """
    if os.path.isfile(path):
        state = peek(path)
        check_dictionary(state, task, path)
        for difference in attention_differences(state, model):
            logger.warning(f"{path} was trained with {difference}")
    yield


def peek(path: str) -> dict[str, Any]:
    """A checkpoint with its tensors left on the disk (those of the format before torch 1.6 are read).

    Raises: InputError for a file that is missing, no checkpoint, damaged, or that holds classes which are not allowed.
    """
    if not os.path.isfile(path):
        raise InputError(f"no such checkpoint: {path}")
    try:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler may end in any way on bytes that are no pickle
        raise InputError(f"cannot load {path}, which is damaged or no checkpoint: {first_line(error)}") from error


def load_model(checkpoint: str, data: str | None = None) -> tuple[Any, Any]:
    """The model of a checkpoint, in evaluation mode on the GPU if there is one, and its task with `data` as its data
    directory, or the one of the training.

    Raises: InputError for a checkpoint that is missing or cannot be read, and for data without dictionaries or with
    another dictionary than the checkpoint's.
    """
    lln_fairseq.register()
    state = peek(checkpoint)
    if "model" not in state or not {"cfg", "args"} & state.keys():
        raise InputError(f"{checkpoint} is not a checkpoint of fairseq: it has no model or no configuration")
    overrides = {"cpu": not torch.cuda.is_available()} | ({"data": data} if data else {})
    full = checkpoint_utils.load_checkpoint_to_cpu(checkpoint, overrides)
    task = tasks.setup_task(full["cfg"].task, from_checkpoint=True)
    check_dictionary(state, task, checkpoint)
    try:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([checkpoint], task=task, state=full)
    except (RuntimeError, KeyError) as error:
        raise InputError(f"cannot load {checkpoint}: {first_line(error)}") from error
    model.eval()
    return (model.cuda() if torch.cuda.is_available() else model), task


def check_dictionary(state: Mapping[str, Any], task: Any, path: str) -> None:
    """Raises InputError if the model of the checkpoint was trained with another dictionary than the task has."""
    ours, message = (
        task.source_dictionary,
        f"the dictionary of {task.cfg.data} is not the one that {path} was made with",
    )
    weight = state.get("model", {}).get(
        EMBEDDING, state.get("model", {}).get(EMBEDDING.replace("encoder", "decoder", 1))
    )
    if weight is not None and weight.shape[0] != len(ours):
        raise InputError(f"{message}: {len(ours)} symbols here, {weight.shape[0]} there. Binarise with that dict.txt")
    recorded = our_state(state).get("dictionary")
    if recorded and recorded != dictionary_hash(ours):
        raise InputError(f"{message}: as many symbols, but others or in another order. Binarise with that dict.txt")


def our_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What our tasks wrote into the checkpoint, see tasks/_resume.py; empty for a stock one."""
    return (state.get("extra_state") or {}).get(OUR_STATE) or {}


def model_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the model in a checkpoint by name, whichever command line and fairseq made it."""
    config = (state.get("cfg") or {}).get("model") or state.get("args")
    return dict(config) if isinstance(config, Mapping | DictConfig) else dict(vars(config)) if config else {}


def attention_differences(state: Mapping[str, Any], model: nn.Module) -> list[str]:
    """["lln_diag_block_size = 32, here it is 64", ...]: the attention and its options, checkpoint against model."""
    here, there = getattr(model, "args", {}), model_options(state)
    if "attention" not in here or not there:
        return []
    name, before = here["attention"], there.get("attention", STOCK_ATTENTION)
    if name != before:
        return [f"attention = {before}, here it is {name}"]
    keys = [key for key in here if key.startswith(f"{name}_") and key in there]
    return [f"{key} = {there[key]}, here it is {here[key]}" for key in keys if there[key] != here[key]]


def adapt(state: dict[str, Tensor], model: nn.Module) -> None:
    """Makes the parameters of another RoBERTa fit: positional table resized, the attention's own parameters left out
    or taken from the new model. In place; `state` has the names of the encoder that RoBERTa uses today."""
    own = model.state_dict()
    if POSITIONS in state and POSITIONS in own and state[POSITIONS].shape != own[POSITIONS].shape:
        rows, padding = own[POSITIONS].shape[0], model.encoder.sentence_encoder.padding_idx
        logger.warning(f"positional table of {state[POSITIONS].shape[0]} rows fitted to {rows}")
        state[POSITIONS] = resize_positions(state[POSITIONS], rows, padding)
    for key in [key for key in state if MECHANISM in key and key not in own]:
        logger.warning(f"{key} of the checkpoint is left out: this attention has no such parameter")
        del state[key]
    for key in [key for key in own if MECHANISM in key and key not in state]:
        logger.warning(f"{key} is not in the checkpoint and starts from its initial value")
        state[key] = own[key]


def resize_positions(table: Tensor, rows: int, padding_idx: int) -> Tensor:
    """A positional table (rows', C) with `rows` rows: cut, or repeated from its start as often as needed.

    fairseq's table begins with padding_idx + 1 rows that belong to no position; they stay.
    """
    offset = padding_idx + 1
    positions, wanted = table[offset:], rows - offset
    repeats = -(-wanted // positions.shape[0])
    return torch.cat([table[:offset], positions.repeat(repeats, 1)[:wanted]])
