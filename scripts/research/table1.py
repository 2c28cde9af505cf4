"""The paper's Table 1 at a scale that one CPU thread can afford, as units that run beside other work.

    python -m scripts.research.table1 conversion qnli elu --seed 1 --work runs/table1
    python -m scripts.research.table1 pretraining lln_diag --seed 1 --work runs/table1
    python -m scripts.research.table1 fine_tuning qnli16 block_diag_global --seed 1 --work runs/table1
    python -m scripts.research.table1 floor qnli --work runs/table1
    python -m scripts.research.table1 list
    python -m scripts.research.table1 all --work runs/table1
    python -m scripts.research.table1 report

A unit runs the programs that a user runs, on one thread and on the GPU if there is one, and writes one file of results.
Give an interrupted command again to continue it: the results are then the same. `all` runs all missing units that no
other process is running, so that two side by side share the work. --work gets the data, checkpoints and logs, about
5 GB.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import lln_fairseq
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.terminal import at_least_one, program_parser
from scripts.research.conversion import run_conversion
from scripts.research.fine_tuning import run_fine_tuning
from scripts.research.floor import run_floor
from scripts.research.pretraining import UPDATES, run_pretraining
from scripts.research.programs import locked
from scripts.research.units import (
    CONVERSION,
    FINE_TUNING,
    FLOOR,
    PRETRAINING,
    RESULTS,
    TASKS,
    TF_IDF,
    Unit,
    all_units,
    check_unit,
)


def run_unit(unit: Unit, args: argparse.Namespace) -> bool:
    """Run a unit if its result is missing. Return False if another process is running it."""
    with locked(args.work / unit.kind / f"{unit.name}.lock", wait=False) as is_ours:
        if not is_ours:
            return False
        if unit.result(args.results).exists():
            print(f"{unit.result(args.results)} exists", flush=True)
            return True
        print(f"{unit.kind} {unit.name}: {unit.spec}", flush=True)
        if unit.kind == CONVERSION:
            run_conversion(unit, args.work, args.results, args.glue)
        elif unit.kind == FINE_TUNING:
            run_fine_tuning(unit, args.work, args.results, args.glue)
        elif unit.kind == FLOOR:
            run_floor(unit, args.results, args.glue)
        else:
            run_pretraining(unit, args.work, args.results, args.text, args.updates)
    return True


def run_missing(args: argparse.Namespace) -> int:
    """Run the missing units in order, also after one has failed. Return the exit code: 1 if one failed, otherwise 0."""
    code = 0
    for unit in all_units():
        try:
            run_unit(unit, args)
        except UserError as error:
            code = 1
            print(f"error: {unit.name}: {error}", file=sys.stderr, flush=True)
    return code


def list_units(results: Path) -> None:
    """Print every unit, in the order in which they run, and whether its result exists."""
    units = all_units()
    for unit in units:
        state = "done" if unit.result(results).exists() else "missing"
        words = [unit.kind]
        if unit.task:
            words.append(unit.task)
        if unit.kind != FLOOR:
            words += [unit.attention, "--seed", str(unit.seed)]
        print(f"{state:8s} {' '.join(words)}")
    done = sum(unit.result(results).exists() for unit in units)
    print(f"{done} of {len(units)} units are done")


def run_command(args: argparse.Namespace) -> int:
    if args.command == "list":
        list_units(args.results)
        return 0
    if args.command == "report":
        from scripts.research.report import write_report

        write_report(args.results)
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    lln_fairseq.register()
    args.work = args.work.resolve()
    if args.glue:
        args.glue = str(Path(args.glue).resolve())
    if args.text:
        args.text = str(Path(args.text).resolve())
    if args.command == "all":
        return run_missing(args)
    unit = Unit(args.command, args.task, args.attention, args.seed)
    check_unit(unit)
    if not run_unit(unit, args):
        raise UserError(f"another process is running {unit.name} in {args.work}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = program_parser("python -m scripts.research.table1", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    conversion = commands.add_parser(CONVERSION, help="fine-tune an encoder with softmax and make it linear")
    fine_tuning = commands.add_parser(FINE_TUNING, help="train an attention with the labels of a long task")
    floor = commands.add_parser(FLOOR, help="TF-IDF and logistic regression on the rows of a conversion task")
    floor.set_defaults(attention=TF_IDF, seed=1)
    for command in (conversion, fine_tuning, floor):
        command.add_argument("task", help=", ".join(TASKS))
    pretraining = commands.add_parser(PRETRAINING, help="train a small encoder from scratch")
    pretraining.set_defaults(task="")
    missing = commands.add_parser("all", help="run all missing units")
    for command in (conversion, fine_tuning, pretraining):
        command.add_argument("attention", help="a name that `list` prints")
        command.add_argument("--seed", type=at_least_one, default=1)
    for command in (conversion, fine_tuning, pretraining, floor, missing):
        command.add_argument("--work", type=Path, required=True, help="directory of data, checkpoints and logs")
        command.add_argument("--glue", help="directory or archive with the GLUE tasks (default: download)")
        command.add_argument("--text", help="directory or archive in WikiText's form (default: download)")
        command.add_argument(
            "--updates", type=at_least_one, default=UPDATES, help="of pre-training's schedule (%(default)s)"
        )
    commands.add_parser("list", help="print the units")
    commands.add_parser("report", help="write the tables and the picture of the results")
    for command in commands.choices.values():
        command.add_argument("--results", type=Path, default=RESULTS, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    return run_main(lambda: run_command(args))


if __name__ == "__main__":
    sys.exit(main())
