"""Fine-tunes a pre-trained checkpoint on GLUE tasks and scores it; the same command goes on after an interruption.

    scripts/finetune_sst2.sh runs/pretrain_lln_diag/checkpoint_best.pt attention=lln_diag model=base run=gpu1
    scripts/glue_all.sh runs/pretrain_lln_diag/checkpoint_best.pt --seeds "1 2 3 4 5" attention=lln_diag run=gpu1

finetune_mnli.sh, finetune_qnli.sh and finetune_qqp.sh are the same for their tasks; glue_all.sh takes several tasks and
seeds, skips what is finished, and prints the paper's Table 1. Results: glue/TASK/seedN beside the checkpoint, unless an
override of a single task names another checkpoint.save_dir. The data: python -m data_prep.glue --help
"""

import argparse
import itertools
import os
import sys
from pathlib import Path

from lln_fairseq.command import UserError, run_main
from scripts import glue_table
from scripts.experiments.settings import check_task, last_of, setting
from scripts.experiments.steps import train_and_score, training
from scripts.terminal import program_parser

SAVE_DIR, START = "checkpoint.save_dir", "checkpoint.finetune_from_model"


def finetune(task: str, checkpoint: Path, seed: int, overrides: list[str]) -> None:
    """Fine-tune on a task and score the best checkpoint on every labelled split. Raises: UserError."""
    check_task("glue", task)
    out = Path(last_of(SAVE_DIR, overrides) or checkpoint.parent / "glue" / task / f"seed{seed}")
    start_from = setting(START, os.path.relpath(checkpoint, out))  # wherever both are moved
    settings = [f"glue={task}", f"common.seed={seed}", *overrides]
    command = training("finetune", out, setting(START, checkpoint), *settings)
    splits = ("valid1", "valid") if task == "mnli" else ("valid",)
    train_and_score(f"{task}, seed {seed}", out, command, [start_from, *settings], splits)


def finetune_all(args: argparse.Namespace, overrides: list[str]) -> int:
    """Fine-tune on every task with every seed and show the table. Return the exit code. Raises: UserError."""
    if last_of(SAVE_DIR, overrides):
        raise UserError("checkpoint.save_dir is not for glue_all.sh: every task and seed has its own directory")
    checkpoint = existing_checkpoint(args.checkpoint)
    for task, seed in itertools.product(args.tasks.split(), args.seeds):
        finetune(task, checkpoint, seed, overrides)
    return glue_table.main([str(checkpoint.parent.parent)])


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def existing_checkpoint(given: str | None) -> Path:
    """Raises: UserError where there is none."""
    if given is None:
        raise UserError("which checkpoint? for example runs/pretrain_lln_diag/checkpoint_best.pt (see --help)")
    if not Path(given).is_file():
        raise UserError(f"no such checkpoint: {given}")
    return Path(given)


def main(argv: list[str] | None = None) -> int:
    name, *rest = argv or sys.argv[1:] or ["finetune_TASK"]
    parser = program_parser(f"scripts/{name}.sh", __doc__)
    parser.add_argument("checkpoint", nargs="?")
    if name == "glue_all":
        parser.add_argument("--seeds", type=numbers, default="1 2 3 4 5", help='default: "%(default)s"')
        parser.add_argument("--tasks", default="mnli qnli qqp sst2", help='default: "%(default)s"')
        args, overrides = parser.parse_known_args(rest)
        return run_main(lambda: finetune_all(args, overrides), "")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    args, overrides = parser.parse_known_args(rest)
    task = name.removeprefix("finetune_")
    return run_main(lambda: finetune(task, existing_checkpoint(args.checkpoint), args.seed, overrides), "")


if __name__ == "__main__":
    sys.exit(main())
