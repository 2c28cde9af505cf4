"""Fine-tune a pre-trained checkpoint on GLUE tasks and score it. Run an interrupted command again to continue it.

    scripts/finetune_sst2.sh runs/pretrain_lln_diag/checkpoint_best.pt run=gpu1
    scripts/glue_all.sh runs/pretrain_lln_diag/checkpoint_best.pt --seeds "1 2 3 4 5" run=gpu1

finetune_mnli.sh, finetune_qnli.sh and finetune_qqp.sh do the same for their tasks. glue_all.sh takes several tasks and
seeds, skips finished runs, and prints the paper's Table 1. Results are written to glue/TASK/seedN next to the
checkpoint. For a single task, checkpoint.save_dir selects another directory. To prepare the data, see
python -m data_prep.glue --help
"""

import argparse
import itertools
import os
import sys
from pathlib import Path

from lln_fairseq.command import UserError, run_main
from scripts import glue_table
from scripts.experiments.settings import START_MODEL, check_task, format_override, input_hashes, last_value
from scripts.experiments.steps import train_and_score, training_command
from scripts.terminal import program_parser

SAVE_DIR = "checkpoint.save_dir"


def finetune(task: str, checkpoint: Path, seed: int, overrides: list[str]) -> None:
    """Fine-tune on a task and score the best checkpoint, unless this has been done with the same settings and files.

    The checkpoint is scored on `valid`, and for MNLI also on `valid1`. Results are written to glue/TASK/seedN next to
    the checkpoint.

    Args:
        task: name of a recipe in configs/glue.
        checkpoint: model to start from.
        seed: seed of the run.
        overrides: further Hydra overrides. checkpoint.save_dir selects another directory.

    Raises:
        UserError: if the task is unknown, the directory contains results of other settings or files, or training or
            evaluation fails.
    """
    check_task("glue", task)
    out = Path(last_value(SAVE_DIR, overrides) or checkpoint.parent / "glue" / task / f"seed{seed}")
    settings = [f"glue={task}", f"common.seed={seed}", *overrides]
    start = format_override(START_MODEL, checkpoint)
    command = training_command("finetune", out, start, *settings)
    hashes = input_hashes("finetune", f"glue={task}", [start, *settings])
    # The stored path is relative, so that checkpoint and results can be moved together.
    stored_start = format_override(START_MODEL, os.path.relpath(checkpoint, out))
    splits = ("valid1", "valid") if task == "mnli" else ("valid",)
    train_and_score(f"{task}, seed {seed}", out, command, [stored_start, *settings], hashes, splits)


def finetune_all(args: argparse.Namespace, overrides: list[str]) -> int:
    """Fine-tune on every task with every seed, print the results with the paper's Table 1, and return the exit code.

    Args:
        args: the command line: checkpoint, tasks and seeds.
        overrides: further Hydra overrides of all runs.

    Raises:
        UserError: if the overrides include checkpoint.save_dir, there is no checkpoint, a task is unknown, a directory
            contains results of other settings, or training or evaluation fails.
    """
    if last_value(SAVE_DIR, overrides):
        raise UserError("glue_all.sh does not accept checkpoint.save_dir: every task and seed has its own directory")
    checkpoint = require_checkpoint(args.checkpoint)
    for task, seed in itertools.product(args.tasks.split(), args.seeds):
        finetune(task, checkpoint, seed, overrides)
    return glue_table.main([str(checkpoint.parent.parent)])


def parse_seeds(text: str) -> list[int]:
    """Return the seeds in an argument such as "1 2 3"."""
    return [int(word) for word in text.split()]


def require_checkpoint(path: str | None) -> Path:
    """Return the path of a checkpoint. Raise UserError if `path` is None or not an existing file."""
    if path is None:
        raise UserError("which checkpoint? for example runs/pretrain_lln_diag/checkpoint_best.pt (see --help)")
    if not Path(path).is_file():
        raise UserError(f"no such checkpoint: {path}")
    return Path(path)


def main(argv: list[str] | None = None) -> int:
    """Run the script whose name is the first argument, glue_all or finetune_TASK, and return the exit code."""
    script, *arguments = argv or sys.argv[1:] or ["finetune_TASK"]
    parser = program_parser(f"scripts/{script}.sh", __doc__)
    parser.add_argument("checkpoint", nargs="?", help="pre-trained checkpoint to start from")
    if script == "glue_all":
        parser.add_argument("--seeds", type=parse_seeds, default="1 2 3 4 5", help='default: "%(default)s"')
        parser.add_argument("--tasks", default="mnli qnli qqp sst2", help='default: "%(default)s"')
        args, overrides = parser.parse_known_args(arguments)
        return run_main(lambda: finetune_all(args, overrides), "")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    args, overrides = parser.parse_known_args(arguments)
    task = script.removeprefix("finetune_")
    return run_main(lambda: finetune(task, require_checkpoint(args.checkpoint), args.seed, overrides), "")


if __name__ == "__main__":
    sys.exit(main())
