"""Train on tasks of the Long Range Arena, and score the splits valid and test. An interrupted command can be run again.

    scripts/lra.sh listops attention=lln_diag run=gpu1
    scripts/lra_all.sh --attentions "softmax lln_diag" --tasks "listops text" --seeds "1 2" run=gpu1

Results are written to runs/lra/ATTENTION/TASK/seedN. For a single task, checkpoint.save_dir selects another directory.
lra_all.sh prints the paper's Table 5. To prepare the data, see python -m data_prep.lra --help
"""

import argparse
import itertools
import sys
from pathlib import Path

from lln_fairseq.command import UserError, run_main
from scripts import lra_table
from scripts.experiments.finetune import SAVE_DIR, parse_seeds
from scripts.experiments.settings import check_task, input_hashes, last_value
from scripts.experiments.steps import train_and_score, training_command
from scripts.terminal import program_parser

RUNS = Path("runs/lra")
DEFAULT_ATTENTION = "lln_diag"  # the default of configs/finetune.yaml
PAPER_TASKS = "text listops retrieval pathfinder image"


def train_task(task: str, seed: int, overrides: list[str]) -> None:
    """Train on a task and score the best checkpoint, unless this has been done with the same settings and files.

    The checkpoint is scored on `valid` and `test`. Results are written to runs/lra/ATTENTION/TASK/seedN.

    Args:
        task: name of a recipe in configs/lra.
        seed: seed of the run.
        overrides: further Hydra overrides. checkpoint.save_dir selects another directory.

    Raises:
        UserError: if the task is unknown, the directory contains results of other settings or files, or training or
            evaluation fails.
    """
    check_task("lra", task)
    attention = last_value("attention", overrides) or DEFAULT_ATTENTION
    out = Path(last_value(SAVE_DIR, overrides) or RUNS / attention / task / f"seed{seed}")
    settings = [f"lra={task}", f"common.seed={seed}", f"attention={attention}", *overrides]
    command = training_command("lra", out, *settings)
    hashes = input_hashes("lra", f"lra={task}", settings)
    train_and_score(f"{task}, seed {seed}", out, command, settings, hashes, ("valid", "test"))


def train_all_tasks(args: argparse.Namespace, overrides: list[str]) -> int:
    """Train every attention on every task with every seed, print the results with Table 5, and return the exit code.

    Args:
        args: the command line: attentions, tasks and seeds.
        overrides: further Hydra overrides of all runs.

    Raises:
        UserError: if the overrides include attention or checkpoint.save_dir, a task is unknown, a directory contains
            results of other settings, or training or evaluation fails.
    """
    if last_value(SAVE_DIR, overrides) or last_value("attention", overrides):
        raise UserError("lra_all.sh accepts neither attention= nor checkpoint.save_dir=: use --attentions")
    tasks = args.tasks.split()
    for task in tasks:
        check_task("lra", task)
    for seed, task, attention in itertools.product(args.seeds, tasks, args.attentions.split()):
        train_task(task, seed, [f"attention={attention}", *overrides])
    return lra_table.main([str(RUNS)])


def main(argv: list[str] | None = None) -> int:
    """Run the script whose name is the first argument, lra or lra_all, and return the exit code."""
    script, *arguments = argv or sys.argv[1:]
    parser = program_parser(f"scripts/{script}.sh", __doc__)
    if script == "lra":
        parser.add_argument("task", help="name of a recipe in configs/lra")
        parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
        args, overrides = parser.parse_known_args(arguments)
        return run_main(lambda: train_task(args.task, args.seed, overrides), "")
    attentions = "softmax lln lln_diag performer reformer skyformer nystrom"
    parser.add_argument("--attentions", default=attentions, help='default: "%(default)s"')
    parser.add_argument("--tasks", default=PAPER_TASKS, help='default: "%(default)s"')
    parser.add_argument("--seeds", type=parse_seeds, default="1", help='default: "%(default)s"')
    args, overrides = parser.parse_known_args(arguments)
    return run_main(lambda: train_all_tasks(args, overrides), "")


if __name__ == "__main__":
    sys.exit(main())
