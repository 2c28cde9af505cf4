"""Choose the layers that keep softmax attention after the transfer."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.errors import InputError
from lln_fairseq.linearize.attention_transfer import TokenStream, swapped_attention
from lln_fairseq.linearize.dev_scores import class_logits
from lln_fairseq.linearize.finetuning import kl_divergence
from lln_fairseq.linearize.layerwise import SEED, TOKENS_PER_BATCH, Students
from lln_fairseq.linearize.progress_bar import progress_bar
from lln_fairseq.linearize.task_rows import TaskRows
from lln_fairseq.modules.encoder import parse_softmax_layers

COUNT = 256  # rows or texts of the training data, on which the layers are chosen
BEST = re.compile(r"best:([1-9]\d*)")


def parse_layers(text: str, layers: int, attention: str) -> list[int] | int:
    """Return the layers that --softmax-layers names, counted from 0, or N for "best:N".

    Args:
        text: numbers of layers separated by commas, "best:N", or "" for no layer
        layers: number of layers of the teacher
        attention: the name of the attention of the remaining layers

    Raises: InputError if the text has another form, a layer does not exist, or N is larger than `layers`.
    """
    best = BEST.fullmatch(text)
    if best is not None:
        if int(best[1]) > layers:
            raise InputError(f"--softmax-layers is {text}, but the teacher has {layers} layers")
        return int(best[1])
    try:
        return list(parse_softmax_layers(text, layers, attention))
    except ValueError:
        raise InputError(
            f"--softmax-layers must be best:N, or numbers from 0 to {layers - 1}, separated by commas, got '{text}'"
        ) from None


def mixed_attentions(students: Students, softmax_layers: list[int]) -> list[nn.Module]:
    """Return the attention of every layer: the teacher's in `softmax_layers`, and the student's in all others."""
    attentions: list[nn.Module] = list(students.students)
    for layer in softmax_layers:
        attentions[layer] = students.layers[layer].self_attn.attention
    return attentions


class Distance:
    """The distance of a model from its teacher on at most COUNT rows or texts of the training data."""

    def __init__(self, name: str, outputs: Callable[[], Tensor], measure: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compute the teacher's outputs. The model must still be the teacher.

        Args:
            name: the name of the measure in the report
            outputs: computes the model's outputs with its current attentions
            measure: computes the distance from the model's outputs and the teacher's, in this order
        """
        self.name = name
        self.outputs = outputs
        self.measure = measure
        self.teacher = outputs()

    def __call__(self) -> float:
        """Return the distance of the model with its current attentions."""
        return self.measure(self.outputs(), self.teacher).item()


def classifier_distance(model: Any, task: Any, rows: TaskRows) -> Distance:
    """Build the distance of a classifier: mean KL(teacher ‖ model), or the mean squared error of a regression.

    `model` must still be the teacher, and `rows` its training rows.
    """
    short = np.flatnonzero(rows.lengths <= rows.longest)
    order = torch.randperm(len(short), generator=torch.Generator().manual_seed(SEED))
    numbers = short[order[:COUNT].numpy()]

    def outputs() -> Tensor:
        return class_logits(model, task, rows, numbers)[0].double()

    where = f"on {len(numbers)} rows of split '{rows.split}'"
    if task.cfg.regression_target:
        return Distance(f"mean squared error compared with the teacher {where}", outputs, F.mse_loss)
    return Distance(
        f"KL divergence from the teacher {where}", outputs, lambda logits, teacher: kl_divergence(teacher, logits)
    )


def encoder_distance(model: Any, texts: TokenStream, length: int) -> Distance:
    """Build the distance of an encoder: the relative error ‖h - h'‖ / ‖h'‖ of its last hidden states.

    `model` must still be the teacher. Each text has `length` tokens.
    """
    tokens = texts.batch(COUNT, length, torch.Generator().manual_seed(SEED))
    batches = tokens.split(max(1, TOKENS_PER_BATCH // length))
    device = next(model.parameters()).device

    @torch.no_grad()
    def outputs() -> Tensor:
        return torch.cat([model(src_tokens=batch.to(device), features_only=True)[0] for batch in batches])

    def relative_error(states: Tensor, teacher: Tensor) -> Tensor:
        return (states - teacher).norm() / teacher.norm()

    return Distance(
        f"relative error of the last hidden state on {COUNT} texts of split 'train'", outputs, relative_error
    )


def find_best_layers(count: int, students: Students, distance: Distance) -> list[int]:
    """Restore softmax in one layer at a time, always in the layer that reduces the distance most.

    In each step the distance with every candidate layer is printed. The model is unchanged afterwards.

    Args:
        count: the number of layers to restore
        distance: the distance of the model that the students belong to

    Returns: the layers in the order in which they were restored
    """
    layers = len(students.layers)
    print(f"{distance.name}, with softmax in some layers:", flush=True)
    with swapped_attention(students.layers, students.students):
        print(f"  linear attention in every layer: {distance():.4f}", flush=True)
    chosen: list[int] = []
    evaluations = sum(layers - done for done in range(count))
    with progress_bar("restoring softmax", evaluations, "candidate") as bar:
        for _ in range(count):
            distances = {}
            for layer in range(layers):
                if layer in chosen:
                    continue
                with swapped_attention(students.layers, mixed_attentions(students, [*chosen, layer])):
                    distances[layer] = distance()
                bar.update()
            ranking = sorted(distances, key=lambda layer: distances[layer])
            candidates = ", ".join(f"layer {layer} {distances[layer]:.4f}" for layer in ranking)
            where = "one layer"
            if chosen:
                where = ", ".join(f"layer {layer}" for layer in chosen) + " and one more"
            bar.write(f"  softmax in {where}: {candidates}")
            chosen.append(ranking[0])
    return chosen
