"""Load checkpoints without executing anything in them, detect damage, and check configurations."""

import argparse
import collections
import functools
import logging
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
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.files import no_such_checkpoint

# Classes that a checkpoint can contain. argparse.Namespace is in checkpoints of models without a dataclass, such as the
# stock RoBERTa. The remaining classes are in the state that the first worker sends to the others when a run resumes.
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

# Entries of a model's state that are not weights: seeds, and a buffer that fairseq does not initialize.
NOT_WEIGHTS = ("_extra_state", "_float_tensor")

# What DataParallel and torch.compile put into the names of a model's parameters.
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")

PLUGIN_STATE = "lln_fairseq"  # our entry in a checkpoint's extra_state

logger = logging.getLogger(__name__)


def allow_fairseq_checkpoints() -> None:
    """Allow the classes in FAIRSEQ_CLASSES in all files that this process loads with weights_only=True.

    This is torch's safe default.
    """
    torch.serialization.add_safe_globals(list(FAIRSEQ_CLASSES))


def load_checkpoint_lazily(path: str, mmap: bool = True) -> dict[str, Any]:
    """Load a checkpoint of fairseq to the CPU, and leave its tensors on the disk until they are used.

    The entry "model" of the result is a dictionary of tensors by their names, without WRAPPERS, whose removal is logged
    once per file. The checksums and the configuration are not checked. With `mmap` False, the tensors are read into
    memory at once; files in torch's format before 1.6 always are. UserError is raised if the file is missing, damaged
    or not a checkpoint of fairseq, or if it holds classes other than FAIRSEQ_CLASSES.
    """
    state = load_plain_data(path, mmap)
    parameters = state.get("model") if isinstance(state, dict) else None
    if not isinstance(parameters, dict):
        raise UserError(f"{path} is not a checkpoint of fairseq: it holds no model")
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in parameters.items()):
        raise UserError(f"{path} is not a checkpoint of fairseq: its model is not made of named tensors")
    state["model"] = without_wrappers(parameters, path)
    if state["model"].keys() != parameters.keys():
        _report_wrappers(path)
    return state


def without_wrappers(parameters: Mapping[str, Tensor], source: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the parameters under names without WRAPPERS. Raise UserError if two names become equal."""
    renamed = {WRAPPERS.sub("", name): value for name, value in parameters.items()}
    if len(renamed) < len(parameters):
        raise UserError(f"{source} has parameters with and without module. or _orig_mod. in their names")
    return renamed


@functools.cache
def _report_wrappers(path: str) -> None:
    logger.warning("%s: removed module. and _orig_mod. (of DataParallel and torch.compile) from parameter names", path)


def load_checkpoint(
    path: str, arg_overrides: Mapping[str, Any] | None = None, load_on_all_ranks: bool | None = None
) -> dict[str, Any]:
    """Load a checkpoint into memory and check it. This function replaces fairseq's load_checkpoint_to_cpu.

    A training run passes True or False as `load_on_all_ranks`, because it has its own configuration. With None, the
    checkpoint's configuration is checked, and becomes the entry "cfg" of the result, with the values of
    `arg_overrides`; otherwise this entry is None. UserError is raised under the conditions of `load_checkpoint_lazily`,
    `verify_checksums` and `checked_config`, and if the training state is incomplete.
    """
    state = load_checkpoint_lazily(path, mmap=False)
    verify_checksums(path)
    config = None
    if load_on_all_ranks is None:
        config = checked_config(state, path)
        overwrite_args_by_name(config, dict(arg_overrides or {}))
    try:
        return checkpoint_utils._upgrade_state_dict({**state, "args": None, "cfg": config})
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} is damaged: the state of its training is incomplete ({first_line(error)})") from error


def load_plain_data(path: str, mmap: bool = True) -> Any:
    """Load a file that torch.save has written. Its tensors are loaded to the CPU.

    The file may contain only tensors, plain Python values and containers, and the classes in FAIRSEQ_CLASSES. With
    `mmap`, the tensors stay on the disk until they are used, if the file's format supports it. UserError is raised if
    the file is missing or damaged, or contains other classes or functions.
    """
    if not os.path.isfile(path):
        raise UserError(no_such_checkpoint(path))
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about its own formats
            return _torch_load(path, mmap)
    except Exception as error:  # an unpickler may raise anything on bytes that are not a pickle
        raise UserError(
            f"cannot load {path}, which is damaged or not a checkpoint: {_loading_reason(error)}{_advice(path)}"
        ) from error


def _torch_load(path: str, mmap: bool) -> Any:
    """Call torch.load. Do without mmap if the file's format does not allow it."""
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except RuntimeError as error:
        if not mmap or "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)


def _loading_reason(error: Exception) -> str:
    """Return the reason in torch's message, without its advice to load an unsafe file anyway."""
    match = re.search(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) (\S+)", str(error))
    if match:
        return f"it wants to call {match[1]}, which no checkpoint may"
    if "weights_only" in str(error):
        return "it does not hold only plain data"
    return first_line(error).split(". ")[0]


def _advice(path: str) -> str:
    """Return the advice to replace a damaged checkpoint_last with the newest undamaged checkpoint in its directory.

    It is empty if `path` is not a checkpoint_last, or if the directory has no other undamaged checkpoint.
    """
    directory, name = os.path.split(path)
    if not name.startswith("checkpoint_last"):
        return ""
    newest_first = sorted(Path(directory).glob("checkpoint*.pt"), key=os.path.getmtime, reverse=True)
    for candidate in newest_first:
        if candidate.name == name:
            continue
        try:
            load_checkpoint_lazily(str(candidate))
            verify_checksums(str(candidate))
        except UserError:
            continue
        return f". {candidate} is whole: copy it to {name} to resume from it"
    return ""


def verify_checksums(path: str) -> None:
    """Raise UserError if a part of a checkpoint does not match its checksum or cannot be read.

    torch writes the checksums but does not check them, which takes about 1 s per GB. Files and parts without checksums
    are accepted, such as files in torch's format before 1.6.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                if not part.CRC:  # torch was told to save without checksums
                    continue
                with archive.open(part) as stream:
                    while stream.read(1 << 24):  # zipfile compares the checksum at the end
                        pass
    except Exception as error:  # zipfile raises many kinds of exceptions on damaged bytes
        raise UserError(f"{path} is damaged: {first_line(error)}{_advice(path)}") from error


def check_weights(weights: Mapping[str, Tensor], source: str | os.PathLike[str]) -> None:
    """Raise UserError if a weight is not floating-point, or has NaN or infinite values. NOT_WEIGHTS are skipped.

    Programs that use a model without training it call this. A training run does not, so that it can still load what a
    diverged run saved.
    """
    for name, value in weights.items():
        if name.endswith(NOT_WEIGHTS):
            continue
        if not value.is_floating_point():
            dtype = str(value.dtype).removeprefix("torch.")
            raise UserError(f"{source}: {name} is of dtype {dtype}, and weights must be floating-point: dequantize it")
        if not value.float().isfinite().all():
            raise UserError(f"{source}: {name} has NaN or infinite values: use another checkpoint")


def plugin_state(state: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Return what `HookedTask.get_checkpoint_dict` of this project wrote into a checkpoint, such as the run's hashes.

    These are strings and lists of strings by their names; values of other types are left out. The result is empty for a
    checkpoint of stock fairseq.
    """
    extra_state = state.get("extra_state")
    stored = extra_state.get(PLUGIN_STATE) if isinstance(extra_state, Mapping) else None
    if not isinstance(stored, dict):
        return {}
    return {key: value for key, value in stored.items() if _is_text(value)}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value))
