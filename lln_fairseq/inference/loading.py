"""The model of a checkpoint, ready to be used: for every program that does not train."""

import os
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.tasks import setup_task
from torch import Tensor

import lln_fairseq.tasks  # noqa: F401  registers our models, tasks and criterions with fairseq
from lln_fairseq.checkpoints.compatibility import check_dictionary, check_labels
from lln_fairseq.checkpoints.config import LANGUAGE_MODELS, stored_options
from lln_fairseq.checkpoints.reading import check_weights, load_checkpoint
from lln_fairseq.errors import InputError, first_line


def load_model(checkpoint: str, data: str | None = None) -> tuple[Any, Any]:
    """The model of a checkpoint, in evaluation mode on the GPU if there is one, and its task with `data` as its data
    directory, or the one of the training; ".", which `lln-fairseq convert` writes, is the checkpoint's own.

    Raises: InputError for a checkpoint that is missing, cannot be read or holds weights that cannot be used, and for
    data without dictionaries or with another dictionary or other labels than the checkpoint's.
    """
    state = load_checkpoint(checkpoint, {"cpu": not torch.cuda.is_available()} | ({"data": data} if data else {}))
    if stored_options(state)["model"].get("_name") in LANGUAGE_MODELS:
        raise InputError(f"{checkpoint} holds a language model, which fairseq-eval-lm scores")
    check_weights(state["model"], checkpoint)
    beside = os.path.dirname(os.path.abspath(checkpoint))
    if data is None and state["cfg"].task.data == "." and os.path.isfile(os.path.join(beside, "dict.txt")):
        state["cfg"].task.data = beside
    task = setup_task(state["cfg"].task, from_checkpoint=True)
    check_dictionary(state, task, checkpoint)
    check_labels(state, task, checkpoint)
    try:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([checkpoint], task=task, state=state)
    except InputError:
        raise
    except Exception as error:  # sizes and names that do not fit each other end wherever the host stumbles
        raise InputError(f"cannot build the model of {checkpoint}: {first_line(error)}") from error
    model.eval()
    return (model.cuda() if torch.cuda.is_available() else model), task


def require_finite(outputs: Tensor, place: str) -> None:
    """Raise InputError if a model's outputs for the input that `place` names are not finite."""
    if not outputs.isfinite().all():
        raise InputError(f"the model gives NaN or infinite outputs for {place}: use another checkpoint")
