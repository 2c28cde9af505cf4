"""Checkpoint compatibility: loaded without switching torch's safety off, and nothing loaded in silence that differs."""

import argparse
import collections
import hashlib
import logging
import os
import re
import typing
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.utils import split_paths
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode
from torch import Tensor, nn

import lln_fairseq
from lln_fairseq.checkpoint_config import checked_config, stored_options
from lln_fairseq.errors import InputError, first_line
from lln_fairseq.same_run import differences

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


def data_hash(directories: list[str]) -> str:
    """sha256 of the lengths of the training samples: the text is another if they differ; "" where there are none."""
    found = [path for folder in directories for pattern in ("train*.idx", "*/train*.idx", "*/train*.label")
             for path in sorted(Path(folder).glob(pattern))]  # fmt: skip
    parts = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in found)
    return hashlib.sha256(parts).hexdigest() if parts else ""


def check_same_run(trainer: Any) -> None:
    """Raises InputError where the trainer goes on with a run of its save_dir, and its settings or data are others."""
    cfg = trainer.cfg.checkpoint
    path = Path(cfg.save_dir, cfg.restore_file)  # which is absolute if it is elsewhere
    reset = cfg.reset_optimizer or cfg.reset_lr_scheduler or cfg.reset_dataloader or cfg.reset_meters
    if reset or path.parent != Path(cfg.save_dir) or not path.is_file():
        return
    state = peek(str(path))
    found = differences(state.get("cfg"), trainer.cfg)
    recorded = our_state(state).get("data")
    if recorded and recorded != data_hash(split_paths(trainer.cfg.task.data)):
        found.append("other training data")
    if found:
        raise InputError(
            f"{cfg.save_dir} holds another run: {'; '.join(found)}. Give what it had, or another --save-dir "
            "(checkpoint.save_dir)"
        )


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


def peek(path: str, mmap: bool = True) -> dict[str, Any]:
    """A checkpoint with its tensors left on the disk (those of the format before torch 1.6 are read).

    Raises: InputError for a file that is missing, damaged or no checkpoint of fairseq, or that holds classes which are
    not allowed.
    """
    if not os.path.isfile(path):
        raise InputError(f"no such checkpoint: {path}")
    try:
        state = _load(path, mmap)
    except Exception as error:  # an unpickler may end in any way on bytes that are no pickle
        raise InputError(
            f"cannot load {path}, which is damaged or no checkpoint: {_reason(error)}{_whole_ones_beside(path)}"
        ) from error
    parameters = state.get("model") if isinstance(state, dict) else None
    if not isinstance(parameters, dict):
        raise InputError(f"{path} is not a checkpoint of fairseq: it holds no model")
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in parameters.items()):
        raise InputError(f"{path} is not a checkpoint of fairseq: its model is not made of named tensors")
    return state


def _load(path: str, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except RuntimeError as error:
        if not mmap or "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """Without torch's advice to load such a file all the same."""
    if found := re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", str(error)):
        return f"it wants to call {found[1]}, which no checkpoint may"
    return first_line(error) if "weights_only" not in str(error) else "it is no plain data"


def _whole_ones_beside(path: str) -> str:
    """What to do where a run has another checkpoint that can be read."""
    folder, name = os.path.split(path)
    for other in sorted(Path(folder).glob("checkpoint*.pt"), key=os.path.getmtime, reverse=True):
        if name.startswith("checkpoint_last") and other.name != name:
            try:
                peek(str(other))
                check_sums(str(other))
            except InputError:
                continue
            return f". {other} is whole: copy it to {name} to go on from it"
    return ""


def load_to_cpu(
    path: str, arg_overrides: Mapping[str, Any] | None = None, load_on_all_ranks: bool | None = None
) -> dict:
    """fairseq's load_checkpoint_to_cpu: the state with tensors in memory, but no configuration except a checked one.

    A training, which says what the other workers do, has a configuration of its own and gets none.
    Raises: InputError as `peek` and `checked_config`, and for a training's state that is none.
    """
    state, config = peek(path, mmap=False), None
    check_sums(path)
    if load_on_all_ranks is None:
        config = checked_config(state, path)
        overwrite_args_by_name(config, dict(arg_overrides or {}))
    try:
        state = checkpoint_utils._upgrade_state_dict({**state, "args": None, "cfg": config})
        history, position = state["optimizer_history"][-1], state["extra_state"]["train_iterator"]
        numbers = [history["num_updates"], position["epoch"], position["iterations_in_epoch"], *position.values()]
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise InputError(f"{path} is damaged: the state of its training is incomplete ({first_line(error)})") from error
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise InputError(f"{path} is damaged: its update, epoch and position in it are {numbers[:3]}")
    return state


def check_sums(path: str) -> None:
    """Compares every part of a checkpoint with its checksum, which torch writes and does not read; about 1 GB a second.

    Raises: InputError for a file in which a number has changed. Formats before torch 1.6 have no checksums.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            try:
                with archive.open(part) as stream:
                    while stream.read(1 << 24):
                        pass
            except zipfile.BadZipFile as error:
                if part.CRC:  # 0: torch was told to save without
                    raise InputError(f"{path} is damaged: {error}{_whole_ones_beside(path)}") from error


def load_model(checkpoint: str, data: str | None = None) -> tuple[Any, Any]:
    """The model of a checkpoint, in evaluation mode on the GPU if there is one, and its task with `data` as its data
    directory, or the one of the training.

    Raises: InputError for a checkpoint that is missing or cannot be read, and for data without dictionaries or with
    another dictionary than the checkpoint's.
    """
    lln_fairseq.register()
    state = load_to_cpu(checkpoint, {"cpu": not torch.cuda.is_available()} | ({"data": data} if data else {}))
    task = tasks.setup_task(state["cfg"].task, from_checkpoint=True)
    check_dictionary(state, task, checkpoint)
    try:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([checkpoint], task=task, state=state)
    except InputError:
        raise
    except Exception as error:  # sizes and names that do not fit each other end wherever the host stumbles
        raise InputError(f"cannot build the model of {checkpoint}: {first_line(error)}") from error
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
    extra = state.get("extra_state")
    found = extra.get(OUR_STATE) if isinstance(extra, Mapping) else None
    return found if isinstance(found, dict) else {}


def attention_differences(state: Mapping[str, Any], model: nn.Module) -> list[str]:
    """["lln_diag_block_size = 32, here it is 64", ...]: the attention and its options, checkpoint against model."""
    here, there = getattr(model, "args", {}), stored_options(state)["model"]
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
