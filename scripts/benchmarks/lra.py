"""The paper's Table 4: time of a training iteration and peak memory on the Long Range Arena's tasks, by attention.

    python -m scripts.benchmarks.lra --json table4.json
    python -m scripts.lra_table runs/lra --benchmark table4.json

The model is that of configs/model/lra.yaml, the lengths and batches those of configs/lra, the batches divided by
--divide for every attention alike; random symbols, no padding. The paper states the seconds of a whole training on some
GPU: what can be compared is the ratio to softmax.
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
from scripts.benchmarks.model import add_training_options, complete, measure, settings
from scripts.benchmarks.model_report import Row
from scripts.benchmarks.model_training import Training, fairseq_model
from scripts.lra_table import benchmark_text
from scripts.terminal import at_least_one, program_parser

HEAD = "head"
TASKS = {  # length, batch, classes, towers
    "text": (4096, 32, 2, 1),
    "listops": (2048, 32, 10, 1),
    "retrieval": (4096, 16, 2, 2),
    "pathfinder": (1024, 128, 2, 1),
    "image": (1024, 256, 10, 1),
}
ATTENTIONS = [  # with the options that the code base gives them
    "softmax", "lln", "lln_diag", "performer:num_features=128", "reformer:hashes=2", "skyformer:landmarks=128",
    "nystrom:landmarks=128",
]  # fmt: skip
VOCABULARY = 264  # bytes or pixels


class LraTraining(Training):
    """The model of configs/model/lra.yaml whose attention is exchanged, and a batch of one of the tasks."""

    def build_model(self) -> Any:
        _, _, classes, towers = TASKS[self.args.task]
        model = fairseq_model(
            self.args, self.length, encoder_normalize_before=True, activation_dropout=self.args.dropout,
            pooling="mean", pooler_dim=128, pooler_activation_fn="relu", linear_init="torch", two_towers=towers == 2,
        )  # fmt: skip
        model.register_classification_head(HEAD, num_classes=classes)
        return model

    def make_batch(self) -> None:
        _, _, classes, towers = TASKS[self.args.task]
        names = ("src_tokens", "other_tokens")[:towers]
        self.inputs = {name: self.random_words().to(self.args.device) for name in names}
        self.labels = torch.randint(classes, (self.args.batch,), device=self.args.device)

    def loss(self) -> Tensor:
        logits, _ = self.model(**self.inputs, features_only=True, classification_head_name=HEAD)
        return F.cross_entropy(logits.float(), self.labels)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.benchmarks.lra", __doc__)
    add_training_options(parser, ATTENTIONS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    divisor = 1 if torch.cuda.is_available() else 16
    parser.add_argument("--divide", type=at_least_one, default=divisor, help="the batches by this (%(default)s)")
    parser.set_defaults(training=LraTraining, preset="lra", vocabulary=VOCABULARY)
    return complete(parser.parse_args(argv))


def rows_of(args: argparse.Namespace, task: str) -> list[Row]:
    """The measured rows of one task."""
    length, batch, _, _ = TASKS[task]
    args = argparse.Namespace(**vars(args) | {"task": task, "batch": max(batch // args.divide, 1)})
    rows = [Row(name, length) for name in args.attentions]
    measure(rows, length, args)
    return rows


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measures, writes the file after each task, and prints the table."""
    disable_malloc_trim()
    content: dict[str, Any] = {"settings": settings(argparse.Namespace(**vars(args) | {"batch": f"/ {args.divide}"}))}
    content["rows"] = []
    for task in args.tasks:
        content["rows"] += [{"task": task, **dataclasses.asdict(row)} for row in rows_of(args, task)]
        print(f"{task} done", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(benchmark_text(content))


if __name__ == "__main__":
    sys.exit(main())
