"""The training state of all stages of linearize, from which an interrupted run resumes exactly."""

import argparse
import copy
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from lln_fairseq.checkpoints.reading import load_plain_data, verify_checksums
from lln_fairseq.checkpoints.saving import lock_directory
from lln_fairseq.conversion.convert import CHECKPOINT
from lln_fairseq.conversion.directory import save_atomically
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.files import data_hash, sha256_of
from lln_fairseq.linearize.attention_transfer import LayerwiseTrainer
from lln_fairseq.terminal import progress_bar

PROGRESS = "linearize.pt"  # the file next to model.pt from which a run resumes
LR_OPTIONS = {"transfer": "--lr", "distillation": "--distill-lr"}  # by stage
UNTIL_DISTILLATION = ("distill", "distill_lr")  # settings that may change until it has begun
SCORED = ("evaluate_rows", "validation")  # settings that the scores depend on
ALWAYS = (*SCORED, "evaluate_texts")  # settings that may always change; all others may never
# The types of the entries of OUT/linearize.pt.
ENTRIES = {
    "settings": dict,
    "stages": dict,
    "softmax_layers": list | None,
    "scores": dict,
    "complete": bool,
}
ADVICE = "remove it and model.pt to start again, or give another OUT"
LOG_INTERVAL = 10  # steps
SAVE_INTERVAL = 50  # steps
SAVE_SECONDS = 60.0  # a step on long texts can take seconds


class Progress:
    """The training state of all stages, saved in OUT/linearize.pt and restored from it.

    The file stays there after the end, because a later run may add a stage to a finished one.

    Attributes:
        complete: True if OUT holds the finished model of these settings
        softmax_layers: the layers that keep softmax; None if they have not been chosen yet
        scores: scores of a classifier as text by their labels, see `DevScores`
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Load what an earlier run saved. Raises UserError if OUT holds another model, or a run with other settings."""
        self.args = args
        self.file = args.out / PROGRESS
        self.stages: dict[str, Any] = {}  # states of the trainers, by stage
        self.softmax_layers: list[int] | None = None
        self.scores: dict[str, str] = {}
        self.complete = False
        hashes = {
            "teacher": sha256_of(args.teacher),
            "data": data_hash([str(args.data)]),
            "validation": data_hash([str(args.data)], "valid", exact=True),
        }
        settings = vars(args) | hashes
        self.settings = {key: str(value) for key, value in settings.items() if key != "out"}
        model = args.out / CHECKPOINT
        out_is_teacher = args.teacher.resolve().parent == args.out.resolve()
        if out_is_teacher or (model.exists() and not self.file.exists()):
            raise UserError(f"{args.out} holds another model: give another OUT")
        if not self.file.exists():
            return
        saved = load_plain_data(str(self.file))
        verify_checksums(str(self.file))
        self._check_entries(saved)
        self.stages = saved["stages"]
        differing = [key for key, value in self.settings.items() if saved["settings"].get(key) != value]
        changeable: tuple[str, ...] = ALWAYS
        if "distillation" not in self.stages:
            changeable += UNTIL_DISTILLATION
            if args.softmax_layers:  # without the option, layers that keep softmax would become linear
                changeable += ("softmax_layers",)
        changes = []
        for key in differing:
            if key in changeable:
                continue
            if key in hashes or key == "option":
                changes.append(f"another {key}")
            else:
                values = [saved["settings"].get(key), self.settings[key]]
                before, now = (value or "none" for value in values)
                changes.append(f"--{key.replace('_', '-')} {before}, now {now}")
        if changes:
            raise UserError(f"{args.out} holds a run with {'; '.join(changes)}: give another OUT")
        self.complete = saved["complete"] and not differing and model.exists()
        if "softmax_layers" not in differing:
            self.softmax_layers = saved["softmax_layers"]
        if not set(SCORED) & set(differing):
            self.scores = saved["scores"]

    def _check_entries(self, saved: Any) -> None:
        """Raise UserError unless OUT/linearize.pt has the entries that `save` writes."""
        entries = saved if isinstance(saved, dict) else {}
        for name, kind in ENTRIES.items():
            if name not in entries or not isinstance(entries[name], kind):
                raise UserError(f"{self.file} is damaged: it has no usable entry {name}: {ADVICE}")
        layers = entries["softmax_layers"] or []
        if not all(isinstance(layer, int) for layer in layers):
            raise UserError(f"{self.file} is damaged: softmax_layers must be numbers, got {layers}: {ADVICE}")

    def create_directory(self) -> None:
        """Create OUT and lock it as long as this object lives."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        self.lock = lock_directory(self.args.out, "conversion", "OUT")

    def finish(self) -> None:
        """Record that the model has been written."""
        self.complete = True
        self.save()

    def train(self, name: str, trainer: LayerwiseTrainer, texts: Any, longest: int) -> None:
        """Train a stage to its end, from where an earlier run last saved it, and log it in OUT/tensorboard/NAME."""
        if name in self.stages:
            try:
                trainer.restore(self.stages[name])
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as damage:
                reason = first_line(damage)
                raise UserError(f"{self.file}: the stage {name} is damaged ({reason}): {ADVICE}") from damage

        def save(state: dict[str, Any]) -> None:
            self.stages[name] = state
            self.complete = False
            self.save()

        train_stage(name, trainer, texts, self.args.tokens, longest, self.args.out / "tensorboard" / name, save)

    def save_if_trained(self) -> None:
        """Save, unless no trainer has been saved yet: until then, OUT may still be used with other settings."""
        if self.stages:
            self.save()

    def save(self) -> None:
        """Write OUT/linearize.pt; the old one stays whole if that fails."""
        state = {
            "settings": self.settings,
            "stages": self.stages,
            "softmax_layers": self.softmax_layers,
            "scores": self.scores,
            "complete": self.complete,
        }
        save_atomically(state, self.file)


def train_stage(
    name: str,
    trainer: LayerwiseTrainer,
    texts: Any,
    tokens: int,
    longest: int,
    logs: Path,
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Train a stage from the trainer's current step to its end, and print the error of the last steps.

    `name` is one of LR_OPTIONS. The errors of all layers are logged to the TensorBoard directory `logs`. `save` is
    called with the trainer's state every SAVE_INTERVAL steps or SAVE_SECONDS, and at the end.
    """
    recent_losses: deque[list[float]] = deque(maxlen=LOG_INTERVAL)
    last_save = time.monotonic()
    with (
        # An earlier run may have logged steps after the last one that it saved.
        SummaryWriter(str(logs), purge_step=trainer.step + 1) as writer,
        progress_bar(name, trainer.steps, initial=trainer.step, leave=True) as bar,
    ):
        while trainer.step < trainer.steps:
            recent_losses.append(trainer.train_step(texts, tokens, longest))
            assert_finite(recent_losses[-1], name, f"in step {trainer.step}")
            bar.update()
            is_last = trainer.step == trainer.steps
            if is_last or trainer.step % LOG_INTERVAL == 0:
                means = [sum(values) / len(recent_losses) for values in zip(*recent_losses, strict=True)]
                errors = [math.sqrt(mean) for mean in means]
                summary = f"relative error {sum(errors) / len(errors):.3f}"
                bar.set_postfix_str(summary, refresh=False)
                for layer, error in enumerate(errors):
                    writer.add_scalar(f"{name}_error/layer_{layer:02d}", error, trainer.step)
            is_due = trainer.step % SAVE_INTERVAL == 0 or time.monotonic() - last_save > SAVE_SECONDS
            if is_last or is_due:
                last_save = time.monotonic()
                state = trainer.state()
                if is_last:
                    del state["optimizer"]  # of no use to a finished stage
                    state = copy.deepcopy(state)  # because later stages change its tensors
                save(state)
    if recent_losses:
        print(f"{name}: {trainer.steps} steps, {summary}", flush=True)


def assert_finite(values: list[float], stage: str, where: str) -> None:
    """Raise UserError if a value that a stage computed is not finite. `where` says when, for the message."""
    if not all(map(math.isfinite, values)):
        raise UserError(
            f"the {stage} {where} diverged to NaN or infinity: try a lower {LR_OPTIONS[stage]} and another OUT"
        )
