"""Demo data, pre-training, fine-tuning, evaluation, a table and pictures. Run through scripts/quickstart.sh.

Every step that finished is kept: a second run does only what is missing, and an interrupted training resumes.
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
from scripts.experiments.bag_of_words import bag_of_words
from scripts.experiments.from_pretrained import FromPretrained, seed_suffix
from scripts.experiments.settings import setting
from scripts.experiments.steps import Steps, finetune_and_score, prepare_demo_data, training
from scripts.figures.runs import figure_8
from scripts.figures.sheet import Settings
from scripts.terminal import aligned

ATTENTION, BASELINE = "lln_diag", "softmax"
HONEST = """
Half a million tokens of pre-training do not help this task: --compare shows the same model without. For what real
pre-training brings, and how a softmax model becomes linear: scripts/quickstart.sh --from-pretrained"""


@dataclass
class Variant:
    """One column of the table."""

    name: str
    attention: str
    pretrained: bool = True


class Quickstart:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.steps = Steps(self.out)
        self.run = "gpu1" if torch.cuda.is_available() else "cpu"

    def data(self) -> None:
        start = time.monotonic()
        prepare_demo_data(self.args.data, self.args.archive)
        self.steps.times.setdefault("data", time.monotonic() - start)

    def pretrain(self, attention: str) -> None:
        folder = self.out / f"pretrain_{attention}"
        updates = self.args.updates or OmegaConf.load("configs/corpus/demo.yaml").optimization.max_update
        overrides = ["corpus=demo", setting("task.data", f"{self.args.data}/lm"), f"optimization.max_update={updates}"]
        command = training("pretrain", folder, *self.model(attention), *overrides)
        self.steps.run(f"pre-train {attention}", command, updates)

    def finetune(self, variant: Variant) -> dict[str, dict]:
        """The scores by split."""
        overrides = ["glue=demo", setting("task.data", f"{self.args.data}/sentiment"), f"common.seed={self.args.seed}"]
        if variant.pretrained:
            start = self.out / f"pretrain_{variant.attention}" / "checkpoint_best.pt"
            overrides.append(setting("checkpoint.finetune_from_model", start))
        updates = OmegaConf.load("configs/glue/demo.yaml").lr_scheduler.total_num_update
        if self.args.updates:
            updates = min(updates, self.args.updates)
            overrides.append(f"optimization.max_update={updates}")
        overrides = [*self.model(variant.attention), *overrides]
        return finetune_and_score(self.steps, variant.name, self.out / f"finetune_{variant.name}", overrides, updates)

    def model(self, attention: str) -> list[str]:
        return ["model=nano", f"attention={attention}", f"run={self.run}"]

    def all(self) -> None:
        if seconds := int(os.environ.get("LLN_INSTALL_SECONDS", "0")):
            self.steps.times["install"] = seconds
        again = seed_suffix(self.args.seed)
        variants = [Variant(ATTENTION + again, ATTENTION)]
        if self.args.compare:
            variants += [Variant(BASELINE + again, BASELINE)]
            variants += [Variant(f"no_pretraining{again}", ATTENTION, pretrained=False)]
        self.data()
        rows = {}
        for variant in variants:
            if variant.pretrained:
                self.pretrain(variant.attention)
            rows[variant.name] = self.finetune(variant)
        runs = {variant.name: variant.attention if variant.pretrained else None for variant in variants}
        print("\n" + table(self.out, rows, runs, self.steps.times))
        dev, test = (f"{100 * accuracy:.1f} %" for accuracy in bag_of_words(Path(self.args.data)).values())
        print(f"\nTF-IDF and logistic regression: {dev} on dev, {test} on test")
        print(HONEST)
        pictures = ", ".join(map(str, draw(self.out, runs)))
        print(f"\ncurves: {pictures}\nTensorBoard: {self.out}, watch it with: tensorboard --logdir {self.out}")


def table(out: Path, scores: dict[str, dict], pretrained: dict[str, str | None], times: dict[str, float]) -> str:
    """Format a column for each variant; `pretrained` has the attention it was pre-trained with, or None."""
    columns = list(scores)
    valid = {name: _pretraining(out, attention).get("valid/loss") for name, attention in pretrained.items()}

    def loss(name: str, index: int) -> str:
        curve = valid[name]
        return "-" if curve is None else f"{curve.values[index]:.2f}"

    rows = {
        "pre-training valid loss, first [bits]": [loss(name, 0) for name in columns],
        "pre-training valid loss, last [bits]": [loss(name, -1) for name in columns],
    }
    for split, label in (("valid", "dev"), ("test", "test")):
        rows[f"accuracy on {label} [%]"] = [f"{100 * scores[name][split]['accuracy']:.1f}" for name in columns]
        rows[f"majority class of {label} [%]"] = [f"{100 * scores[name][split]['majority']:.1f}" for name in columns]
    shown = aligned([["", *columns], *([label, *cells] for label, cells in rows.items())])
    seconds = {**times, "sum": sum(times.values())}
    steps = aligned([("wall time", "[s]"), *((name, f"{value:.0f}") for name, value in seconds.items())])
    return f"{shown}\n\n{steps}"


def draw(out: Path, pretrained: dict[str, str | None]) -> list[Path]:
    """Draw the losses of pre-training and of fine-tuning, and the inverse loss scale of fp16 runs, as PNGs."""
    pretraining = {attention: _pretraining(out, attention) for attention in pretrained.values() if attention}
    finetuning = {name: read_curves(out / f"finetune_{name}" / "tensorboard") for name in pretrained}
    paths = []
    for stage, runs in (("pretraining", pretraining), ("finetuning", finetuning)):
        path = out / f"{stage}.png"
        figure_8(Settings(runs=runs)).save(path)
        paths.append(path)
    return paths


def _pretraining(out: Path, attention: str | None) -> dict[str, Curve]:
    return read_curves(out / f"pretrain_{attention}" / "tensorboard") if attention else {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="also softmax, and fine-tuning without pre-training")
    parser.add_argument("--from-pretrained", action="store_true", help="instead: fetches all-MiniLM-L6-v2 (84 MB), "
                        "gives it a linear attention and fine-tunes it, beside its own softmax")  # fmt: skip
    parser.add_argument("--archive", help="the demo's source archive, for machines without a network")
    parser.add_argument(
        "--data", default="data-bin/demo", help="where the demo data is or will be (default: %(default)s)"
    )
    parser.add_argument("--out", default="runs/quickstart", help="checkpoints, logs, pictures (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the fine-tunings (default: %(default)s); with another, "
                        "in the same --out, they alone are done again")  # fmt: skip
    parser.add_argument("--updates", type=int, help="at most so many updates a training: a quick try of everything")
    args = parser.parse_args(argv)
    what = FromPretrained if args.from_pretrained else Quickstart
    return run_main(lambda: what(args).all(), "\ninterrupted; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
