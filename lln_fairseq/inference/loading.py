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
from torch import Tensor

import lln_fairseq.tasks  # noqa: F401  registers the models, tasks and criterions of this package
from lln_fairseq.checkpoints.compatibility import check_model_dictionary, check_model_labels
from lln_fairseq.checkpoints.reading import check_weights, load_checkpoint
from lln_fairseq.checkpoints.run_tokenizer import directories, has_dictionary
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.models.linear_choice import AUTO, FLOAT32, PRECISIONS
from lln_fairseq.models.packing import pack_linear_layers

logger = logging.getLogger(__name__)


def load_model(checkpoint: str, data: str | None = None, dictionaries_only: bool = False) -> tuple[Any, Any]:
    """Load a model in evaluation mode, on the GPU if there is one, and set up its task. Return both.

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
        task_config.data = directory
    elif data is None and dictionaries_only:
        task_config.data = _find_dictionaries(checkpoint, task_config.data)
    return build_model(state, checkpoint, data)


def build_model(state: dict[str, Any], checkpoint: str, data: str | None = None) -> tuple[Any, Any]:
    """Build the model of a checkpoint and its task, as `load_model` does.

    `state` is the result of `load_checkpoint`; its configuration is changed in place. With `data` None, the task reads
    that of the training run.
    """
    overrides: dict[str, Any] = {"cpu": not torch.cuda.is_available()}
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
        raise UserError(f"cannot build the model of {checkpoint}: {first_line(error)}") from error
    model.eval()
    if torch.cuda.is_available():
        model = model.cuda()
    return model, task


def _find_dictionaries(checkpoint: str, training_data: str) -> str:
    """Return `training_data` if it has dictionaries or no directory does, or else the first directory that has some."""
    places = directories(checkpoint, training_data)
    if not places or has_dictionary(Path(split_paths(training_data)[0])):
        return training_data
    return str(places[0])


def use_precision(model: Any, precision: str) -> str:
    """Prepare a model for inference in a precision, in place, and return the precision that it has then.

    That is float32 if the requested one is not faster on this CPU; a warning says so, except for "auto". On a GPU, the
    model always computes in float32, although "auto" returns what it would choose for the CPU. The precision, one of
    `linear_choice.PRECISIONS`, is that of the encoder's linear layers only. UserError is raised if it is unknown, or
    LLN_LINEAR does not fit it.
    """
    if torch.cuda.is_available() and precision not in (FLOAT32, AUTO):
        logger.warning("%s is for CPUs: on the GPU, the model computes in float32", precision)
        precision = FLOAT32
    try:
        return pack_linear_layers(model, model.encoder.sentence_encoder.layers, precision)
    except ValueError as error:
        raise UserError(str(error)) from error


def add_precision_option(parser: argparse.ArgumentParser) -> None:
    """Add --precision, which `use_precision` takes."""
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=FLOAT32,
        help="compute the linear layers on a CPU in this precision, if that is faster (default: %(default)s)",
    )


def require_finite(outputs: Tensor, input_name: str) -> None:
    """Raise UserError if a model output is not finite; the message names the input."""
    if not outputs.isfinite().all():
        raise UserError(f"the model gives NaN or infinite outputs for {input_name}: use another checkpoint")
