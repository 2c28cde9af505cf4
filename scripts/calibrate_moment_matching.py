"""Regenerates the tables of moment matching in lln_fairseq/ops, and shows how well it does with them.

    python -m scripts.calibrate_moment_matching            # simulate, compare, write the tables
    python -m scripts.calibrate_moment_matching --check    # simulate and compare only; exit code 1 if a table is off

For each table, by what it makes equal: first the largest difference of log σ̃² from the shipped one for each head
dimension. Then, on other random inputs, the log-variance of LLN attention, or what its rows lack of the largest
entropy, over that of softmax attention by s = σ_q² σ_k², with our tables and with the paper's line: 1 is right.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from lln_fairseq.command import run_main
from lln_fairseq.ops.moment_matching import (
    MEASURES,
    PAPER_A,
    PAPER_B,
    TABLES_FILES,
    interpolate,
    log_lln,
    log_softmax,
    simulate_table,
)

HEAD_DIMS = (16, 32, 64, 128)
DIGITS = 5  # of log s and log σ̃² in the file
SEED = 1  # of the inputs on which the fit is judged; the tables are simulated with seed 0
S_SHOWN = (0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

# Tokens and heads of a simulation, and the difference from the shipped tables that it may have. The shipped ones are of
# the full size: what differs then is rounding, by version of torch and number of threads. The fast ones have sampling
# error, and entropies depend more on the number of tokens.
FULL = {"tokens": 1024, "heads": 48}, 1e-4
FAST = {"calibrated": ({"tokens": 256, "heads": 8}, 0.05), "entropy": ({"tokens": 512, "heads": 8}, 0.05)}

MEASURED = {"calibrated": "variance of ln P", "entropy": "ln N - entropy"}

Table = list[list[float]]


def deviation(table: Table, shipped: Table) -> float:
    """The largest difference of log s or log σ̃²; infinite for tables of different lengths."""
    if [len(x) for x in table] != [len(x) for x in shipped]:
        return math.inf
    return (torch.tensor(table, dtype=torch.float64) - torch.tensor(shipped, dtype=torch.float64)).abs().max().item()


def fit(dim: int, table: Table, constants: str, tokens: int, heads: int) -> list[tuple[float, float]]:
    """Return LLN's measure relative to softmax's at every s of S_SHOWN: with the table, and with the paper's line."""
    measure = MEASURES[constants]
    generator = torch.Generator().manual_seed(SEED)
    x, y = torch.randn(2, heads, tokens, dim, generator=generator)
    log_s, log_sigma2 = torch.tensor(table)
    rows = []
    for s in S_SHOWN:
        softmax = measure(log_softmax(x, y, s))
        by_table = interpolate(torch.tensor(math.log(s)), log_s, log_sigma2).exp().item()
        by_paper = (s - PAPER_B) / PAPER_A
        rows.append((measure(log_lln(x, y, by_table)) / softmax, measure(log_lln(x, y, by_paper)) / softmax))
    return rows


def report(fits: dict[int, list[tuple[float, float]]], constants: str) -> str:
    """The fits side by side."""
    lines = [f"{MEASURED[constants]}, LLN over softmax", f"{'':>8}" + "".join(f"{f'D = {dim}':>18}" for dim in fits)]
    lines.append(f"{'s':>8}" + f"{'ours':>9}{'paper':>9}" * len(fits))
    for row, s in enumerate(S_SHOWN):
        lines.append(f"{s:>8g}" + "".join(f"{value:>9.3f}" for rows in fits.values() for value in rows[row]))
    worst = [max(abs(row[column] - 1) for row in rows) for rows in fits.values() for column in (0, 1)]
    return "\n".join([*lines, f"{'worst':>8}" + "".join(f"{value:>9.1%}" for value in worst)])


def write(tables: dict[int, Table], path: Path) -> None:
    """One line for each head dimension."""
    lines = (f' "{dim}": {json.dumps(table)}' for dim, table in tables.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.calibrate_moment_matching", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="write the tables into this directory (default: where they are shipped)"
    )
    parser.add_argument("--check", action="store_true", help="compare with the shipped tables, write nothing")
    parser.add_argument("--fast", action="store_true", help="check a small simulation of D = 32")
    args = parser.parse_args(argv)
    right = [check(constants, path, args) for constants, path in TABLES_FILES.items()]
    return 1 if (args.check or args.fast) and not all(right) else 0


def check(constants: str, path: Path, args: argparse.Namespace) -> bool:
    """Simulates the tables of one kind, compares them with the shipped ones and, unless told not to, writes them."""
    dims, (size, tolerance) = ((32,), FAST[constants]) if args.fast else (HEAD_DIMS, FULL)
    shipped, tables, right = json.loads(path.read_text()), {}, True
    for dim in dims:
        simulated = simulate_table(dim, **size, constants=constants)
        tables[dim] = [[round(value, DIGITS) for value in column] for column in simulated]
        difference = deviation(tables[dim], shipped[str(dim)])
        right &= difference <= tolerance
        print(
            f"{constants}, D = {dim}: at most {difference:.1e} from the shipped table, {tolerance:g} allowed",
            flush=True,
        )
    fits = {dim: fit(dim, table, constants, tokens=size["tokens"], heads=8) for dim, table in tables.items()}
    print(report(fits, constants))
    if not (args.check or args.fast):
        out = args.out / path.name if args.out else path
        write(tables, out)
        print(f"written: {out}")
    return right


if __name__ == "__main__":
    sys.exit(run_main(main))
