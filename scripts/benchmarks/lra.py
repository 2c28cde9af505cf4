"""Measure time and memory of a training iteration on the tasks of the Long Range Arena, by attention (Table 4).

    python -m scripts.benchmarks.lra --json table4.json
    python -m scripts.lra_table runs/lra --benchmark table4.json

The model is the one in configs/model/lra.yaml. The lengths and batch sizes come from configs/lra, and all batch sizes
are divided by --divide. The symbols are random, without padding. The paper reports the seconds of a whole training run
on a GPU that it does not name, so only the ratios to softmax can be compared.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.command import run_main
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.model import add_training_options, measure_length, set_device_defaults, settings
from scripts.benchmarks.model_report import Row
from scripts.benchmarks.model_training import Training, fairseq_model
from scripts.lra_table import benchmark_text
from scripts.terminal import at_least_one, program_parser

HEAD = "head"
TASKS = {  # length, batch size, classes, number of sequences in a sample
    "text": (4096, 32, 2, 1),
    "listops": (2048, 32, 10, 1),
    "retrieval": (4096, 16, 2, 2),
    "pathfinder": (1024, 128, 2, 1),
    "image": (1024, 256, 10, 1),
}
ATTENTIONS = [  # with the options of Skyformer's code base, which the paper used
    "softmax",
    "lln",
    "lln_diag",
    "performer:num_features=128",
    "reformer:hashes=2",
    "skyformer:landmarks=128",
    "nystrom:landmarks=128",
]
VOCABULARY = 264  # bytes or pixels, and special symbols


class LraTraining(Training):
    """Training iterations of the model in configs/model/lra.yaml on one random batch of the task args.task."""

    def build_model(self) -> Any:
        """Return the classification model, with two towers if a sample has two sequences."""
        _, _, classes, sequences = TASKS[self.args.task]
        model = fairseq_model(
            self.args,
            self.length,
            encoder_normalize_before=True,
            activation_dropout=self.args.dropout,
            pooling="mean",
            pooler_dim=128,
            pooler_activation_fn="relu",
            linear_init="torch",
            two_towers=sequences == 2,
        )
        model.register_classification_head(HEAD, num_classes=classes)
        return model

    def make_batch(self) -> None:
        """Draw the random symbols and labels of one batch."""
        _, _, classes, sequences = TASKS[self.args.task]
        names = ("src_tokens", "other_tokens")[:sequences]
        self.inputs = {name: self.random_words().to(self.args.device) for name in names}
        self.labels = torch.randint(classes, (self.args.batch,), device=self.args.device)

    def loss(self) -> Tensor:
        """Return the classification loss of the batch."""
        logits, _ = self.model(**self.inputs, features_only=True, classification_head_name=HEAD)
        return F.cross_entropy(logits.float(), self.labels)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments, fill in the defaults that depend on the device, and set torch's number of threads.

    The returned namespace also has `training`, `preset` and `vocabulary`, which no option sets.
    """
    parser = program_parser("python -m scripts.benchmarks.lra", __doc__)
    add_training_options(parser, ATTENTIONS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    divisor = 1 if torch.cuda.is_available() else 16
    parser.add_argument("--divide", type=at_least_one, default=divisor, help="divide batch sizes by this (%(default)s)")
    parser.set_defaults(training=LraTraining, preset="lra", vocabulary=VOCABULARY)
    return set_device_defaults(parser.parse_args(argv))


def measure_task(args: argparse.Namespace, task: str) -> list[Row]:
    """Measure all attentions on one task and return a row for each."""
    length, batch, _, _ = TASKS[task]
    task_args = argparse.Namespace(**vars(args) | {"task": task, "batch": max(batch // args.divide, 1)})
    rows = [Row(name, length) for name in args.attentions]
    measure_length(rows, length, task_args)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parse_arguments(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measure all tasks and print the table. The JSON file, if requested, is written after each task."""
    disable_malloc_trim()
    shown_args = argparse.Namespace(**vars(args) | {"batch": f"/ {args.divide}"})
    content: dict[str, Any] = {"settings": settings(shown_args), "rows": []}
    for task in args.tasks:
        content["rows"] += [{"task": task, **dataclasses.asdict(row)} for row in measure_task(args, task)]
        print(f"{task} done", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(benchmark_text(content))


if __name__ == "__main__":
    sys.exit(main())
