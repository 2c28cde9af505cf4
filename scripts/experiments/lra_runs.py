"""Trains on tasks of the Long Range Arena and scores valid and test; the same command goes on after an interruption.

    scripts/lra.sh listops attention=lln_diag run=gpu1
    scripts/lra_all.sh --attentions "softmax lln_diag" --tasks "listops text" --seeds "1 2" run=gpu1

Results: runs/lra/ATTENTION/TASK/seedN, unless an override names another checkpoint.save_dir; lra_all.sh prints the
paper's Table 5. The data: python -m data_prep.lra --help; tasks whose names end in _stand_in are not the paper's.
"""

import argparse
import itertools
import sys
from pathlib import Path

from lln_fairseq.command import UserError, run_main
from scripts import lra_table
from scripts.experiments.finetune import SAVE_DIR, numbers
from scripts.experiments.settings import check_task, last_of
from scripts.experiments.steps import train_and_score, training
from scripts.terminal import program_parser

RUNS = Path("runs/lra")
ATTENTION, DEFAULT = "attention", "lln_diag"  # that of configs/finetune.yaml
PAPER = "text listops retrieval pathfinder image"


def train(task: str, seed: int, overrides: list[str]) -> None:
    """Train on a task and score the best checkpoint. Raises: UserError."""
    check_task("lra", task)
    attention = last_of(ATTENTION, overrides) or DEFAULT
    out = Path(last_of(SAVE_DIR, overrides) or RUNS / attention / task / f"seed{seed}")
    settings = [f"lra={task}", f"common.seed={seed}", f"{ATTENTION}={attention}", *overrides]
    train_and_score(f"{task}, seed {seed}", out, training("lra", out, *settings), settings, ("valid", "test"))


def train_all(args: argparse.Namespace, overrides: list[str]) -> int:
    """The exit code. Raises: UserError."""
    if last_of(SAVE_DIR, overrides) or last_of(ATTENTION, overrides):
        raise UserError("attention and checkpoint.save_dir are not for lra_all.sh: give --attentions, each has its own")
    for task in args.tasks.split():
        check_task("lra", task)
    for seed, task, attention in itertools.product(args.seeds, args.tasks.split(), args.attentions.split()):
        train(task, seed, [f"{ATTENTION}={attention}", *overrides])
    return lra_table.main([str(RUNS)])


def main(argv: list[str] | None = None) -> int:
    name, *rest = argv or sys.argv[1:]
    parser = program_parser(f"scripts/{name}.sh", __doc__)
    if name == "lra":
        parser.add_argument("task")
        parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
        args, overrides = parser.parse_known_args(rest)
        return run_main(lambda: train(args.task, args.seed, overrides), "")
    parser.add_argument("--attentions", default="softmax lln lln_diag performer reformer skyformer nystrom",
                        help='default: "%(default)s"')  # fmt: skip
    parser.add_argument("--tasks", default=PAPER, help='default: "%(default)s"')
    parser.add_argument("--seeds", type=numbers, default="1", help='default: "%(default)s"')
    args, overrides = parser.parse_known_args(rest)
    return run_main(lambda: train_all(args, overrides), "")


if __name__ == "__main__":
    sys.exit(main())
