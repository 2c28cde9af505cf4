"""Run the quickstart with a real encoder: linearize all-MiniLM-L6-v2, and fine-tune it on the demo's reviews.

Three models are fine-tuned in the same way: the original softmax encoder, the encoder with LLN+Diag swapped in without
training, and the encoder that `lln-fairseq linearize` has trained on the demo's text.
"""

import argparse
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf

from data_prep.encoders import ENCODERS
from scripts.experiments.bag_of_words import bag_of_words_accuracies
from scripts.experiments.settings import format_override
from scripts.experiments.steps import Steps, call, finetune_and_score
from scripts.terminal import aligned

ENCODER = "minilm"
ATTENTION = "lln_diag"
TEACHER = "softmax"
OPTIONS = {"mix": "joint_offset", "gain": "learned", "block_size": "32"}
DEVICE = "gpu1" if torch.cuda.is_available() else "cpu"
TRANSFER_STEPS = 200
TRANSFER_LENGTH = "128"  # tokens of the longest training text of linearize; the demo's sentences have 27 on average


def seed_suffix(seed: int) -> str:
    """Return the suffix for the name of a fine-tuning run: "_seedN" for seed N, but "" for seed 1."""
    if seed == 1:
        return ""
    return f"_seed{seed}"


class FromPretrained:
    """Runs the steps of the experiment. They write to OUT/from_minilm, and finished steps are skipped."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out) / f"from_{ENCODER}"
        self.data = Path(f"{args.data}-{ENCODER}")
        self.steps = Steps(self.out)

    def run_all(self) -> None:
        """Download, convert, linearize and fine-tune, then print the accuracies and the wall times."""
        encoder = self.out / "encoder"
        teacher = self.out / TEACHER
        linear = self.out / "linear"
        if not (encoder / ENCODERS[ENCODER].files[-1]).is_file():
            call([sys.executable, "-m", "data_prep.encoders", ENCODER, "--out", str(encoder)])
        self.convert(encoder, teacher)
        self.prepare_data(teacher)
        self.linearize(teacher, linear)

        softmax_overrides = [f"attention={TEACHER}"]
        linear_overrides = [f"attention={ATTENTION}"]
        linear_overrides += [f"model.{ATTENTION}_{key}={value}" for key, value in OPTIONS.items()]
        accuracies = {
            "its softmax": self.finetune("softmax", teacher, softmax_overrides),
            "LLN+Diag swapped in": self.finetune("swapped", teacher, linear_overrides),
            "LLN+Diag after transfer": self.finetune("linearized", linear, linear_overrides),
            "TF-IDF, logistic regression": list(bag_of_words_accuracies(self.data).values()),
        }
        rows = [["", "dev [%]", "test [%]"]]
        for name, values in accuracies.items():
            rows.append([name, *(f"{100 * accuracy:.1f}" for accuracy in values)])
        print(f"accuracy after fine-tuning\n{aligned(rows)}")
        times = [("wall time", "[s]")]
        for step, seconds in self.steps.times.items():
            times.append((step, f"{seconds:.0f}"))
        print(f"\n{aligned(times)}")

    def convert(self, encoder: Path, teacher: Path) -> None:
        """Convert the downloaded encoder to a fairseq model with softmax attention in the directory `teacher`."""
        command = [sys.executable, "-m", "lln_fairseq", "convert", str(encoder), str(teacher), "--attention", TEACHER]
        self.steps.run("convert", command)

    def prepare_data(self, teacher: Path) -> None:
        """Build the demo data with the tokenizer of the encoder. A finished data directory is kept."""
        command = [sys.executable, "-m", "data_prep.demo", "--out", str(self.data), "--tokenizer", str(teacher)]
        if self.args.archive:
            command += ["--archive", self.args.archive]
        call(command)

    def linearize(self, teacher: Path, linear: Path) -> None:
        """Linearize the model in `teacher`, write the result to `linear`, and print its quality on held-out texts.

        The linear attention is trained on the demo's text.
        """
        command = [sys.executable, "-m", "lln_fairseq", "linearize"]
        command += [str(teacher / "model.pt"), str(self.data / "lm"), str(linear), "--attention", ATTENTION]
        command += ["--option", *(f"{key}={value}" for key, value in OPTIONS.items())]
        command += ["--length", TRANSFER_LENGTH, "--steps", str(self.args.updates or TRANSFER_STEPS)]
        self.steps.run("linearize", command)
        log = (self.out / "logs" / "linearize.log").read_text()
        print(log.partition("held-out")[2].partition("held-out")[0])

    def finetune(self, name: str, start: Path, attention: list[str]) -> list[float]:
        """Fine-tune an encoder and evaluate it.

        Args:
            name: name of the run.
            start: directory of the encoder.
            attention: Hydra overrides that select the attention.

        Returns:
            The accuracies on dev and test, in this order, between 0 and 1.
        """
        name += seed_suffix(self.args.seed)
        overrides = [
            "glue=demo_minilm",
            "model=minilm",
            f"run={DEVICE}",
            format_override("task.data", self.data / "sentiment"),
            f"common.seed={self.args.seed}",
            *attention,
        ]
        updates = OmegaConf.load("configs/glue/demo_minilm.yaml").lr_scheduler.total_num_update
        if self.args.updates:
            updates = self.args.updates
            overrides.append(f"optimization.max_update={updates}")
        overrides.append(format_override("checkpoint.finetune_from_model", start / "model.pt"))
        scores = finetune_and_score(self.steps, name, self.out / f"finetune_{name}", overrides, updates)
        return [score["accuracy"] for score in scores.values()]
