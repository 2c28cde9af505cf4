"""Load the model of a checkpoint, for every program that does not train."""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.tasks import setup_task
from fairseq.utils import split_paths
from torch import Tensor, nn

import lln_fairseq.tasks  # noqa: F401  registers the models, tasks and criterions of this package
from lln_fairseq.checkpoints.compatibility import check_model_dictionary, check_model_labels
from lln_fairseq.checkpoints.reading import check_weights, load_checkpoint
from lln_fairseq.checkpoints.run_tokenizer import directories, has_dictionary, require_one_path
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.models.adapt import extended_rotary_base
from lln_fairseq.models.half_precision import convert_layers, half_dtype
from lln_fairseq.models.lln_roberta import complete_config
from lln_fairseq.models.packed_linear.choice import AUTO, FLOAT32, PRECISIONS
from lln_fairseq.models.packed_linear.pack import pack_linear_layers

FLOAT16 = "float16"
GPU_DTYPES = {FLOAT32: torch.float32, "bfloat16": torch.bfloat16, FLOAT16: torch.float16}
ALL_PRECISIONS = (*PRECISIONS, FLOAT16)

logger = logging.getLogger(__name__)


def load_model(checkpoint: str, data: str | None = None, dictionaries_only: bool = False) -> tuple[Any, Any]:
    """Load a model in float32 and evaluation mode, on the GPU if there is one, and set up its task. Return both.

    Args:
        checkpoint: the checkpoint file.
        data: the data directory of the task; None takes that of the training run, or the checkpoint's own directory for
            a checkpoint of `lln-fairseq convert`.
        dictionaries_only: the task is used only for its dictionaries. If the data directory of the training run has
            none, because the run was moved, they are read from the run's tokenizer directory or the checkpoint's
            directory. This has no effect if `data` is given.

    Raises:
        UserError: if the checkpoint is missing or damaged, its weights are not finite numbers, or the data's
            dictionaries are missing, or its dictionary or labels differ from the checkpoint's.
    """
    state = load_checkpoint(checkpoint)
    task_config = state["cfg"].task
    directory = os.path.dirname(os.path.abspath(checkpoint))
    if data is None and task_config.data == "." and has_dictionary(Path(directory)):
        require_one_path(directory)
        task_config.data = directory
    elif data is None and dictionaries_only:
        task_config.data = _find_dictionaries(checkpoint, task_config.data)
    return build_model(state, checkpoint, data)


def build_model(
    state: dict[str, Any], checkpoint: str, data: str | None = None, device: str | None = None
) -> tuple[Any, Any]:
    """Build the model of a checkpoint and its task, as `load_model` does.

    `state` is the result of `load_checkpoint`; its configuration is changed in place. With `data` None, the task reads
    that of the training run. With `device` None, the model is on the GPU if there is one.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    overrides: dict[str, Any] = {"cpu": device == "cpu"}
    if data:
        overrides["data"] = data
    overwrite_args_by_name(state["cfg"], overrides)
    check_weights(state["model"], checkpoint)
    task = setup_task(state["cfg"].task, from_checkpoint=True)
    check_model_dictionary(state, task, checkpoint)
    check_model_labels(state, task, checkpoint)
    try:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([checkpoint], task=task, state=state)
    except UserError:
        raise
    except Exception as error:  # contradictory options and tensors raise all kinds of exceptions in fairseq
        reason = " ".join(str(error).split())  # torch names parameters that are missing in the second line
        raise UserError(f"cannot build the model of {checkpoint}: {reason:.300}") from error
    try:
        return model.eval().to(device), task
    except (RuntimeError, AssertionError) as error:  # torch raises both for a device that does not exist
        raise UserError(f"device must be cpu or a GPU of this machine, got {device!r}: {first_line(error)}") from error


def _find_dictionaries(checkpoint: str, training_data: str) -> str:
    """Return `training_data` if it has dictionaries or no directory does, or else the first directory that has some."""
    places = directories(checkpoint, training_data)
    if not places or has_dictionary(Path(split_paths(training_data)[0])):
        return training_data
    require_one_path(places[0])
    return str(places[0])


def set_positions(config: Any, positions: int, checkpoint: str) -> None:
    """Set the number of tokens that the model and its task take, and the base of rotary positions for it, in place.

    Raises UserError if the model has no rotary positions.
    """
    if not isinstance(positions, int) or positions < 1:
        raise UserError(f"positions must be a whole number of at least 1, got {positions!r}")
    if not getattr(config.model, "rotary", False):
        raise UserError(
            f"{checkpoint} has no rotary positions and takes only as many tokens as it was trained with: leave out "
            "positions, or extend it with `lln-fairseq convert --positions` and train it on longer texts"
        )
    changes = {
        "max_positions": positions,  # of the model and of a classification
        "tokens_per_sample": positions,  # of masked language modeling
        "rotary_base": extended_rotary_base(complete_config(config.model), positions),
    }
    overwrite_args_by_name(config, changes)


def use_precision(model: Any, precision: str | None) -> str:
    """Prepare a model for inference in a precision, in place, and return the precision that it has then.

    It is one of ALL_PRECISIONS. On a GPU it is that of the encoder's layers; None and "auto" are `half_dtype` there. On
    a CPU it is that of their linear layers; None is float32 there, and float32 replaces a precision that is not faster.
    A warning says so if the requested precision is not used. UserError is raised if it is unknown, or LLN_LINEAR does
    not fit it.
    """
    if precision is not None and precision not in ALL_PRECISIONS:
        raise UserError(f"precision must be one of {', '.join(ALL_PRECISIONS)}, got {precision!r}")
    layers = model.encoder.sentence_encoder.layers
    device = _device_of(model)
    if device.type == "cuda":
        return _use_gpu_precision(layers, precision, half_dtype(device))
    if precision == FLOAT16:
        logger.warning("float16 is for GPUs: on a CPU, the model computes in float32")
        precision = FLOAT32
    try:
        return pack_linear_layers(model, layers, precision or FLOAT32)
    except ValueError as error:
        raise UserError(str(error)) from error


def _device_of(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def _use_gpu_precision(layers: nn.ModuleList, precision: str | None, default: torch.dtype) -> str:
    """Convert layers to a precision, None and "auto" being `default`, in place, and return its name."""
    default_name = str(default).removeprefix("torch.")
    if precision is None or precision == AUTO:
        precision = default_name
    elif precision not in GPU_DTYPES:
        logger.warning("%s is for CPUs: on the GPU, the model computes in %s", precision, default_name)
        precision = default_name
    if precision != FLOAT32:
        convert_layers(layers, GPU_DTYPES[precision])
    return precision


def add_precision_option(parser: argparse.ArgumentParser) -> None:
    """Add --precision, which `use_precision` takes."""
    parser.add_argument(
        "--precision",
        choices=ALL_PRECISIONS,
        help="compute the encoder in this precision, on a CPU only its linear layers, and only if that is faster "
        "(default: float32 on a CPU; on a GPU bfloat16, or float16 below compute capability 8.0)",
    )


def add_positions_option(parser: argparse.ArgumentParser) -> None:
    """Add --positions, which `set_positions` takes."""
    parser.add_argument(
        "--positions",
        type=int,
        help="tokens of the longest text, for a model with rotary positions (default: what it was trained with)",
    )


def require_finite(outputs: Tensor, input_name: str) -> None:
    """Raise UserError if a model output is not finite; the message names the input."""
    if not outputs.isfinite().all():
        raise UserError(
            f"the model gives NaN or infinite outputs for {input_name}: use another checkpoint, or precision float32"
        )
