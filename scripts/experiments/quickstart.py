"""Demo data, pre-training, fine-tuning, evaluation, a table and a picture. Run through scripts/quickstart.sh.

Every step that finished is kept: a second run does only what is missing, and an interrupted training resumes.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

from lln_fairseq.command import run_main
from scripts.experiments.bag_of_words import bag_of_words
from scripts.experiments.from_pretrained import FromPretrained, seed_suffix
from scripts.experiments.quickstart_report import draw, table
from scripts.experiments.settings import setting
from scripts.experiments.steps import Steps, evaluation, prepare_demo_data, training

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

    def pretrain(self, attention: str) -> Path:
        folder = self.out / f"pretrain_{attention}"
        updates = self.args.updates or OmegaConf.load("configs/corpus/demo.yaml").optimization.max_update
        overrides = ["corpus=demo", setting("task.data", f"{self.args.data}/lm"), f"optimization.max_update={updates}"]
        self.steps.run(f"pre-train {attention}", self.train("pretrain", attention, folder, overrides), updates)
        return folder / "checkpoint_best.pt"

    def finetune(self, variant: Variant) -> Path:
        folder = self.out / f"finetune_{variant.name}"
        overrides = ["glue=demo", setting("task.data", f"{self.args.data}/sentiment"), f"common.seed={self.args.seed}"]
        if variant.pretrained:
            start = self.out / f"pretrain_{variant.attention}" / "checkpoint_best.pt"
            overrides.append(setting("checkpoint.finetune_from_model", start))
        updates = OmegaConf.load("configs/glue/demo.yaml").lr_scheduler.total_num_update
        if self.args.updates:
            updates = min(updates, self.args.updates)
            overrides.append(f"optimization.max_update={updates}")
        command = self.train("finetune", variant.attention, folder, overrides)
        self.steps.run(f"fine-tune {variant.name}", command, updates)
        return folder

    def evaluate(self, variant: Variant, folder: Path) -> dict[str, dict]:
        """The scores by split."""
        splits = ("valid", "test")
        self.steps.run(f"evaluate {variant.name}", evaluation(folder, splits))
        return {split: json.loads((folder / f"{split}.json").read_text()) for split in splits}

    def train(self, stage: str, attention: str, folder: Path, overrides: list[str]) -> list[str]:
        return training(stage, folder, "model=nano", f"attention={attention}", f"run={self.run}", *overrides)

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
            rows[variant.name] = self.evaluate(variant, self.finetune(variant))
        runs = {variant.name: variant.attention if variant.pretrained else None for variant in variants}
        print("\n" + table(self.out, rows, runs, self.steps.times))
        dev, test = (f"{100 * accuracy:.1f} %" for accuracy in bag_of_words(Path(self.args.data)).values())
        print(f"\nTF-IDF and logistic regression: {dev} on dev, {test} on test")
        print(HONEST)
        picture = draw(self.out, runs)
        print(f"\ncurves: {picture}\nTensorBoard: {self.out}, watch it with: tensorboard --logdir {self.out}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="also softmax, and fine-tuning without pre-training")
    parser.add_argument("--from-pretrained", action="store_true", help="instead: fetches all-MiniLM-L6-v2 (84 MB), "
                        "gives it a linear attention and fine-tunes it, beside its own softmax")  # fmt: skip
    parser.add_argument("--archive", help="the demo's source archive, for machines without a network")
    parser.add_argument(
        "--data", default="data-bin/demo", help="where the demo data is or will be (default: %(default)s)"
    )
    parser.add_argument("--out", default="runs/quickstart", help="checkpoints, logs, picture (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the fine-tunings (default: %(default)s); with another, "
                        "in the same --out, they alone are done again")  # fmt: skip
    parser.add_argument("--updates", type=int, help="at most so many updates a training: a quick try of everything")
    args = parser.parse_args(argv)
    what = FromPretrained if args.from_pretrained else Quickstart
    return run_main(lambda: what(args).all(), "\ninterrupted; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
