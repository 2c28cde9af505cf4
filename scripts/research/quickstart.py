"""Prepare the demo data, pre-train, fine-tune, evaluate, and print a table. scripts/quickstart.sh starts this program.

Run an interrupted command again to continue it: training resumes, and finished steps are not repeated.
"""

import argparse
import csv
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from data_prep.encoders import ENCODERS
from lln_fairseq.analysis.events import Curve, read_curves
from lln_fairseq.command import run_main
from lln_fairseq.terminal import text_table
from scripts.figures import Settings, figure_8
from scripts.research.training import call, call_logged, format_override, prepare_demo_data, score, train_words

ATTENTION = "lln_diag"
BASELINE = "softmax"
SPLITS = {"valid": "dev", "test": "test"}  # the names of the files in GLUE's layout
READING = """
Half a million tokens of pre-training do not help this task; --compare shows the same model without pre-training. To see
a real pre-trained encoder, and how it is linearized: scripts/quickstart.sh --from-pretrained"""

# --from-pretrained
ENCODER = "minilm"
LINEAR_OPTIONS = {"mix": "joint_offset", "gain": "learned", "block_size": "32"}
TRANSFER_STEPS = 200
TRANSFER_LENGTH = 128  # tokens of the longest training text of linearize; the demo's sentences have 27 on average


class Experiment:
    """Runs programs one after the other, with their output in OUT/logs, and keeps their wall times in seconds."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.args = args
        self.out = out
        self.run_override = "run=gpu1" if torch.cuda.is_available() else "run=cpu"
        self.suffix = "" if args.seed == 1 else f"_seed{args.seed}"  # ends the names of fine-tunings
        self.times: dict[str, float] = {}
        self.data = args.data

    def step(self, name: str, words: list[str], updates: int | None = None) -> None:
        """Run `python -m WORDS`. `updates` is the length of its progress bar."""
        start = time.monotonic()
        call_logged(name, words, self.out / "logs" / f"{name.replace(' ', '_')}.log", updates)
        self.times[name] = time.monotonic() - start

    def finetune(self, name: str, overrides: list[str], updates: int) -> dict[str, dict[str, float]]:
        """Fine-tune in OUT/finetune_NAME, and return the scores of the best checkpoint by split."""
        directory = self.out / f"finetune_{name}"
        overrides = [self.run_override, f"common.seed={self.args.seed}", *overrides]
        self.step(f"fine-tune {name}", train_words("finetune", directory, overrides), updates)
        score(directory, list(SPLITS), partial(self.step, f"evaluate {name}"))
        return {split: json.loads((directory / f"{split}.json").read_text()) for split in SPLITS}

    def times_table(self) -> str:
        rows = [("wall time of this command", "[s]")]
        for name, seconds in [*self.times.items(), ("sum", sum(self.times.values()))]:
            rows.append((name, f"{seconds:.0f}"))
        return text_table(rows)


@dataclass
class Variant:
    """A model that is fine-tuned: one column of the table."""

    name: str
    attention: str
    pretrained: bool = True


class Quickstart(Experiment):
    """Pre-trains and fine-tunes LLN+Diag and, with --compare, softmax and a model without pre-training."""

    def run_all(self) -> None:
        install_seconds = int(os.environ.get("LLN_INSTALL_SECONDS", "0"))
        if install_seconds:
            self.times["install"] = install_seconds
        start = time.monotonic()
        prepare_demo_data(self.args.data, self.args.archive)
        self.times["data"] = time.monotonic() - start
        variants = [Variant(ATTENTION + self.suffix, ATTENTION)]
        if self.args.compare:
            variants.append(Variant(BASELINE + self.suffix, BASELINE))
            variants.append(Variant(f"no_pretraining{self.suffix}", ATTENTION, pretrained=False))
        scores = {}
        for variant in variants:
            if variant.pretrained:
                self.pretrain(variant.attention)
            scores[variant.name] = self.finetune_variant(variant)
        print(f"\n{self.results_table(variants, scores)}\n\n{self.times_table()}")
        dev, test = bag_of_words_accuracies(Path(self.args.data))
        print(f"\nTF-IDF and logistic regression: {100 * dev:.1f} % on dev, {100 * test:.1f} % on test")
        print(READING)
        pictures = ", ".join(map(str, self.draw_curves(variants)))
        print(f"\ncurves: {pictures}\nTensorBoard: {self.out}, watch it with: tensorboard --logdir {self.out}")

    def pretrain(self, attention: str) -> None:
        updates = self.args.updates or OmegaConf.load("configs/corpus/demo.yaml").optimization.max_update
        overrides = ["model=nano", f"attention={attention}", self.run_override, "corpus=demo"]
        overrides += [format_override("task.data", f"{self.args.data}/lm"), f"optimization.max_update={updates}"]
        words = train_words("pretrain", self.out / f"pretrain_{attention}", overrides)
        self.step(f"pre-train {attention}", words, updates)

    def finetune_variant(self, variant: Variant) -> dict[str, dict[str, float]]:
        overrides = ["model=nano", f"attention={variant.attention}", "glue=demo"]
        overrides.append(format_override("task.data", f"{self.args.data}/sentiment"))
        if variant.pretrained:
            start = self.out / f"pretrain_{variant.attention}" / "checkpoint_best.pt"
            overrides.append(format_override("checkpoint.finetune_from_model", start))
        updates = OmegaConf.load("configs/glue/demo.yaml").lr_scheduler.total_num_update
        if self.args.updates:
            updates = min(updates, self.args.updates)
            overrides.append(f"optimization.max_update={updates}")
        return self.finetune(variant.name, overrides, updates)

    def results_table(self, variants: list[Variant], scores: dict[str, dict[str, dict[str, float]]]) -> str:
        rows = [["", *scores]]
        for index, label in ((0, "first"), (-1, "last")):
            losses = [self.pretraining_loss(variant, index) for variant in variants]
            rows.append([f"pre-training valid loss, {label} [bits]", *losses])
        for split, label in SPLITS.items():
            for metric, words in (("accuracy", "accuracy on"), ("majority", "majority class of")):
                cells = [f"{100 * by_split[split][metric]:.1f}" for by_split in scores.values()]
                rows.append([f"{words} {label} [%]", *cells])
        return text_table(rows)

    def pretraining_loss(self, variant: Variant, index: int) -> str:
        """Return the first (0) or last (-1) validation loss in bits, or "-" without pre-training or validation."""
        if not variant.pretrained or "valid/loss" not in self.pretraining_curves(variant.attention):
            return "-"
        return f"{self.pretraining_curves(variant.attention)['valid/loss'].values[index]:.2f}"

    def pretraining_curves(self, attention: str) -> dict[str, Curve]:
        return read_curves(self.out / f"pretrain_{attention}" / "tensorboard")

    def draw_curves(self, variants: list[Variant]) -> list[Path]:
        """Draw OUT/pretraining.png and OUT/finetuning.png: the losses, and for fp16 the inverse loss scales."""
        pretraining = {}
        finetuning = {}
        for variant in variants:
            if variant.pretrained:
                pretraining[variant.attention] = self.pretraining_curves(variant.attention)
            finetuning[variant.name] = read_curves(self.out / f"finetune_{variant.name}" / "tensorboard")
        paths = [self.out / "pretraining.png", self.out / "finetuning.png"]
        for path, runs in zip(paths, (pretraining, finetuning), strict=True):
            figure_8(Settings(runs=runs)).save(path)
        return paths


class FromPretrained(Experiment):
    """Linearizes all-MiniLM-L6-v2, and fine-tunes it on the demo's reviews in three forms.

    These are the softmax encoder, LLN+Diag swapped in without training, and LLN+Diag after `lln-fairseq linearize`.
    """

    def run_all(self) -> None:
        encoder = self.out / "encoder"
        teacher = self.out / BASELINE
        linear = self.out / "linear"
        self.data = f"{self.args.data}-{ENCODER}"
        if not (encoder / ENCODERS[ENCODER].files[-1]).is_file():
            call(["data_prep.encoders", ENCODER, "--out", str(encoder)])
        if not (teacher / "model.pt").is_file():
            self.step("convert", ["lln_fairseq", "convert", str(encoder), str(teacher), "--attention", BASELINE])
        prepare_data = ["data_prep.demo", "--out", self.data, "--tokenizer", str(teacher)]
        if self.args.archive:
            prepare_data += ["--archive", self.args.archive]
        call(prepare_data)
        self.linearize(teacher, linear)

        options = [f"model.{ATTENTION}_{key}={value}" for key, value in LINEAR_OPTIONS.items()]
        accuracies = {
            "its softmax": self.finetune_encoder("softmax", teacher, [f"attention={BASELINE}"]),
            "LLN+Diag swapped in": self.finetune_encoder("swapped", teacher, [f"attention={ATTENTION}", *options]),
            "LLN+Diag after transfer": self.finetune_encoder(
                "linearized", linear, [f"attention={ATTENTION}", *options]
            ),
            "TF-IDF, logistic regression": bag_of_words_accuracies(Path(self.data)),
        }
        rows = [["", "dev [%]", "test [%]"]]
        for name, values in accuracies.items():
            rows.append([name, *(f"{100 * accuracy:.1f}" for accuracy in values)])
        print(f"accuracy after fine-tuning\n{text_table(rows)}\n\n{self.times_table()}")

    def linearize(self, teacher: Path, linear: Path) -> None:
        """Train the linear attention on the demo's text, and print its quality on held-out texts."""
        words = ["lln_fairseq", "linearize", str(teacher / "model.pt"), f"{self.data}/lm", str(linear)]
        words += ["--attention", ATTENTION, "--option", *(f"{key}={value}" for key, value in LINEAR_OPTIONS.items())]
        words += ["--length", str(TRANSFER_LENGTH), "--steps", str(self.args.updates or TRANSFER_STEPS)]
        self.step("linearize", words)
        log = (self.out / "logs" / "linearize.log").read_text()
        print(log.partition("held-out")[2].partition("held-out")[0])

    def finetune_encoder(self, name: str, start: Path, attention: list[str]) -> list[float]:
        """Fine-tune the encoder in the directory `start`, and return the accuracies on dev and test."""
        overrides = ["glue=demo_minilm", "model=minilm", *attention]
        overrides.append(format_override("task.data", f"{self.data}/sentiment"))
        updates = OmegaConf.load("configs/glue/demo_minilm.yaml").lr_scheduler.total_num_update
        if self.args.updates:
            updates = self.args.updates
            overrides.append(f"optimization.max_update={updates}")
        overrides.append(format_override("checkpoint.finetune_from_model", start / "model.pt"))
        return [scores["accuracy"] for scores in self.finetune(name + self.suffix, overrides, updates).values()]


def bag_of_words_accuracies(data: Path) -> list[float]:
    """Return the accuracies of TF-IDF with logistic regression on dev and test of the demo's sentences.

    scikit-learn's default options are used. `data` is the directory that data_prep.demo has built.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(), LogisticRegression())
    model.fit(*_read_sentences(data, "train"))
    return [model.score(*_read_sentences(data, name)) for name in SPLITS.values()]


def _read_sentences(data: Path, name: str) -> tuple[list[str], list[str]]:
    """Return the sentences and the labels of DATA/raw/SST-2/NAME.tsv."""
    with (data / f"raw/SST-2/{name}.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"] for row in rows], [row["label"] for row in rows]


def main(argv: list[str] | None = None) -> int:
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
    if args.from_pretrained:
        experiment: FromPretrained | Quickstart = FromPretrained(args, Path(args.out) / f"from_{ENCODER}")
    else:
        experiment = Quickstart(args, Path(args.out))
    return run_main(experiment.run_all, "\ninterrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
