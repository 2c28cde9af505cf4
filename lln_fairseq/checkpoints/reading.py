"""Reading checkpoints: torch's safety stays on, damage is named, configurations are checked."""

import argparse
import collections
import os
import re
import typing
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode
from torch import Tensor

from lln_fairseq.checkpoints.config import checked_config
from lln_fairseq.errors import InputError, first_line

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

LARGEST = 1 << 31  # of a count; fairseq seeds numpy with the epoch
NUMBERS = ("best", "val_loss", "previous_training_time")  # of extra_state, if they are there
WITHOUT_VALIDATION = "val_loss"  # is None where nothing was validated

# Entries of a model's state that are no weights: seeds, and a buffer that fairseq does not initialize.
NOT_WEIGHTS = ("_extra_state", "_float_tensor")

OUR_STATE = "lln_fairseq"  # our entry in a checkpoint's extra_state


def allow_fairseq_checkpoints() -> None:
    """Adds the classes above to those that torch.load accepts with weights_only, its safe default."""
    torch.serialization.add_safe_globals(list(FAIRSEQ_CLASSES))


def peek(path: str, mmap: bool = True) -> dict[str, Any]:
    """A checkpoint with its tensors left on the disk (those of the format before torch 1.6 are read).

    Raises: InputError for a file that is missing, damaged or no checkpoint of fairseq, or that holds classes which are
    not allowed.
    """
    state = plain_data(path, mmap)
    parameters = state.get("model") if isinstance(state, dict) else None
    if not isinstance(parameters, dict):
        raise InputError(f"{path} is not a checkpoint of fairseq: it holds no model")
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in parameters.items()):
        raise InputError(f"{path} is not a checkpoint of fairseq: its model is not made of named tensors")
    return state


def check_weights(weights: Mapping[str, Tensor], source: str | os.PathLike[str]) -> None:
    """Raise InputError for weights that a program cannot use as they are.

    Every program that uses a model without training it calls this for what it has read of `source`. A training does
    not: what a diverged run has saved can still be loaded there.
    """
    for name, value in weights.items():
        if name.endswith(NOT_WEIGHTS):
            continue
        if not value.is_floating_point():
            kind = str(value.dtype).removeprefix("torch.")
            raise InputError(f"{source}: {name} is of dtype {kind}, and weights must be floating-point: dequantize it")
        if not value.float().isfinite().all():
            raise InputError(f"{source}: {name} has NaN or infinite values: use another checkpoint")


def plain_data(path: str, mmap: bool = True) -> Any:
    """What torch.save wrote, if it is plain data: tensors, containers and the classes above.

    Raises: InputError for a file that is missing or damaged, or that wants to call anything else.
    """
    if not os.path.isfile(path):
        raise InputError(f"no such checkpoint: {path}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch, about its own formats
            return _load(path, mmap)
    except Exception as error:  # an unpickler may end in any way on bytes that are no pickle
        raise InputError(
            f"cannot load {path}, which is damaged or no checkpoint: {_reason(error)}{_whole_ones_beside(path)}"
        ) from error


def _load(path: str, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except UnicodeEncodeError:  # a path that is no text in this locale: torch opens only paths that are UTF-8
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        if not mmap or "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """Without torch's advice to load such a file all the same."""
    if found := re.search(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) (\S+)", str(error)):
        return f"it wants to call {found[1]}, which no checkpoint may"
    return first_line(error).split(". ")[0] if "weights_only" not in str(error) else "it is no plain data"


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
        history, position = dict(state["optimizer_history"][-1]), dict(state["extra_state"]["train_iterator"])
        numbers = [history["num_updates"], position["epoch"], position["iterations_in_epoch"], *position.values()]
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise InputError(f"{path} is damaged: the state of its training is incomplete ({first_line(error)})") from error
    if not all(isinstance(number, int) and 0 <= number < LARGEST for number in numbers):
        raise InputError(f"{path} is damaged: its update, epoch and position in it are {numbers[:3]}")
    for name in NUMBERS:
        value = state["extra_state"].get(name, 0)
        if not _is_number(value) and (value is not None or name != WITHOUT_VALIDATION):
            raise InputError(f"{path} is damaged: its {name} is no number")
    return state


def _is_number(value: Any) -> bool:
    """Of several workers the time of the training is a tensor of one element."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_sums(path: str) -> None:
    """Compares every part of a checkpoint with its checksum, which torch writes and does not read; about 1 GB a second.

    Raises: InputError for a file in which a number has changed. Formats before torch 1.6 have no checksums.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                if part.CRC:  # 0: torch was told to save without
                    with archive.open(part) as stream:
                        while stream.read(1 << 24):
                            pass
    except Exception as error:  # zipfile has no class of its own for all that damaged bytes end in
        raise InputError(f"{path} is damaged: {first_line(error)}{_whole_ones_beside(path)}") from error


def our_state(state: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """What our tasks wrote into the checkpoint, text and lists of it, see tasks/_resume.py; empty for a stock one."""
    extra = state.get("extra_state")
    found = extra.get(OUR_STATE) if isinstance(extra, Mapping) else None
    return {key: value for key, value in found.items() if _is_text(value)} if isinstance(found, dict) else {}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value))
