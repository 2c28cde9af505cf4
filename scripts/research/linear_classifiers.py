"""Measure how much accuracy fine-tuned softmax classifiers keep when `lln-fairseq linearize` makes them linear.

    python -m scripts.research.linear_classifiers data-bin/qnli runs/linear_qnli \\
        --teachers runs/qnli_seed1/checkpoint_best.pt runs/qnli_seed2/checkpoint_best.pt

The first argument is the data on which the teachers were fine-tuned. Its splits `train` and `test` must have labels, as
in the output of data_prep.glue_held_out. The second argument is the output directory OUT. Every teacher is linearized
with every variant of linear attention, which is trained on the rows of `train`. The table shows the accuracy on `test`:
the mean over the teachers, the range, and the difference between this mean and the teachers' own mean. Nothing is
chosen on `test`. Run an interrupted command again to continue it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lln_fairseq.command import run_main
from lln_fairseq.terminal import program_parser, text_table
from scripts.research.training import call_logged, is_newer

JOINT = "--option mix=joint_offset gain=learned block_size="
VARIANTS = {  # name: arguments of linearize
    "blocks of 16": f"{JOINT}16",
    "blocks of 32": f"{JOINT}32",
    "blocks of 64": f"{JOINT}64",
    "blocks of 128": f"{JOINT}128",
    "blocks of 256": f"{JOINT}256",
    "average, blocks of 32": "--option mix=average gain=learned block_size=32",
    "average, blocks of 64": "--option mix=average gain=learned block_size=64",
    "LLN only": "--attention lln --option gain=learned",
    "Hedgehog, blocks of 32": "--attention hedgehog --option block_size=32",
    "blocks of 32 only": "--attention block_diag --option block_size=32",
    "blocks of 32, first segment global": f"{JOINT}32 global_tokens=first_segment",
    "blocks of 64, first segment global": f"{JOINT}64 global_tokens=first_segment",
    "blocks of 128, first segment global": f"{JOINT}128 global_tokens=first_segment",
    "blocks of 256, first segment global": f"{JOINT}256 global_tokens=first_segment",
    "blocks of 32, first segment global, 1 softmax layer": (
        f"{JOINT}32 global_tokens=first_segment --softmax-layers best:1"
    ),
    "blocks of 32, first segment global, 2 softmax layers": (
        f"{JOINT}32 global_tokens=first_segment --softmax-layers best:2"
    ),
    "blocks of 32, 1 softmax layer": f"{JOINT}32 --softmax-layers best:1",
    "blocks of 32, 2 softmax layers": f"{JOINT}32 --softmax-layers best:2",
    "blocks of 64, 1 softmax layer": f"{JOINT}64 --softmax-layers best:1",
    "blocks of 64, 2 softmax layers": f"{JOINT}64 --softmax-layers best:2",
    "not trained, blocks of 64": f"{JOINT}64 --steps 0",
}


def evaluate(name: str, checkpoint: Path, args: argparse.Namespace) -> float:
    """Return the accuracy of a classifier on `test` in percent. It is kept in OUT/scores/NAME.json."""
    result = args.out / "scores" / f"{file_name(name)}.json"
    if not is_newer(result, checkpoint):
        result.parent.mkdir(parents=True, exist_ok=True)
        words = ["lln_fairseq", "evaluate", str(checkpoint), str(args.data), "--split=test", "--json", str(result)]
        call_logged(f"evaluate {name}", words, args.out / "logs" / f"evaluate_{file_name(name)}.log")
    return 100 * json.loads(result.read_text())["accuracy"]


def file_name(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def format_row(name: str, accuracies: Sequence[float], teacher_accuracies: Sequence[float]) -> list[str]:
    """Return the cells of a row: the name, "mean (lowest–highest)", and the difference between the means."""
    mean = sum(accuracies) / len(accuracies)
    difference = mean - sum(teacher_accuracies) / len(teacher_accuracies)
    return [name, f"{mean:.1f} ({min(accuracies):.1f}–{max(accuracies):.1f})", f"{difference:+.1f}"]


def run_experiment(args: argparse.Namespace) -> None:
    """Evaluate the teachers, linearize and evaluate every variant, and print the table."""
    teacher_accuracies = []
    for number, teacher in enumerate(args.teachers, start=1):
        teacher_accuracies.append(evaluate(f"teacher {number}", teacher, args))
    rows = [["", "test accuracy [%]", "difference"]]
    rows.append(format_row("softmax (the teachers)", teacher_accuracies, teacher_accuracies))
    for variant in args.variants:
        accuracies = []
        for number, teacher in enumerate(args.teachers, start=1):
            name = f"{variant}, teacher {number}"
            out = args.out / file_name(name)
            words = ["lln_fairseq", "linearize", str(teacher), str(args.data), str(out), "--evaluate-rows", "1"]
            words += [*VARIANTS[variant].split(), "--seed", str(number), *args.linearize]
            # It does nothing if OUT is complete.
            call_logged(f"linearize {name}", words, args.out / "logs" / f"linearize_{file_name(name)}.log")
            accuracies.append(evaluate(name, out / "model.pt", args))
        rows.append(format_row(variant, accuracies, teacher_accuracies))
        print(text_table([rows[0], rows[1], rows[-1]]), flush=True)
    print(f"\n{text_table(rows)}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = program_parser("python -m scripts.research.linear_classifiers", __doc__)
    parser.add_argument("data", type=Path, help="the data directory of the teachers' task")
    parser.add_argument("out", type=Path, help="directory of the linear models and results")
    parser.add_argument("--teachers", type=Path, nargs="+", required=True, help="fine-tuned softmax checkpoints")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        metavar="VARIANT",
        help=f"default: all of {'; '.join(VARIANTS)}",
    )
    parser.add_argument(
        "--linearize", nargs=argparse.REMAINDER, default=[], help="last: further arguments of lln-fairseq linearize"
    )
    args = parser.parse_args(argv)
    return run_main(lambda: run_experiment(args), "")


if __name__ == "__main__":
    sys.exit(main())
