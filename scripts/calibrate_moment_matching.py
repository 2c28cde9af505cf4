"""Regenerate the tables of moment matching in lln_fairseq/ops, or compare them with a new simulation.

    python -m scripts.calibrate_moment_matching            # simulate, compare, write the tables
    python -m scripts.calibrate_moment_matching --check    # write nothing; exit code 1 if a table deviates

For each head dimension, a table has a list of log s, with s = σ_q² σ_k², and a list of the matching values of log σ̃²
(see lln_fairseq/ops/moment_matching.py). The program prints the largest difference between the new and the shipped
table of each head dimension.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from lln_fairseq.command import run_main
from lln_fairseq.ops.moment_matching import TABLE_FILE, simulate_table
from lln_fairseq.terminal import program_parser

HEAD_DIMS: tuple[int, ...] = (16, 32, 64, 128)
DIGITS = 5  # decimals of log s and log σ̃² in the file

# Size of the simulation, and the largest accepted difference from the shipped tables. They were simulated with the same
# size, so a new simulation differs only by rounding, which depends on the version of torch and the number of threads.
TOKENS = 1024
HEADS = 48
TOLERANCE = 1e-4

Table = list[list[float]]


def write_tables(tables: dict[int, Table], path: Path) -> None:
    """Write the tables as JSON, with one line per head dimension, and replace the file."""
    lines = [f' "{dim}": {json.dumps(table)}' for dim, table in tables.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def calibrate(args: argparse.Namespace) -> int:
    """Simulate all tables, print how much they deviate from the shipped ones, and write them unless --check is given.

    The exit code is 1 if --check is given and a table deviates by more than TOLERANCE.
    """
    shipped = json.loads(TABLE_FILE.read_text())
    tables: dict[int, Table] = {}
    agrees = True
    for dim in HEAD_DIMS:
        table = []
        for column in simulate_table(dim, TOKENS, HEADS):
            table.append([round(value, DIGITS) for value in column])
        tables[dim] = table
        difference = (torch.tensor(table) - torch.tensor(shipped[str(dim)])).abs().max().item()
        if not difference <= TOLERANCE:
            agrees = False
        print(f"D = {dim}: at most {difference:.1e} from the shipped table, {TOLERANCE:g} allowed", flush=True)
    if args.check:
        return 0 if agrees else 1
    write_tables(tables, TABLE_FILE)
    print(f"written: {TABLE_FILE}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.calibrate_moment_matching", __doc__)
    parser.add_argument("--check", action="store_true", help="compare with the shipped tables, write nothing")
    return calibrate(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(run_main(main))
