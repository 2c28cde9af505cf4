"""Prepare the demo data, pre-train, fine-tune, evaluate, and print a table. scripts/quickstart.sh starts this program.

Run an interrupted command again to continue it: finished steps are skipped, and training resumes.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

from lln_fairseq.analysis.events import Curve, read_curves
from lln_fairseq.command import run_main
from scripts.experiments.bag_of_words import bag_of_words_accuracies
from scripts.experiments.from_pretrained import FromPretrained, seed_suffix
from scripts.experiments.settings import format_override
from scripts.experiments.steps import Steps, finetune_and_score, prepare_demo_data, training_command
from scripts.figures.runs import figure_8
from scripts.figures.sheet import Settings
from scripts.terminal import aligned

ATTENTION = "lln_diag"
BASELINE = "softmax"
READING = """
Half a million tokens of pre-training do not help this task; --compare shows the same model without pre-training. To see
a real pre-trained encoder, and how it is linearized: scripts/quickstart.sh --from-pretrained"""


@dataclass
class Variant:
    """A model that is fine-tuned: one column of the table.

    Attributes:
        name: name of the model and of its fine-tuning run.
        attention: name of the attention.
        pretrained: False starts fine-tuning from random parameters.
    """

    name: str
    attention: str
    pretrained: bool = True


class Quickstart:
    """Runs the steps of the experiment. They write to OUT, and finished steps are skipped."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.steps = Steps(self.out)
        self.device = "gpu1" if torch.cuda.is_available() else "cpu"

    def run_all(self) -> None:
        """Run every step, then print the table and the paths of the pictures."""
        install_seconds = int(os.environ.get("LLN_INSTALL_SECONDS", "0"))
        if install_seconds:
            self.steps.times["install"] = install_seconds
        self.prepare_data()
        variants = self.variants()
        scores = {}
        for variant in variants:
            if variant.pretrained:
                self.pretrain(variant.attention)
            scores[variant.name] = self.finetune(variant)
        print("\n" + format_table(self.out, variants, scores, self.steps.times))
        dev, test = bag_of_words_accuracies(Path(self.args.data)).values()
        print(f"\nTF-IDF and logistic regression: {100 * dev:.1f} % on dev, {100 * test:.1f} % on test")
        print(READING)
        pictures = ", ".join(str(path) for path in draw_curves(self.out, variants))
        print(f"\ncurves: {pictures}\nTensorBoard: {self.out}, watch it with: tensorboard --logdir {self.out}")

    def variants(self) -> list[Variant]:
        """Return the models to fine-tune.

        This is LLN+Diag. With --compare, softmax and LLN+Diag without pre-training follow.
        """
        suffix = seed_suffix(self.args.seed)
        variants = [Variant(ATTENTION + suffix, ATTENTION)]
        if self.args.compare:
            variants.append(Variant(BASELINE + suffix, BASELINE))
            variants.append(Variant(f"no_pretraining{suffix}", ATTENTION, pretrained=False))
        return variants

    def prepare_data(self) -> None:
        """Build the demo data unless the data directory has it. The time is shown in the table."""
        start = time.monotonic()
        prepare_demo_data(self.args.data, self.args.archive)
        self.steps.times.setdefault("data", time.monotonic() - start)

    def pretrain(self, attention: str) -> None:
        """Pre-train a model with an attention in OUT/pretrain_ATTENTION."""
        updates = self.args.updates or OmegaConf.load("configs/corpus/demo.yaml").optimization.max_update
        overrides = [
            *self.model_overrides(attention),
            "corpus=demo",
            format_override("task.data", f"{self.args.data}/lm"),
            f"optimization.max_update={updates}",
        ]
        command = training_command("pretrain", self.out / f"pretrain_{attention}", *overrides)
        self.steps.run(f"pre-train {attention}", command, updates)

    def finetune(self, variant: Variant) -> dict[str, dict]:
        """Fine-tune a variant in OUT/finetune_NAME, evaluate it on valid and test, and return the scores by split."""
        overrides = [
            *self.model_overrides(variant.attention),
            "glue=demo",
            format_override("task.data", f"{self.args.data}/sentiment"),
            f"common.seed={self.args.seed}",
        ]
        if variant.pretrained:
            start = self.out / f"pretrain_{variant.attention}" / "checkpoint_best.pt"
            overrides.append(format_override("checkpoint.finetune_from_model", start))
        updates = OmegaConf.load("configs/glue/demo.yaml").lr_scheduler.total_num_update
        if self.args.updates:
            updates = min(updates, self.args.updates)
            overrides.append(f"optimization.max_update={updates}")
        return finetune_and_score(self.steps, variant.name, self.out / f"finetune_{variant.name}", overrides, updates)

    def model_overrides(self, attention: str) -> list[str]:
        """Return the Hydra overrides for the model size, an attention and the device."""
        return ["model=nano", f"attention={attention}", f"run={self.device}"]


def format_table(
    out: Path, variants: list[Variant], scores: dict[str, dict[str, dict]], times: dict[str, float]
) -> str:
    """Return a table of the results with one column per variant, followed by a table of the wall times.

    Args:
        out: directory of the experiment, from which the losses of pre-training are read.
        variants: the columns of the table.
        scores: the scores that `lln-fairseq evaluate` wrote, by name of the variant and split.
        times: wall times in seconds by step.
    """
    names = [variant.name for variant in variants]
    rows = [
        ["", *names],
        ["pre-training valid loss, first [bits]", *(_pretraining_loss(out, variant, 0) for variant in variants)],
        ["pre-training valid loss, last [bits]", *(_pretraining_loss(out, variant, -1) for variant in variants)],
    ]
    for split, label in (("valid", "dev"), ("test", "test")):
        for metric, words in (("accuracy", "accuracy on"), ("majority", "majority class of")):
            cells = [f"{100 * scores[name][split][metric]:.1f}" for name in names]
            rows.append([f"{words} {label} [%]", *cells])
    time_rows = [("wall time", "[s]")]
    for name, seconds in times.items():
        time_rows.append((name, f"{seconds:.0f}"))
    time_rows.append(("sum", f"{sum(times.values()):.0f}"))
    return f"{aligned(rows)}\n\n{aligned(time_rows)}"


def draw_curves(out: Path, variants: list[Variant]) -> list[Path]:
    """Draw the losses, and for fp16 runs also the inverse loss scales. Return the paths of the two PNGs.

    They are OUT/pretraining.png and OUT/finetuning.png.
    """
    pretraining = {}
    finetuning = {}
    for variant in variants:
        if variant.pretrained:
            pretraining[variant.attention] = _pretraining_curves(out, variant.attention)
        finetuning[variant.name] = read_curves(out / f"finetune_{variant.name}" / "tensorboard")
    paths = []
    for stage, runs in (("pretraining", pretraining), ("finetuning", finetuning)):
        path = out / f"{stage}.png"
        figure_8(Settings(runs=runs)).save(path)
        paths.append(path)
    return paths


def _pretraining_curves(out: Path, attention: str) -> dict[str, Curve]:
    """Return the TensorBoard curves of pre-training with an attention, by their tags."""
    return read_curves(out / f"pretrain_{attention}" / "tensorboard")


def _pretraining_loss(out: Path, variant: Variant, index: int) -> str:
    """Return the validation loss of a variant's pre-training in bits, as text: the first (index 0) or the last (-1).

    The result is "-" if the variant was not pre-trained or has no validation loss.
    """
    if not variant.pretrained:
        return "-"
    curve = _pretraining_curves(out, variant.attention).get("valid/loss")
    if curve is None:
        return "-"
    return f"{curve.values[index]:.2f}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="also train softmax, and fine-tune without pre-training")
    parser.add_argument(
        "--from-pretrained",
        action="store_true",
        help="instead: download all-MiniLM-L6-v2 (84 MB), linearize it and compare it with the original",
    )
    parser.add_argument("--archive", help="local copy of the demo's source archive, for machines without a network")
    parser.add_argument("--data", default="data-bin/demo", help="directory of the demo data (default: %(default)s)")
    parser.add_argument("--out", default="runs/quickstart", help="checkpoints, logs, pictures (default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of fine-tuning (default: %(default)s); another seed in the same --out repeats only fine-tuning",
    )
    parser.add_argument("--updates", type=int, help="maximum updates of each run, to try everything quickly")
    args = parser.parse_args(argv)
    experiment = FromPretrained if args.from_pretrained else Quickstart
    return run_main(lambda: experiment(args).run_all(), "\ninterrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
