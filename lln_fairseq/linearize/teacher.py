"""Load the teacher of linearize with its task, and write the linear model as a checkpoint of the same kind."""

import os
from pathlib import Path
from typing import Any

import torch
from fairseq.models.roberta import RobertaModel
from omegaconf import OmegaConf

from lln_fairseq.checkpoints.compatibility import dictionary_hash, is_finetuned, label_names
from lln_fairseq.checkpoints.config import STOCK_ATTENTION, plain_options, stored_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.checkpoints.run_tokenizer import FOLDER, save_tokenizer
from lln_fairseq.conversion.convert import CHECKPOINT, checkpoint_at_update_0
from lln_fairseq.conversion.directory import write_large
from lln_fairseq.data.files import atomic_path
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models import LLNRobertaModel


def require_softmax(teacher: Path) -> None:
    """Raise InputError if the checkpoint has another attention than softmax, or cannot be read."""
    options = stored_options(load_checkpoint_lazily(str(teacher)))["model"]
    attention = options.get("attention", STOCK_ATTENTION)
    if attention != STOCK_ATTENTION:
        raise InputError(f"{teacher} has {attention} attention, but a teacher must have softmax: give another TEACHER")


def load_teacher(path: Path, data: Path) -> tuple[LLNRobertaModel, Any]:
    """Load the teacher in evaluation mode, on the GPU if there is one, and its task.

    The task of a fine-tuned teacher reads DATA if that holds a task. Otherwise it has the dictionaries of the run.

    Args:
        path: the teacher's checkpoint
        data: the directory DATA

    Raises: InputError if the checkpoint cannot be used, or DATA has another dictionary or other labels.
    """
    task_name = stored_options(load_checkpoint_lazily(str(path)))["task"].get("_name")
    task_data = None
    if is_finetuned(task_name):
        if is_task_data(data):
            task_data = str(data)
        elif (path.parent / FOLDER / "input0/dict.txt").is_file():
            task_data = str(path.parent / FOLDER)
    model, task = load_model(str(path), task_data)
    if is_finetuned(task_name):
        classes = len(label_names(task))
        if not task.cfg.regression_target and classes != task.cfg.num_classes:
            raise InputError(f"{path} has {task.cfg.num_classes} classes, but {task.cfg.data} has {classes} labels")
    return _with_pluggable_attention(model, task), task


def is_task_data(data: Path) -> bool:
    """Return True if a directory holds the inputs of a sentence prediction task, and not plain text."""
    return (data / "input0").is_dir()


def _with_pluggable_attention(model: RobertaModel, task: Any) -> LLNRobertaModel:
    """Return the model itself, or a copy of this project's class if it is fairseq's own RoBERTa."""
    if isinstance(model, LLNRobertaModel):
        return model
    options = plain_options(model.args) | {"attention": STOCK_ATTENTION}
    copy = LLNRobertaModel.build_model(OmegaConf.create(options), task)
    for name, head in model.classification_heads.items():
        copy.register_classification_head(name, head.out_proj.out_features, head.dense.out_features)
    copy.load_state_dict(model.state_dict())
    return copy.eval().to(next(model.parameters()).device)


def write_classifier(
    model: LLNRobertaModel, task: Any, options: dict[str, Any], teacher: Path, data: Path, out: Path
) -> None:
    """Write the linear model of a fine-tuned teacher to OUT/model.pt, and the tokenizer of its data next to it.

    Args:
        model: the linear model, with all parameters
        task: the teacher's task
        options: the model's options that differ from the teacher's
        teacher: the teacher's checkpoint, whose task options are kept
        data: the directory DATA, which replaces the task's data if it holds a task
        out: an existing directory

    Raises: InputError if a file cannot be written.
    """
    task_options = plain_options(stored_options(load_checkpoint_lazily(str(teacher)))["task"])
    if is_task_data(data):
        task_options["data"] = os.path.abspath(data)
    identity = {"dictionary": dictionary_hash(task.source_dictionary), "labels": label_names(task)}
    parameters = {name: value.cpu() for name, value in model.state_dict().items()}
    state = checkpoint_at_update_0(parameters, {**plain_options(model.args), **options}, task_options, identity)
    save_tokenizer(task, str(out))
    with atomic_path(out / CHECKPOINT) as part:
        write_large(part, lambda path: torch.save(state, path))
