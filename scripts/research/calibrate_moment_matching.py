"""Regenerate the tables of moment matching in lln_fairseq/ops, or compare them with a new simulation.

    python -m scripts.research.calibrate_moment_matching            # simulate, compare, write the tables
    python -m scripts.research.calibrate_moment_matching --check    # write nothing; exit code 1 if a table deviates

For each head dimension, a table has a list of log s, with s = σ_q² σ_k², and a list of the matching values of log σ̃²
(see lln_fairseq/ops/moment_matching.py). The program prints the largest difference between the new and the shipped
table of each head dimension.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from lln_fairseq.command import run_main
from lln_fairseq.ops.moment_matching import TABLE_FILES, simulate_table
from lln_fairseq.terminal import program_parser

HEAD_DIMS: tuple[int, ...] = (16, 32, 64, 128)
DIGITS = 5  # decimals of log s and log σ̃² in the file

# Size of the simulation, and the largest accepted difference from the shipped tables. They were simulated with the same
# size, so a new simulation differs only by rounding, which depends on the version of torch and the number of threads.
TOKENS = 1024
HEADS = 48
TOLERANCE = 1e-4

Table = list[list[float]]


def max_deviation(table: Table, shipped: Table) -> float:
    """Return the largest absolute difference between two tables, or infinity if they have different lengths."""
    if [len(column) for column in table] != [len(column) for column in shipped]:
        return math.inf
    difference = torch.tensor(table, dtype=torch.float64) - torch.tensor(shipped, dtype=torch.float64)
    return difference.abs().max().item()


def write_tables(tables: dict[int, Table], path: Path) -> None:
    """Write the tables as JSON, with one line per head dimension, and replace the file."""
    lines = [f' "{dim}": {json.dumps(table)}' for dim, table in tables.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def calibrate_tables(constants: str, path: Path, write: bool) -> bool:
    """Simulate the tables of one kind, print how much they deviate from the shipped ones, and optionally write them.

    Args:
        constants: "calibrated" (the variance of log P is matched) or "entropy" (the entropy of the rows of P is
            matched).
        path: the file of the shipped tables.
        write: True replaces the file.

    Returns:
        True if every simulated table agrees with the shipped one within TOLERANCE.
    """
    shipped = json.loads(path.read_text())
    tables: dict[int, Table] = {}
    agrees = True
    for dim in HEAD_DIMS:
        table = []
        for column in simulate_table(dim, TOKENS, HEADS, constants=constants):
            table.append([round(value, DIGITS) for value in column])
        tables[dim] = table
        difference = max_deviation(table, shipped[str(dim)])
        if not difference <= TOLERANCE:
            agrees = False
        print(
            f"{constants}, D = {dim}: at most {difference:.1e} from the shipped table, {TOLERANCE:g} allowed",
            flush=True,
        )
    if write:
        write_tables(tables, path)
        print(f"written: {path}")
    return agrees


def calibrate(args: argparse.Namespace) -> int:
    """Simulate and compare all tables, and replace the shipped ones unless --check is given.

    Returns:
        The exit code: 1 if --check is given and a table deviates from the shipped one, otherwise 0.
    """
    all_agree = True
    for constants, path in TABLE_FILES.items():
        agrees = calibrate_tables(constants, path, write=not args.check)
        all_agree = all_agree and agrees
    return 1 if args.check and not all_agree else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = program_parser("python -m scripts.research.calibrate_moment_matching", __doc__)
    parser.add_argument("--check", action="store_true", help="compare with the shipped tables, write nothing")
    return calibrate(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(run_main(main))
