"""Regenerate the tables of moment matching in lln_fairseq/ops, or compare them with a new simulation.

    python -m scripts.calibrate_moment_matching            # simulate, compare, write the tables
    python -m scripts.calibrate_moment_matching --check    # simulate and compare; exit code 1 if a table deviates

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
from scripts.terminal import program_parser

HEAD_DIMS: tuple[int, ...] = (16, 32, 64, 128)
DIGITS = 5  # decimals of log s and log σ̃² in the file

# Tokens and heads of a simulation, and the largest accepted difference from the shipped tables. The shipped tables have
# the full size, so a full simulation differs only by rounding, which depends on the version of torch and the number of
# threads. Fast simulations have sampling errors. Entropies need more tokens, because they depend more on their number.
FULL_SIZE = {"tokens": 1024, "heads": 48}
FULL_TOLERANCE = 1e-4
FAST_SIZES = {"calibrated": {"tokens": 256, "heads": 8}, "entropy": {"tokens": 512, "heads": 8}}
FAST_TOLERANCE = 0.05

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


def calibrate_tables(constants: str, path: Path, fast: bool, write: bool) -> bool:
    """Simulate the tables of one kind, print how much they deviate from the shipped ones, and optionally write them.

    Args:
        constants: "calibrated" (the variance of log P is matched) or "entropy" (the entropy of the rows of P is
            matched).
        path: the file of the shipped tables.
        fast: True runs a small simulation of head dimension 32; False runs a full simulation of all head dimensions.
        write: True replaces the file.

    Returns:
        True if every simulated table agrees with the shipped one, within the tolerance of the simulation.
    """
    head_dims = HEAD_DIMS
    size = FULL_SIZE
    tolerance = FULL_TOLERANCE
    if fast:
        head_dims = (32,)
        size = FAST_SIZES[constants]
        tolerance = FAST_TOLERANCE
    shipped = json.loads(path.read_text())
    tables: dict[int, Table] = {}
    agrees = True
    for dim in head_dims:
        table = []
        for column in simulate_table(dim, **size, constants=constants):
            table.append([round(value, DIGITS) for value in column])
        tables[dim] = table
        difference = max_deviation(table, shipped[str(dim)])
        if not difference <= tolerance:
            agrees = False
        print(
            f"{constants}, D = {dim}: at most {difference:.1e} from the shipped table, {tolerance:g} allowed",
            flush=True,
        )
    if write:
        write_tables(tables, path)
        print(f"written: {path}")
    return agrees


def calibrate(args: argparse.Namespace) -> int:
    """Simulate and compare all tables, and replace the shipped ones unless --check or --fast is given.

    Returns:
        The exit code: 1 if --check or --fast is given and a table deviates from the shipped one, otherwise 0.
    """
    only_check = args.check or args.fast
    all_agree = True
    for constants, path in TABLE_FILES.items():
        agrees = calibrate_tables(constants, path, fast=args.fast, write=not only_check)
        all_agree = all_agree and agrees
    return 1 if only_check and not all_agree else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = program_parser("python -m scripts.calibrate_moment_matching", __doc__)
    parser.add_argument("--check", action="store_true", help="compare with the shipped tables, write nothing")
    parser.add_argument("--fast", action="store_true", help="check with a small simulation of D = 32, write nothing")
    return calibrate(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(run_main(main))
