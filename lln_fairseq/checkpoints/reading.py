"""Read checkpoints: nothing in them is executed, damage is reported, configurations are checked."""

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
NUMBERS = ("best", "val_loss", "previous_training_time")  # of extra_state, if they exist
WITHOUT_VALIDATION = "val_loss"  # is None if nothing was validated

# Entries of a model's state that are no weights: seeds, and a buffer that fairseq does not initialize.
NOT_WEIGHTS = ("_extra_state", "_float_tensor")

PLUGIN_STATE = "lln_fairseq"  # our entry in a checkpoint's extra_state


def allow_fairseq_checkpoints() -> None:
    """Let torch.load accept the classes above with weights_only, its safe default."""
    torch.serialization.add_safe_globals(list(FAIRSEQ_CLASSES))


def load_checkpoint_lazily(path: str, mmap: bool = True) -> dict[str, Any]:
    """Load a checkpoint and leave its tensors on the disk. The format before torch 1.6 is read into memory.

    Raises: InputError for a file that is missing, damaged or no checkpoint of fairseq, or that holds classes which are
    not allowed.
    """
    state = load_plain_data(path, mmap)
    parameters = state.get("model") if isinstance(state, dict) else None
    if not isinstance(parameters, dict):
        raise InputError(f"{path} is not a checkpoint of fairseq: it holds no model")
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in parameters.items()):
        raise InputError(f"{path} is not a checkpoint of fairseq: its model is not made of named tensors")
    return state


def load_checkpoint(
    path: str, arg_overrides: Mapping[str, Any] | None = None, load_on_all_ranks: bool | None = None
) -> dict[str, Any]:
    """Load a checkpoint into memory; takes the place of fairseq's load_checkpoint_to_cpu.

    A training, which passes `load_on_all_ranks`, has a configuration of its own and gets none. Other programs get the
    checked one.
    Raises: InputError as `load_checkpoint_lazily` and `checked_config`, and for an incomplete state of the training.
    """
    state = load_checkpoint_lazily(path, mmap=False)
    verify_checksums(path)
    config = None
    if load_on_all_ranks is None:
        config = checked_config(state, path)
        overwrite_args_by_name(config, dict(arg_overrides or {}))
    try:
        state = checkpoint_utils._upgrade_state_dict({**state, "args": None, "cfg": config})
        updates = state["optimizer_history"][-1]["num_updates"]
        position = dict(state["extra_state"]["train_iterator"])
        numbers = [updates, position["epoch"], position["iterations_in_epoch"], *position.values()]
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
    """Return True for a number; several workers save the time of the training as a tensor of one element."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def load_plain_data(path: str, mmap: bool = True) -> Any:
    """Load what torch.save wrote, if it is plain data: tensors, containers and the classes above.

    Raises: InputError for a file that is missing or damaged, or that wants to call anything else.
    """
    if not os.path.isfile(path):
        raise InputError(f"no such checkpoint: {path}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch, about its own formats
            return _load(path, mmap)
    except Exception as error:  # an unpickler may end in any way on bytes that are no pickle
        raise InputError(
            f"cannot load {path}, which is damaged or no checkpoint: {_reason(error)}{_advice(path)}"
        ) from error


def _load(path: str, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except RuntimeError as error:
        if not mmap or "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnicodeEncodeError:  # torch opens only paths that are UTF-8; under a POSIX locale "é" is none
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """Return torch's reason without its advice to load such a file all the same."""
    if found := re.search(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) (\S+)", str(error)):
        return f"it wants to call {found[1]}, which no checkpoint may"
    if "weights_only" in str(error):
        return "it is no plain data"
    return first_line(error).split(". ")[0]


def _advice(path: str) -> str:
    """Return what to do if a run whose last checkpoint is damaged has another one that is whole."""
    folder, name = os.path.split(path)
    if not name.startswith("checkpoint_last"):
        return ""
    for other in sorted(Path(folder).glob("checkpoint*.pt"), key=os.path.getmtime, reverse=True):
        if other.name == name:
            continue
        try:
            load_checkpoint_lazily(str(other))
            verify_checksums(str(other))
        except InputError:
            continue
        return f". {other} is whole: copy it to {name} to go on from it"
    return ""


def verify_checksums(path: str) -> None:
    """Compare every part of a checkpoint with its checksum, which torch writes and does not read; about 1 GB a second.

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
        raise InputError(f"{path} is damaged: {first_line(error)}{_advice(path)}") from error


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


def plugin_state(state: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Return what our tasks wrote into the checkpoint, text and lists of it; empty for a stock one.

    See `HookedTask.get_checkpoint_dict`.
    """
    extra = state.get("extra_state")
    found = extra.get(PLUGIN_STATE) if isinstance(extra, Mapping) else None
    return {key: value for key, value in found.items() if _is_text(value)} if isinstance(found, dict) else {}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value))
