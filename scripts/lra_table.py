"""Show runs on the Long Range Arena in a table like the paper's Table 5, and measurements in tables like its Table 4.

python -m scripts.lra_table runs/lra --benchmark table4.json --latex table5.tex

Table 5 has the accuracies, as medians over seeds: the program reads every RUN/TASK/seedN/test.json below the directory,
and the table has a row for each RUN.
Table 4 has the time and the memory of training: --benchmark names the file that scripts.benchmarks.lra wrote.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.command import UserError, run_main
from scripts.score_table import ScoreTable, table_parser
from scripts.terminal import grid, settings_line

TASKS = {
    "text": "Text",
    "listops": "ListOps",
    "retrieval": "Retrieval",
    "pathfinder": "Pathfinder",
    "image": "Image",
}

# Table 5 of arXiv 2311.13541: accuracies in percent, in the order above, and the mean that the paper reports.
PAPER = {
    "softmax": (60.41, 38.05, 79.95, 71.3, 37.2, 57.38),
    "Reformer": (61.27, 37.05, 78.74, 67.23, 44.04, 57.67),
    "Performer": (57.85, 37.8, 80.5, 62.58, 37.56, 55.26),
    "Skyformer": (60.88, 39.36, 81.54, 70.23, 32.64, 56.93),
    "LLN+Diag": (60.72, 38.91, 81.21, 69.81, 38.65, 57.86),
}
TABLE = ScoreTable("*/seed*/test.json", TASKS, PAPER)

# Table 4, in the order above: seconds of a whole training run, and megabytes.
PAPER_SECONDS = {
    "softmax": (21468, 5905, 21866, 6754, 13228),
    "Reformer": (4610, 2439, 4714, 4694, 8737),
    "Performer": (3456, 1966, 3761, 3553, 13169),
    "Skyformer": (4523, 2970, 5602, 5240, 9347),
    "LLN+Diag": (3043, 1774, 3135, 3042, 4053),
}
PAPER_MEGABYTES = {
    "softmax": (17108, 4458, 8934, 4817, 9632),
    "Reformer": (3261, 1631, 3008, 3258, 6514),
    "Performer": (2176, 1122, 2178, 2180, 4353),
    "Skyformer": (3068, 1697, 2974, 4041, 8079),
    "LLN+Diag": (1641, 821, 1586, 1639, 3276),
}
BASELINE = "softmax"

Values = dict[tuple[str, str], float | None]  # by attention and task; None if the memory did not suffice


def read_benchmark(file: Path) -> str:
    """Return the tables of a benchmark as text. Raise UserError if scripts.benchmarks.lra has not written the file."""
    try:
        return benchmark_text(json.loads(file.read_text()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a result file of scripts.benchmarks.lra: {error!r}") from error


def benchmark_text(content: Mapping[str, Any]) -> str:
    """Return a line with the settings of a benchmark, then tables of the times and of the peak memory.

    The tables of ratios to softmax also have the ratios that follow from the paper's numbers. `content` is the parsed
    JSON that scripts.benchmarks.lra writes.
    """
    milliseconds: Values = {}
    gigabytes: Values = {}
    for row in content["rows"]:
        key = (row["attention"], row["task"])
        milliseconds[key] = None
        if row["time"] is not None:
            milliseconds[key] = row["time"][0]
        gigabytes[key] = None
        if row["memory"] is not None:
            gigabytes[key] = row["memory"] / 1e9
    blocks = [settings_line(content["settings"])]
    blocks += _measurement_tables("time [ms/iteration]", milliseconds, 1, PAPER_SECONDS)
    blocks += _measurement_tables("peak memory [GB]", gigabytes, 3, PAPER_MEGABYTES)
    return "\n\n".join(blocks)


def _measurement_tables(title: str, measured: Values, digits: int, paper: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a table of the measured values, and a table of their ratios to those of softmax.

    The second table also has the ratios of the paper's values. The list is empty if nothing was measured.

    Args:
        title: the title of the first table.
        measured: the measured values by attention and task.
        digits: number of decimals of the measured values.
        paper: the paper's values of each attention, in the order of the paper's tasks, in any unit.
    """
    if not any(measured.values()):
        return []
    published: Values = {}
    for name, values in paper.items():
        for task, value in zip(TABLE.paper_tasks, values, strict=True):
            published[f"{name} (paper)", task] = value
    columns = {task: TASKS[task] for _, task in measured}
    ratios = _ratios_to(BASELINE, measured) | _ratios_to(f"{BASELINE} (paper)", published)
    return [
        grid(title, columns, _format_values(measured, digits, missing="OOM")),
        grid(f"as a multiple of {BASELINE}", columns, _format_values(ratios, 2, missing="-")),
    ]


def _ratios_to(baseline: str, values: Values) -> Values:
    """Return the ratio of each value to the baseline's value on the same task, or None if either value is missing."""
    ratios: Values = {}
    for (name, task), value in values.items():
        baseline_value = values.get((baseline, task))
        ratios[name, task] = value / baseline_value if value and baseline_value else None
    return ratios


def _format_values(values: Values, digits: int, missing: str) -> dict[tuple[str, str], str]:
    """Return each value as text with `digits` decimals, or `missing` for None."""
    texts = {}
    for key, value in values.items():
        texts[key] = missing if value is None else f"{value:.{digits}f}"
    return texts


def show_tables(args: argparse.Namespace) -> None:
    """Print the table of the runs and, with --benchmark, the tables of the benchmark."""
    measurements = ""
    if args.benchmark:
        measurements = read_benchmark(args.benchmark)
    TABLE.show(args, "scripts/lra.sh or scripts/lra_all.sh", measurements)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = table_parser("scripts.lra_table", __doc__, "runs/lra")
    parser.add_argument("--benchmark", type=Path, help="file that scripts.benchmarks.lra wrote with --json")
    return run_main(partial(show_tables, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
