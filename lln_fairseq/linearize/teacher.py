"""Load the teacher of linearize with its task."""

from pathlib import Path
from typing import Any

from fairseq.models.roberta import RobertaModel
from fairseq.utils import split_paths
from omegaconf import OmegaConf

from lln_fairseq.checkpoints.compatibility import is_finetuned, label_names
from lln_fairseq.checkpoints.config import STOCK_ATTENTION, parameter_sizes, plain_options, stored_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.checkpoints.run_tokenizer import FOLDER, directories
from lln_fairseq.conversion.imported_encoder import DICTIONARY
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models import LLNRobertaModel


def require_softmax(teacher: Path) -> int:
    """Return the number of layers of a teacher. UserError is raised if it has an attention other than softmax."""
    state = load_checkpoint_lazily(str(teacher))
    attention = stored_options(state)["model"].get("attention", STOCK_ATTENTION)
    if attention != STOCK_ATTENTION:
        raise UserError(
            f"{teacher} has {attention} attention, but a teacher must have softmax, as from "
            "`lln-fairseq convert --attention softmax`"
        )
    return parameter_sizes(state["model"])["encoder_layers"]


def load_teacher(path: Path, data: Path) -> tuple[LLNRobertaModel, Any]:
    """Load the teacher in evaluation mode, on the GPU if there is one, and set up its task.

    The task of a fine-tuned teacher reads its rows and labels from DATA if DATA holds a sentence prediction task. In
    any other case, the task needs only dictionaries, which are read from the first of these directories that applies:

    1. for a fine-tuned teacher, the folder `tokenizer` next to the checkpoint, if it has them;
    2. for a checkpoint that `lln-fairseq convert` wrote, the directory of the checkpoint;
    3. the data directory that the checkpoint names;
    4. the folder `tokenizer` next to the checkpoint, or the directory of the checkpoint.

    UserError is raised if the dictionary or the labels that the task reads differ from the checkpoint's.
    """
    task_name = stored_options(load_checkpoint_lazily(str(path)))["task"].get("_name")
    task_data = None
    if is_finetuned(task_name):
        if is_task_data(data):
            task_data = str(data)
        elif (path.parent / FOLDER / "input0/dict.txt").is_file():
            task_data = str(path.parent / FOLDER)
    model, task = load_model(str(path), task_data, dictionaries_only=True)
    if is_finetuned(task_name):
        classes = len(label_names(task))
        if not task.cfg.regression_target and classes != task.cfg.num_classes:
            raise UserError(f"{path} has {task.cfg.num_classes} classes, but {task.cfg.data} has {classes} labels")
    return _with_pluggable_attention(model, task), task


def find_dictionary(path: Path, task: Any) -> Path | None:
    """Return the dictionary in the task's data, or None if there is one in `tokenizer` or next to the checkpoint.

    A checkpoint of fairseq-train has only the one in the data.
    """
    if directories(str(path), None):
        return None
    return Path(split_paths(task.cfg.data)[0]) / DICTIONARY


def is_task_data(data: Path) -> bool:
    """Return True if a directory holds the data of a sentence prediction task: it has a folder `input0`."""
    return (data / "input0").is_dir()


def _with_pluggable_attention(model: RobertaModel, task: Any) -> LLNRobertaModel:
    """Return the model unchanged if it is an LLNRobertaModel, otherwise a copy of it as an LLNRobertaModel."""
    if isinstance(model, LLNRobertaModel):
        return model
    options = plain_options(model.args) | {"attention": STOCK_ATTENTION}
    copy = LLNRobertaModel.build_model(OmegaConf.create(options), task)
    for name, head in model.classification_heads.items():
        copy.register_classification_head(name, head.out_proj.out_features, head.dense.out_features)
    copy.load_state_dict(model.state_dict())
    return copy.eval().to(next(model.parameters()).device)
