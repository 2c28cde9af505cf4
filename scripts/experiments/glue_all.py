"""Fine-tunes a pre-trained checkpoint on several GLUE tasks with several seeds, then prints the paper's Table 1.

    scripts/glue_all.sh runs/pretrain_lln_diag/checkpoint_best.pt --seeds "1 2 3 4 5" attention=lln_diag run=gpu1

What is finished is not done again; what was interrupted goes on. Results: glue/TASK/seedN beside the checkpoint.
"""

import argparse
import itertools
import sys

from lln_fairseq.command import UserError, run_main
from scripts import glue_table
from scripts.experiments.finetune import SAVE_DIR, existing_checkpoint, finetune
from scripts.experiments.settings import last_of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/glue_all.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--seeds", type=numbers, default="1 2 3 4 5", help='default: "%(default)s"')
    parser.add_argument("--tasks", default="mnli qnli qqp sst2", help='default: "%(default)s"')
    args, overrides = parser.parse_known_args(argv)
    return run_main(lambda: finetune_all(args, overrides), "")


def finetune_all(args: argparse.Namespace, overrides: list[str]) -> int:
    """The exit code. Raises: UserError."""
    if last_of(SAVE_DIR, overrides):
        raise UserError("checkpoint.save_dir is not for glue_all.sh: every task and seed has its own directory")
    checkpoint = existing_checkpoint(args.checkpoint)
    for task, seed in itertools.product(args.tasks.split(), args.seeds):
        finetune(task, checkpoint, seed, overrides)
    return glue_table.main([str(checkpoint.parent.parent)])


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


if __name__ == "__main__":
    sys.exit(main())
