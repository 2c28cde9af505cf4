"""The attentions that a search tries, and how it gives them to a trained model."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention import MECHANISMS, reject_layer_mechanism
from lln_fairseq.attention.registry import parse_attention_spec, parse_config
from lln_fairseq.checkpoints.pooling import pool_hidden_states
from lln_fairseq.conversion.directory import save_atomically
from lln_fairseq.conversion.from_fairseq import read_fairseq_checkpoint
from lln_fairseq.errors import user_errors
from lln_fairseq.inference.text_model import TextModel
from lln_fairseq.linearize.attention_transfer import LayerwiseTrainer, swapped_attention
from lln_fairseq.linearize.distillation import Distillation
from lln_fairseq.linearize.progress import train_stage
from lln_fairseq.linearize.softmax_layers import (
    BEST,
    Distance,
    find_best_layers,
    kl_divergence,
    mixed_attentions,
    relative_distance,
)
from lln_fairseq.linearize.students import Students
from lln_fairseq.linearize.task_rows import SampleRows
from lln_fairseq.linearize.write import write_linear_model

TRANSFER_LR = 0.01
DISTILL_LR = 3e-5
TOKENS = 1024  # of a step, if no row is longer
COMPARED_ROWS = 128  # from which the distance to the teacher is computed
TOKENS_PER_BATCH = 4096
SHORT_FIRST = 64  # tokens of a first text that becomes global
FIRST_GLOBAL = {"global_tokens": "first_segment"}  # of a single text, only its first token
JOINT = {"mix": "joint_offset", "gain": "learned"}
STATES = "training.pt"


@dataclass(frozen=True)
class Candidate:
    """An attention to try: its name in the report, its mechanism with all options, and the layers that keep softmax.

    `softmax_layers` is "" for none, or "best:N".
    """

    name: str
    attention: str
    options: dict[str, Any] = field(hash=False)
    softmax_layers: str = ""

    @property
    def num_softmax_layers(self) -> int:
        best = BEST.fullmatch(self.softmax_layers)
        return int(best[1]) if best else 0

    @property
    def folder(self) -> str:
        return "attention_" + "".join(character if character.isalnum() else "_" for character in self.name)

    def with_softmax(self, count: int) -> "Candidate":
        layers = "a layer" if count == 1 else f"{count} layers"
        return Candidate(f"{self.name}, softmax in {layers}", self.attention, self.options, f"best:{count}")


def make_candidate(name: str, attention: str, **options: Any) -> Candidate:
    """Return a candidate with all options of its attention. Raises UserError for wrong ones."""
    with user_errors():
        reject_layer_mechanism(attention, "cannot replace the attention of a trained model")
        config = parse_config(attention, {**MECHANISMS[attention].cls.linearize_options, **options})
    return Candidate(name, attention, vars(config))


def parse_candidate(spec: str) -> Candidate:
    """Return the candidate for an attention as benchmarks name it: NAME or NAME:OPTION=VALUE,OPTION=VALUE."""
    with user_errors():
        attention, options = parse_attention_spec(spec)
        parse_config(attention, options)  # an unknown name has no linearize_options
    return make_candidate(spec, attention, **options)


def candidates_for(lengths: np.ndarray, first_lengths: np.ndarray) -> list[Candidate]:
    """Return the attentions to try for rows.

    Args:
        lengths: the number of tokens of each row, (rows,).
        first_lengths: those of the first text of a pair, (rows,); 1 for a single text, whose first token is global.
    """
    blocks = make_candidate("blocks of 128", "block_diag", block_size=128, **FIRST_GLOBAL)
    windows = make_candidate("windows of 48", "window", block_size=48, **FIRST_GLOBAL)
    if first_lengths.max() == 1:
        return [blocks, windows, make_candidate("LLN+Diag", "lln_diag", block_size=32, **JOINT)]
    is_short = np.quantile(first_lengths, 0.9) <= SHORT_FIRST and np.median(lengths) > 3 * np.median(first_lengths)
    if is_short:
        return [blocks, windows, make_candidate("LLN+Diag", "lln_diag", block_size=64, **JOINT, **FIRST_GLOBAL)]
    joint = make_candidate("LLN+Diag", "lln_diag", block_size=64, **JOINT)
    return [joint, joint.with_softmax(2)]


class Linearizer:
    """Makes linear models of a teacher, which stays unchanged.

    Args:
        teacher: the original with softmax.
        checkpoint: its checkpoint.
        samples: the ids of the rows to train on, each int64 (N,).
        seed: of the trainings.
    """

    def __init__(self, teacher: TextModel, checkpoint: Path, samples: Sequence[Tensor], seed: int) -> None:
        self.teacher = teacher
        self.checkpoint = checkpoint
        self.seed = seed
        self.rows = SampleRows(samples, teacher.task.source_dictionary.pad())
        self.longest = int(self.rows.lengths.max())
        self.tokens = max(TOKENS, self.longest)

    def students(self, candidate: Candidate, steps: int) -> Students:
        """Return the trainer of a new attention for every layer of a copy of the teacher, which is its `model`.

        `steps` are those of the transfer. The copy has softmax until `Students.fold`.
        """
        model = copy.deepcopy(self.teacher.model)
        return Students(model, candidate.attention, candidate.options, TRANSFER_LR, steps, self.seed)

    def distance(self, model: Any) -> Distance:
        """Return the distance of a copy of the teacher from it, on the first COMPARED_ROWS rows."""
        numbers = np.arange(min(COMPARED_ROWS, len(self.rows)))
        measure: Callable[[Tensor, Tensor], Tensor] = kl_divergence
        if not self.teacher.finetuned:
            measure = relative_distance
        elif not self.teacher.labels:
            measure = F.mse_loss

        @torch.no_grad()
        def outputs() -> Tensor:
            parts = []
            for batch in self.rows.batches(numbers, TOKENS_PER_BATCH):
                tokens = self.rows.tokens(batch).to(next(model.parameters()).device)
                parts.append(self._outputs(model, tokens).double())
            return torch.cat(parts)

        return Distance(f"distance from the original on {len(numbers)} rows", outputs, measure)

    def _outputs(self, model: Any, tokens: Tensor) -> Tensor:
        task = self.teacher.task
        if self.teacher.finetuned:
            head = task.cfg.classification_head_name
            logits: Tensor = model(tokens, features_only=True, classification_head_name=head)[0]
            return logits
        hidden = model(tokens, features_only=True)[0]
        return pool_hidden_states(hidden, tokens.ne(self.rows.pad), self.teacher.pooling)

    def swap(self, candidate: Candidate, out: Path) -> dict[str, Any]:
        """Write the teacher with a new attention to OUT/model.pt, untrained, and time its training.

        For "best:N", the last N layers keep softmax: which ones are best is known only after the transfer, and any N
        take the same time.

        Returns: `distance` from the teacher, before any step, and `step_seconds` of the stages "transfer" and
            "distillation"
        """
        students = self.students(candidate, steps=2)
        model = students.model
        layers = list(range(len(students.layers)))[len(students.layers) - candidate.num_softmax_layers :]
        distance = self.distance(model)
        with swapped_attention(students.layers, mixed_attentions(students, layers)):
            swapped_distance = distance()
        seconds = {"transfer": 0.0}
        if MECHANISMS[candidate.attention].cls.learns_transfer:
            untrained = copy.deepcopy(students.students)
            seconds["transfer"] = self._seconds_per_step(students)
            for student, initial in zip(students.students, untrained, strict=True):
                student.load_state_dict(initial.state_dict())
        students.fold(layers)
        self.write(model, candidate, layers, out)
        distillation = Distillation(self.teacher.model, model, DISTILL_LR, 2, self.seed)
        seconds["distillation"] = self._seconds_per_step(distillation)
        return {"distance": swapped_distance, "step_seconds": seconds}

    def _seconds_per_step(self, trainer: LayerwiseTrainer) -> float:
        """Train two steps, and return the time of the second one."""
        trainer.train_step(self.rows, self.tokens, self.longest)
        start = time.monotonic()
        trainer.train_step(self.rows, self.tokens, self.longest)
        return time.monotonic() - start

    def train(self, candidate: Candidate, steps: dict[str, int], out: Path, on_save: Callable[[], None]) -> list[int]:
        """Write the trained model to OUT/model.pt, and return the layers that have softmax.

        An interrupted training continues from what it saved in OUT.

        Args:
            candidate: the attention.
            steps: of the stages "transfer" and "distillation".
            out: a directory, which is created.
            on_save: is called after something was saved.
        """
        out.mkdir(parents=True, exist_ok=True)
        path = out / STATES
        states: dict[str, Any] = torch.load(path) if path.exists() else {}

        def train(name: str, trainer: LayerwiseTrainer) -> None:
            if name in states:
                trainer.restore(states[name])
            train_stage(name, trainer, self.rows, self.tokens, self.longest, out / "tensorboard" / name, saver(name))

        def saver(name: str) -> Callable[[dict[str, Any]], None]:
            def save(state: dict[str, Any]) -> None:
                states[name] = state
                save_atomically(states, path)
                on_save()

            return save

        students = self.students(candidate, steps["transfer"])
        model = students.model
        if MECHANISMS[candidate.attention].cls.learns_transfer:
            train("transfer", students)
        layers: list[int] = states.get("softmax_layers", [])
        if candidate.num_softmax_layers and not layers:
            layers = sorted(find_best_layers(candidate.num_softmax_layers, students, self.distance(model)))
            states["softmax_layers"] = layers
        students.fold(layers)
        train("distillation", Distillation(self.teacher.model, model, DISTILL_LR, steps["distillation"], self.seed))
        self.write(model, candidate, layers, out)
        return layers

    def write(self, model: Any, candidate: Candidate, softmax_layers: Sequence[int], out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        directory = self.checkpoint.parent
        encoder = None
        if not self.teacher.finetuned:
            encoder = read_fairseq_checkpoint(self.checkpoint, None)
        write_linear_model(
            model,
            self.teacher.task,
            encoder,
            candidate.attention,
            candidate.options,
            softmax_layers,
            self.checkpoint,
            directory,
            out,
        )
