"""Write a linear model as a checkpoint with its tokenizer."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lln_fairseq.checkpoints.compatibility import ANY_INPUTS, dictionary_hash, label_names, takes_any_inputs
from lln_fairseq.checkpoints.config import plain_options, stored_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily, plugin_state
from lln_fairseq.checkpoints.run_tokenizer import save_tokenizer
from lln_fairseq.checkpoints.source_settings import settings_entries, stored_settings
from lln_fairseq.conversion.convert import CHECKPOINT, checkpoint_at_update_0, write_converted_encoder
from lln_fairseq.conversion.directory import save_atomically
from lln_fairseq.conversion.imported_encoder import ImportedEncoder
from lln_fairseq.linearize.teacher import is_task_data
from lln_fairseq.models import LLNRobertaModel
from lln_fairseq.models.adapt import ATTENTION_PARAMETERS
from lln_fairseq.models.options import format_softmax_layers


def write_linear_model(
    model: LLNRobertaModel,
    task: Any,
    encoder: ImportedEncoder | None,
    attention: str,
    options: dict[str, Any],
    softmax_layers: Sequence[int],
    teacher: Path,
    data: Path,
    out: Path,
) -> None:
    """Write a linear model to OUT/model.pt, with its dictionaries and its tokenizer.

    `encoder` is the teacher as it was read from its checkpoint, None for a classifier. `options` are all options of the
    attention, and `softmax_layers` have softmax instead. OUT exists and may hold other files.
    """
    model_options = {f"{attention}_{key}": value for key, value in options.items()}
    model_options["softmax_layers"] = format_softmax_layers(softmax_layers)  # also if the teacher has others
    model_options["attention"] = attention
    if encoder is None:
        write_classifier(model, task, model_options, teacher, data, out)
        return
    encoder.options |= model_options
    write_encoder(encoder, model, out)


def write_encoder(encoder: ImportedEncoder, model: LLNRobertaModel, out: Path) -> None:
    """Write a linear encoder to OUT/model.pt, with its dictionary and tokenizer.

    `encoder` has the options of the linear model, and gets the parameters of `model` in place.
    """
    for name, parameter in model.state_dict().items():
        if name in encoder.parameters or ATTENTION_PARAMETERS in name:
            encoder.parameters[name] = parameter.cpu()
    part = out / "part"
    part.mkdir(exist_ok=True)
    write_converted_encoder(encoder, part)
    # The checkpoint is the last one, so that it is never in `out` without the other files.
    for path in sorted(part.iterdir(), key=lambda path: path.name == CHECKPOINT):
        path.replace(out / path.name)
    part.rmdir()


def write_classifier(
    model: LLNRobertaModel, task: Any, options: dict[str, Any], teacher: Path, data: Path, out: Path
) -> None:
    """Write a linear classifier to OUT/model.pt, and its tokenizer and dictionaries to OUT/tokenizer.

    `options` are those of the model that differ from the teacher's. The options of the task are the teacher's, with
    DATA as their data directory if it holds the task.
    """
    teacher_state = load_checkpoint_lazily(str(teacher))
    task_options = plain_options(stored_options(teacher_state)["task"])
    if is_task_data(data):
        task_options["data"] = os.path.abspath(data)
    identity = {
        "dictionary": dictionary_hash(task.source_dictionary),
        "tokenizer": plugin_state(teacher_state).get("tokenizer", ""),
        "labels": label_names(task),
        **settings_entries(stored_settings(teacher_state)),
    }
    if takes_any_inputs(teacher_state):
        identity["inputs"] = ANY_INPUTS
    parameters = {name: value.cpu() for name, value in model.state_dict().items()}
    state = checkpoint_at_update_0(parameters, {**plain_options(model.args), **options}, task_options, identity)
    save_tokenizer(task, str(out), str(teacher))
    save_atomically(state, out / CHECKPOINT)
