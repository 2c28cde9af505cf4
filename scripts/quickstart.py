"""Show on real text what this project does. scripts/quickstart.sh starts this program.

A tiny model with LLN+Diag is pre-trained from scratch on short reviews, for as long as it takes to see its loss fall.
Then all-MiniLM-L6-v2, a published encoder, is fine-tuned on movie reviews with its softmax attention and made linear.

Run an interrupted command again to continue it: training resumes, and finished steps are not repeated.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from data_prep.encoders import ENCODERS
from lln_fairseq import load
from lln_fairseq.analysis.events import read_curves
from lln_fairseq.command import run_main
from lln_fairseq.terminal import text_table
from lln_fairseq.timing import interleaved
from lln_fairseq.training.recipes import format_override
from scripts.benchmarks.prediction import loaded_logits, random_tokens
from scripts.figures import Settings, figure_8
from scripts.train_tasks import (
    call,
    call_logged,
    prepare_demo_data,
    run_override,
    score,
    train_words,
)

ATTENTION = "lln_diag"
BASELINE = "softmax"
ENCODER = "minilm"
PRETRAINING_UPDATES = 150
# With blocks of 8 tokens, most pairs of tokens of a review, which has 27 on average, attend by LLN.
LINEAR_OPTIONS = ["mix=joint_offset", "gain=learned", "block_size=8"]
LENGTH = 512  # tokens of the longest review
TIMED = {LENGTH: 15, 2048: 5}  # repetitions for each length of the timed texts, in tokens
CONVERT_OPTIONS = ["--attention", BASELINE, "--positions", str(max(TIMED))]
TRANSFER_STEPS = 100
SPLIT = "test"


class Quickstart:
    """Runs programs one after the other, with their output in OUT/logs, and keeps their wall times in seconds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = Path(args.out)
        self.run_override = run_override()
        self.times: dict[str, float] = {}

    def run_all(self) -> None:
        install_seconds = int(os.environ.get("LLN_INSTALL_SECONDS", "0"))
        if install_seconds:
            self.times["install"] = install_seconds
        losses = self.pretrain()
        encoder = self.out / "encoder"
        if not (encoder / ENCODERS[ENCODER].files[-1]).is_file():
            call(["data_prep.encoders", ENCODER, "--out", str(encoder)])
        softmax = self.out / BASELINE
        if not (softmax / "model.pt").is_file():
            self.step("convert", ["lln_fairseq", "convert", str(encoder), str(softmax), *CONVERT_OPTIONS])
        data = f"{self.args.data}-{ENCODER}"
        prepare_demo_data(data, self.args.archive, softmax)
        teacher = self.finetune(softmax / "model.pt", data)
        linear = self.linearize(teacher, data)

        checkpoints = {BASELINE: teacher / "checkpoint_best.pt", ATTENTION: linear / "model.pt"}
        milliseconds = {length: time_text(checkpoints, f"{data}/sentiment", length) for length in TIMED}
        rows = [["", f"accuracy on {SPLIT} [%]", *(f"{length:,} tokens [ms]" for length in TIMED)]]
        for name, directory in ((BASELINE, teacher), (ATTENTION, linear)):
            accuracy = json.loads((directory / f"{SPLIT}.json").read_text())["accuracy"]
            rows.append([name, f"{100 * accuracy:.1f}", *(f"{times[name]:.0f}" for times in milliseconds.values())])
        speedups = [f"{times[BASELINE] / times[ATTENTION]:.2f}" for times in milliseconds.values()]
        rows.append(["times as fast", "", *speedups])
        print(f"\npre-training, loss on held-out text: {losses[0]:.2f} bits at first, {losses[-1]:.2f} at last")
        print(f"\n{ENCODER}, fine-tuned with {BASELINE} and made linear:\n{text_table(rows)}")
        print(f"The times are those of one text on one thread.\n\n{self.times_table()}")
        print(f"\nTensorBoard: {self.out}, watch it with: tensorboard --logdir {shlex.quote(str(self.out))}")
        print("Your own classifier: lln-fairseq speedup MODEL faster --rows rows.tsv --text COLUMN --label COLUMN")

    def step(self, name: str, words: list[str], updates: int | None = None) -> None:
        """Run `python -m WORDS`. `updates` is the length of its progress bar."""
        start = time.monotonic()
        call_logged(name, words, self.out / "logs" / f"{name.replace(' ', '_')}.log", updates)
        self.times[name] = time.monotonic() - start

    def pretrain(self) -> list[float]:
        """Pre-train from scratch, draw OUT/pretraining.png, and return the validation losses in bits."""
        prepare_demo_data(self.args.data, self.args.archive)
        updates = self.args.updates or PRETRAINING_UPDATES
        directory = self.out / "pretrain"
        overrides = ["model=nano", f"attention={ATTENTION}", self.run_override, "corpus=demo"]
        overrides += [format_override("task.data", f"{self.args.data}/lm"), f"optimization.max_update={updates}"]
        overrides.append(f"dataset.validate_interval_updates={max(1, updates // 10)}")
        self.step("pre-train", train_words("pretrain", directory, overrides), updates)
        curves = read_curves(directory / "tensorboard")
        figure_8(Settings(runs={ATTENTION: curves})).save(self.out / "pretraining.png")
        return curves["valid/loss"].values

    def finetune(self, start: Path, data: str) -> Path:
        """Fine-tune the encoder with softmax, and return the directory with the checkpoints and SPLIT.json."""
        directory = self.out / f"finetune_{BASELINE}"
        updates = self.args.updates or OmegaConf.load("configs/glue/demo_minilm.yaml").optimization.max_update
        overrides = ["glue=demo_minilm", "model=minilm", f"attention={BASELINE}", self.run_override]
        overrides += [format_override("task.data", f"{data}/sentiment"), f"task.max_positions={LENGTH}"]
        overrides.append(f"optimization.max_update={updates}")
        overrides.append(format_override("checkpoint.finetune_from_model", start))
        self.step("fine-tune", train_words("finetune", directory, overrides), updates)
        score(directory, [SPLIT], partial(self.step, f"evaluate {BASELINE}"))
        return directory

    def linearize(self, teacher: Path, data: str) -> Path:
        """Make the classifier linear, and return the directory with the model and SPLIT.json."""
        directory = self.out / "linear"
        words = ["lln_fairseq", "linearize", str(teacher / "checkpoint_best.pt"), f"{data}/sentiment", str(directory)]
        words += ["--attention", ATTENTION, "--option", *LINEAR_OPTIONS]
        words += ["--steps", str(self.args.updates or TRANSFER_STEPS), "--evaluate-rows", "1"]
        self.step("linearize", words)
        scores = str(directory / "{split}.json")
        evaluate = ["lln_fairseq", "evaluate", str(directory / "model.pt"), f"{data}/sentiment", "--split", SPLIT]
        self.step(f"evaluate {ATTENTION}", [*evaluate, "--json", scores])
        return directory

    def times_table(self) -> str:
        rows = [("wall time of this command", "[s]")]
        for name, seconds in [*self.times.items(), ("sum", sum(self.times.values()))]:
            rows.append((name, f"{seconds:.0f}"))
        return text_table(rows)


def time_text(checkpoints: dict[str, Path], data: str, length: int) -> dict[str, float]:
    """Return the medians of the times in ms of a text of `length` tokens on one thread, by the name of the model."""
    torch.set_num_threads(1)
    tokens = random_tokens(length)[None]
    calls = {name: partial(loaded_logits, load(path, data, device="cpu"), tokens) for name, path in checkpoints.items()}
    times = interleaved(calls, "cpu", TIMED[length])
    return {name: statistics.median(passed) for name, passed in times.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archive", help="local copy of the demo's source archive")
    parser.add_argument("--data", default="data-bin/demo", help="directory of the demo data (default: %(default)s)")
    parser.add_argument("--out", default="runs/quickstart", help="checkpoints, logs, pictures (default: %(default)s)")
    parser.add_argument("--updates", type=int, help="maximum updates of each run, to try everything quickly")
    return run_main(
        Quickstart(parser.parse_args(argv)).run_all, "\ninterrupted; run the same command again to continue"
    )


if __name__ == "__main__":
    sys.exit(main())
