"""Fine-tunes a pre-trained checkpoint on a GLUE task and scores it; the same command goes on after an interruption.

    scripts/finetune_sst2.sh runs/pretrain_lln_diag/checkpoint_best.pt attention=lln_diag model=base run=gpu1

finetune_mnli.sh, finetune_qnli.sh and finetune_qqp.sh are the same for their tasks. Results: glue/TASK/seedN beside the
checkpoint, unless an override names another checkpoint.save_dir. The data: python -m data_prep.glue --help
"""

import argparse
import os
import sys
from pathlib import Path

from lln_fairseq.command import UserError, run_main
from lln_fairseq.training.recipes import CONFIGS
from scripts.experiments.settings import done_before, keep_settings, last_of, setting
from scripts.experiments.steps import call, evaluation, training

SAVE_DIR, START = "checkpoint.save_dir", "checkpoint.finetune_from_model"
FINISHED = "valid.json"  # the last file written


def finetune(task: str, checkpoint: Path, seed: int, overrides: list[str]) -> None:
    """Trains, then scores the best checkpoint on every labelled split, unless that has been done before.

    Raises: UserError for a task without recipe, where that was done with other settings, and for a training or an
    evaluation that fails.
    """
    known = sorted(path.stem for path in (CONFIGS / "glue").glob("*.yaml"))
    if task not in known:
        raise UserError(f"no such task: {task} (known: {' '.join(known)})")
    out = Path(last_of(SAVE_DIR, overrides) or checkpoint.parent / "glue" / task / f"seed{seed}")
    start_from = setting(START, os.path.relpath(checkpoint, out))  # wherever both are moved
    settings = [f"glue={task}", f"common.seed={seed}", *overrides]
    if done_before(out / FINISHED, [start_from, *settings]):
        print(f"{task}, seed {seed}: done before, see {out}", flush=True)
        return
    call(training("finetune", out, setting(START, checkpoint), *settings))
    keep_settings(out, [start_from, *settings])
    splits = ("valid1", "valid") if task == "mnli" else ("valid",)
    call(evaluation(out, splits))


def existing_checkpoint(given: str | None) -> Path:
    """Raises: UserError where there is none."""
    if given is None:
        raise UserError("which checkpoint? for example runs/pretrain_lln_diag/checkpoint_best.pt (see --help)")
    if not Path(given).is_file():
        raise UserError(f"no such checkpoint: {given}")
    return Path(given)


def main(argv: list[str] | None = None) -> int:
    task, *rest = argv or sys.argv[1:] or ["TASK"]
    parser = argparse.ArgumentParser(prog=f"scripts/finetune_{task}.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    args, overrides = parser.parse_known_args(rest)
    return run_main(lambda: finetune(task, existing_checkpoint(args.checkpoint), args.seed, overrides), "")


if __name__ == "__main__":
    sys.exit(main())
