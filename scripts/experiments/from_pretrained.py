"""The quickstart with a real pre-trained encoder: all-MiniLM-L6-v2 becomes linear, and learns the demo's reviews.

Three models are fine-tuned alike: with its own softmax, with LLN+Diag put in its place, and with LLN+Diag after
attention transfer on the demo's text (lln-fairseq linearize).
"""

import argparse
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf

from data_prep.encoders import ENCODERS
from scripts.experiments.bag_of_words import bag_of_words
from scripts.experiments.settings import setting
from scripts.experiments.steps import Steps, call, finetune_and_score
from scripts.terminal import aligned

NAME = "minilm"
ATTENTION, TEACHER = "lln_diag", "softmax"
OPTIONS = {"mix": "joint_offset", "gain": "learned", "block_size": "32"}
RUN = "gpu1" if torch.cuda.is_available() else "cpu"
STEPS = 200
LENGTH = "128"  # tokens of the longest text of the transfer; the demo's sentences have 27


def seed_suffix(seed: int) -> str:
    """What the name of a fine-tuning ends with, so that several seeds stand side by side."""
    return "" if seed == 1 else f"_seed{seed}"


class FromPretrained:
    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.args = Path(args.out) / f"from_{NAME}", args
        self.data = Path(f"{args.data}-{NAME}")
        self.steps = Steps(self.out)

    def all(self) -> None:
        python = [sys.executable, "-m"]
        encoder, teacher, linear = self.out / "encoder", self.out / TEACHER, self.out / "linear"
        if not (encoder / ENCODERS[NAME].files[-1]).is_file():
            call([*python, "data_prep.encoders", NAME, "--out", str(encoder)])
        command = [*python, "lln_fairseq", "convert", str(encoder), str(teacher), "--attention", TEACHER]
        self.steps.run("convert", command)
        archive = ["--archive", self.args.archive] if self.args.archive else []
        call([*python, "data_prep.demo", "--out", str(self.data), "--tokenizer", str(teacher), *archive])
        options = [f"{key}={value}" for key, value in OPTIONS.items()]
        steps = ["--steps", str(self.args.updates or STEPS)]
        command = [*python, "lln_fairseq", "linearize", str(teacher / "model.pt"), str(self.data / "lm"), str(linear),
                   "--attention", ATTENTION, "--option", *options, "--length", LENGTH, *steps]  # fmt: skip
        self.steps.run("linearize", command)
        print((self.out / "logs" / "linearize.log").read_text().partition("held-out")[2].partition("held-out")[0])
        swapped = [f"attention={ATTENTION}", *(f"model.{ATTENTION}_{key}={value}" for key, value in OPTIONS.items())]
        scores = {
            "its softmax": self.tuned("softmax", teacher, [f"attention={TEACHER}"]),
            "LLN+Diag put in": self.tuned("swapped", teacher, swapped),
            "LLN+Diag after transfer": self.tuned("linearized", linear, swapped),
        }
        scores["TF-IDF, logistic regression"] = list(bag_of_words(self.data).values())
        heads = ["", "dev [%]", "test [%]"]
        rows = [[name, *(f"{100 * score:.1f}" for score in values)] for name, values in scores.items()]
        print(f"accuracy after fine-tuning\n{aligned([heads, *rows])}")
        print("\n" + aligned([("wall time", "[s]"), *((step, f"{t:.0f}") for step, t in self.steps.times.items())]))

    def tuned(self, name: str, start: Path, attention: list[str]) -> list[float]:
        """The accuracies on dev and test of the encoder in `start`, fine-tuned with an attention."""
        name += seed_suffix(self.args.seed)
        folder = self.out / f"finetune_{name}"
        overrides = ["glue=demo_minilm", "model=minilm", f"run={RUN}", setting("task.data", self.data / "sentiment"),
                     f"common.seed={self.args.seed}", *attention]  # fmt: skip
        if self.args.updates:
            overrides.append(f"optimization.max_update={self.args.updates}")
        overrides.append(setting("checkpoint.finetune_from_model", start / "model.pt"))
        updates = self.args.updates or OmegaConf.load("configs/glue/demo_minilm.yaml").lr_scheduler.total_num_update
        scores = finetune_and_score(self.steps, name, folder, overrides, updates)
        return [score["accuracy"] for score in scores.values()]
