"""Regenerates the tables of moment matching in lln_fairseq/ops, or compares them with a fresh simulation.

    python -m scripts.calibrate_moment_matching            # simulate, compare, write the tables
    python -m scripts.calibrate_moment_matching --check    # simulate and compare only; exit code 1 if a table is off

Of each table and head dimension it prints the largest difference of log s or log σ̃² from the shipped one.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from lln_fairseq.command import run_main
from lln_fairseq.ops.moment_matching import TABLES_FILES, simulate_table
from scripts.terminal import program_parser

HEAD_DIMS = (16, 32, 64, 128)
DIGITS = 5  # of log s and log σ̃² in the file

# Tokens and heads of a simulation, and the difference from the shipped tables that it may have. The shipped ones are of
# the full size: what differs then is rounding, by version of torch and number of threads. The fast ones have sampling
# error, and entropies depend more on the number of tokens.
FULL = {"tokens": 1024, "heads": 48}, 1e-4
FAST = {"calibrated": ({"tokens": 256, "heads": 8}, 0.05), "entropy": ({"tokens": 512, "heads": 8}, 0.05)}

Table = list[list[float]]


def deviation(table: Table, shipped: Table) -> float:
    """The largest difference of log s or log σ̃²; infinite for tables of different lengths."""
    if [len(x) for x in table] != [len(x) for x in shipped]:
        return math.inf
    return (torch.tensor(table, dtype=torch.float64) - torch.tensor(shipped, dtype=torch.float64)).abs().max().item()


def write(tables: dict[int, Table], path: Path) -> None:
    """One line for each head dimension."""
    lines = (f' "{dim}": {json.dumps(table)}' for dim, table in tables.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.calibrate_moment_matching", __doc__)
    parser.add_argument("--check", action="store_true", help="compare with the shipped tables, write nothing")
    parser.add_argument("--fast", action="store_true", help="check a small simulation of D = 32")
    args = parser.parse_args(argv)
    right = [check(constants, path, args) for constants, path in TABLES_FILES.items()]
    return 1 if (args.check or args.fast) and not all(right) else 0


def check(constants: str, path: Path, args: argparse.Namespace) -> bool:
    """Simulates the tables of one kind, compares them with the shipped ones and, unless told not to, writes them."""
    dims = (32,) if args.fast else HEAD_DIMS
    size, tolerance = FAST[constants] if args.fast else FULL
    shipped = json.loads(path.read_text())
    tables = {}
    right = True
    for dim in dims:
        simulated = simulate_table(dim, **size, constants=constants)
        tables[dim] = [[round(value, DIGITS) for value in column] for column in simulated]
        difference = deviation(tables[dim], shipped[str(dim)])
        right &= difference <= tolerance
        print(
            f"{constants}, D = {dim}: at most {difference:.1e} from the shipped table, {tolerance:g} allowed",
            flush=True,
        )
    if not (args.check or args.fast):
        write(tables, path)
        print(f"written: {path}")
    return right


if __name__ == "__main__":
    sys.exit(run_main(main))
