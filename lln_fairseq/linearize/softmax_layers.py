"""Choose the layers that keep softmax attention after the transfer."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.errors import UserError
from lln_fairseq.inference.evaluate import score_batches
from lln_fairseq.linearize.attention_transfer import TokenStream, swapped_attention
from lln_fairseq.linearize.students import SEED, TOKENS_PER_BATCH, Students
from lln_fairseq.linearize.task_rows import TaskRows
from lln_fairseq.models.options import format_softmax_layers, parse_softmax_layers
from lln_fairseq.terminal import progress_bar

COUNT = 256  # rows or texts of the training data, on which the layers are chosen
MAX_TOKENS = 65536  # of all of these: there are fewer if they are long, because the model is evaluated many times
ROUNDED_TO_ZERO = 5e-5  # smaller distances are printed as 0.0000
BEST = re.compile(r"best:([1-9]\d*)")


def resolve_softmax_layers(text: str, layers: int) -> str:
    """Return the option --softmax-layers with numbers in place of "every:N": "3,7" for "every:4" of 8 layers.

    "best:N", and "" for no layer, are returned unchanged.
    """
    best = BEST.fullmatch(text)
    if best is None:
        return format_softmax_layers(parse_softmax_layers(text, layers)) or ""
    if int(best[1]) > layers:
        raise UserError(f"--softmax-layers is {text}, but the teacher has {layers} layers")
    return text


def layer_list(layers: list[int]) -> str:
    """Return the numbers of layers as text: "layers 1, 2"."""
    numbers = ", ".join(str(layer) for layer in layers)
    return f"layer {numbers}" if len(layers) == 1 else f"layers {numbers}"


def mixed_attentions(students: Students, softmax_layers: list[int]) -> list[nn.Module]:
    """Return one attention per layer: the teacher's in `softmax_layers`, and the student in each remaining layer.

    Call it before `Students.fold`.
    """
    attentions: list[nn.Module] = list(students.students)
    for layer in softmax_layers:
        attentions[layer] = students.layers[layer].self_attn.attention
    return attentions


class Distance:
    """The distance of a model from its teacher on at most COUNT rows or texts of the training data."""

    def __init__(self, name: str, outputs: Callable[[], Tensor], measure: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Compute the teacher's outputs. The model must still have the teacher's attentions.

        `name` is printed in the report. `outputs` computes the model's outputs with its current attentions, and
        `measure` the distance of two outputs, the model's and the teacher's.
        """
        self.name = name
        self.outputs = outputs
        self.measure = measure
        self.teacher = outputs()

    def __call__(self) -> float:
        """Return the distance of the model with its current attentions."""
        return self.measure(self.outputs(), self.teacher).item()


def classifier_distance(model: Any, task: Any, rows: TaskRows) -> Distance:
    """Build the distance of a classifier from its teacher, on at most COUNT random rows.

    Rows of more than `rows.longest` tokens are left out. The rows have at most MAX_TOKENS tokens in total, unless the
    first of them alone has more. The distance is KL(teacher ‖ model) of the class probabilities, averaged over the
    rows. For a regression, it is the mean squared difference of the outputs.
    """
    short = np.flatnonzero(rows.lengths <= rows.longest)
    order = torch.randperm(len(short), generator=torch.Generator().manual_seed(SEED))
    numbers = short[order[:COUNT].numpy()]
    num_tokens = np.cumsum(rows.lengths[numbers])
    numbers = numbers[num_tokens <= max(MAX_TOKENS, num_tokens[0])]

    def outputs() -> Tensor:
        samples = (rows.sample(batch) for batch in rows.batches(numbers, TOKENS_PER_BATCH))
        return score_batches(model, task, rows.split, samples).logits.double()

    where = f"on {len(numbers)} rows of split '{rows.split}'"
    if task.cfg.regression_target:
        return Distance(f"mean squared error compared with the teacher {where}", outputs, F.mse_loss)
    return Distance(f"KL divergence from the teacher {where}", outputs, kl_divergence)


def kl_divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return KL(teacher ‖ model) of the class probabilities, averaged over the rows; the logits are (rows, classes)."""
    return F.kl_div(
        logits.log_softmax(dim=-1), teacher_logits.log_softmax(dim=-1), reduction="batchmean", log_target=True
    )


def relative_distance(states: Tensor, teacher_states: Tensor) -> Tensor:
    """Return ‖h - h'‖ / ‖h'‖ of hidden states or vectors."""
    return (states - teacher_states).norm() / teacher_states.norm()


def encoder_distance(model: Any, texts: TokenStream, length: int) -> Distance:
    """Build the distance of an encoder from its teacher, on COUNT random texts of at most MAX_TOKENS in total.

    The distance is ‖h - h'‖ / ‖h'‖ of the outputs of both last layers. For the ValueError, see `TokenStream.batch`.
    """
    count = min(COUNT, max(1, MAX_TOKENS // length))
    tokens = texts.batch(count, length, torch.Generator().manual_seed(SEED))
    batches = tokens.split(max(1, TOKENS_PER_BATCH // length))
    device = next(model.parameters()).device

    @torch.no_grad()
    def outputs() -> Tensor:
        return torch.cat([model(src_tokens=batch.to(device), features_only=True)[0] for batch in batches])

    return Distance(
        f"relative error of the last hidden state on {count} texts of split 'train'", outputs, relative_distance
    )


def find_best_layers(count: int, students: Students, distance: Distance) -> list[int]:
    """Return the `count` layers in which softmax brings the model closest to the teacher, in the order of their choice.

    Start with linear attention in every layer. Then choose one layer at a time: the layer in which softmax reduces the
    distance most. In each step, the distance for every candidate is printed, and a warning before the first step that
    starts at a distance of 0. The model is unchanged afterwards. Call it before `Students.fold`.
    """
    layers = len(students.layers)
    print(f"{distance.name}, with softmax in some layers:", flush=True)
    with swapped_attention(students.layers, students.students):
        current = distance()
    print(f"  linear attention in every layer: {current:.4f}", flush=True)
    chosen: list[int] = []
    has_warned = False
    evaluations = sum(layers - done for done in range(count))
    with progress_bar("restoring softmax", evaluations, "candidate") as bar:
        for _ in range(count):
            if current < ROUNDED_TO_ZERO and not has_warned:
                bar.write(
                    "  warning: the model equals its teacher already, so rounding errors choose the next layers: give "
                    "texts of several blocks or a smaller block_size, or name the layers"
                )
                has_warned = True
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
            current = distances[ranking[0]]
    return chosen
