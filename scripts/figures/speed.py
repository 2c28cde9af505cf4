"""Draw the time and the peak memory of one attention call by length, from files of scripts.benchmarks.attention.

    python -m scripts.figures.speed docs/results/attention_times.json docs/results/gpu_times.json --png docs/speed.png

Each file is a column: a panel for the time and one for the memory, of the forward and the backward pass together. What
was not measured is not drawn.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.command import run_main
from lln_fairseq.terminal import program_parser
from scripts.benchmarks.meter import output_file

NAMES = {  # of the benchmark's rows. A line has the same color in every column.
    "sdpa": "softmax",
    "lln_diag": "LLN+Diag",
    "window:block_size=64": "window of blocks of 64",
    "block_diag:global_tokens=64": "long pairs: blocks, 64 global tokens",
}
MILLISECONDS = (0.1, 1, 10, 100, 1000, 10000)
MEGABYTES = (10, 30, 100, 300, 1000)


def read_times(path: Path) -> dict[str, Any]:
    """Return the last measurement of a file of the benchmark or of docs/results."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["times"][-1] if "times" in content else content


def draw(measurements: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = len(measurements)
    figure, axes = plt.subplots(
        2, columns, figsize=(5 * columns, 6.5), sharey="row", squeeze=False, constrained_layout=True
    )
    for column, measured in enumerate(measurements):
        times, memory = axes[:, column]
        for number, (name, label) in enumerate(NAMES.items()):
            rows = [row for row in measured["rows"] if row["attention"] == name]
            lengths = [row["length"] for row in rows]
            style = {"label": label, "color": f"C{number}", "marker": "osv^"[number], "linestyle": "--"}
            times.loglog(lengths, [row["both"][0] for row in rows], **style)
            memory.loglog(lengths, [megabytes(row, measured["sizes"]) for row in rows], **style)
        times.set_title(panel_title(measured), fontsize=10)
        lengths = sorted({row["length"] for row in measured["rows"]})
        for axis, ticks in ((times, MILLISECONDS), (memory, MEGABYTES)):
            axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
            axis.set_yticks([], minor=True)
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axis.set_xticks([], minor=True)
            axis.grid(True, alpha=0.3)
        memory.set(xlabel="tokens of a sequence")
    axes[0, 0].set(ylabel="time of a call, both passes [ms]")
    axes[1, 0].set(ylabel="peak memory beside the inputs [MB]")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(NAMES))
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


def panel_title(measured: dict[str, Any]) -> str:
    sizes = measured["sizes"]
    batch = "one sequence" if sizes["tokens"] == 1 else f"{sizes['tokens']:,} tokens at a time"
    return f"{measured['title'].split(', torch')[0]}, {sizes['dtype']}, {batch}"


def megabytes(row: dict[str, Any], sizes: dict[str, Any]) -> float:
    """Return a row's peak memory, or NaN if it was not measured."""
    if row["memory"] is None:
        return math.nan
    tokens = max(1, sizes["tokens"] // row["length"]) * row["length"]
    query = tokens * sizes["heads"] * sizes["head_dim"] * getattr(torch, sizes["dtype"]).itemsize
    return row["memory"] * query / 1e6


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.figures.speed", __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--png", type=output_file, default=Path("speed.png"), help="(default: %(default)s)")
    args: argparse.Namespace = parser.parse_args(argv)
    return run_main(lambda: draw([read_times(path) for path in args.files], args.png))


if __name__ == "__main__":
    sys.exit(main())
