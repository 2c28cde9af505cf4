"""Collects runs on the Long Range Arena into the paper's Table 5 (accuracy), and measurements into its Table 4.

python -m scripts.lra_table runs/lra --benchmark table4.json --latex table5.tex

It reads every RUN/TASK/seedN/test.json below the directory, one row for each RUN, and what scripts.benchmarks.lra
wrote. Stand-ins have columns of their own and no part in the mean.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln_fairseq.command import UserError, run_main
from scripts.score_table import ScoreTable, options
from scripts.terminal import grid, settings_line

TASKS = {
    "text": "Text", "listops": "ListOps", "retrieval": "Retrieval", "pathfinder": "Pathfinder", "image": "Image",
    "text_stand_in": "text stand-in", "retrieval_stand_in": "retrieval stand-in", "image_stand_in": "image stand-in",
}  # fmt: skip

# Table 5 of arXiv 2311.13541, accuracy in per cent, in the order above, and the mean that it states.
PAPER = {
    "softmax": (60.41, 38.05, 79.95, 71.3, 37.2, 57.38),
    "Reformer": (61.27, 37.05, 78.74, 67.23, 44.04, 57.67),
    "Performer": (57.85, 37.8, 80.5, 62.58, 37.56, 55.26),
    "Skyformer": (60.88, 39.36, 81.54, 70.23, 32.64, 56.93),
    "LLN+Diag": (60.72, 38.91, 81.21, 69.81, 38.65, 57.86),
}
TABLE = ScoreTable("*/seed*/test.json", TASKS, PAPER)

# Table 4, in the order above: seconds of a training, megabytes.
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

Values = dict[tuple[str, str], float | None]  # by attention and task; None: out of memory


def read_benchmark(file: Path) -> str:
    """Raises: UserError for a file that scripts.benchmarks.lra has not written."""
    try:
        return benchmark_text(json.loads(file.read_text()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not what scripts.benchmarks.lra writes: {error!r}") from error


def benchmark_text(content: Mapping[str, Any]) -> str:
    """What scripts.benchmarks.lra measured, and the ratios to softmax beside the paper's."""
    milliseconds: Values = {}
    gigabytes: Values = {}
    for row in content["rows"]:
        key = (row["attention"], row["task"])
        milliseconds[key] = row["time"] and row["time"][0]
        gigabytes[key] = row["memory"] and row["memory"] / 1e9
    blocks = [settings_line(content["settings"])]
    blocks += _measured("time [ms/iteration]", milliseconds, 1, PAPER_SECONDS)
    blocks += _measured("peak memory [GB]", gigabytes, 3, PAPER_MEGABYTES)
    return "\n\n".join(blocks)


def _measured(head: str, values: Values, digits: int, paper: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the tables of the values and of their ratios, none if nothing was measured."""
    if not any(values.values()):
        return []
    stated: Values = {}
    for name, line in paper.items():
        for task, value in zip(TABLE.in_paper, line, strict=True):
            stated[f"{name} (paper)", task] = value
    columns = {task: TASKS[task] for _, task in values}
    ratios = _ratios(values, BASELINE) | _ratios(stated, f"{BASELINE} (paper)")
    return [
        grid(head, columns, _texts(values, digits, missing="OOM")),
        grid(f"the same as a multiple of {BASELINE}'s", columns, _texts(ratios, 2, missing="-")),
    ]


def _ratios(values: Values, baseline: str) -> Values:
    found: Values = {}
    for (name, task), value in values.items():
        base = values.get((baseline, task))
        found[name, task] = value / base if value and base else None
    return found


def _texts(values: Values, digits: int, missing: str) -> dict[tuple[str, str], str]:
    return {key: missing if value is None else f"{value:.{digits}f}" for key, value in values.items()}


def main(argv: list[str] | None = None) -> int:
    parser = options("scripts.lra_table", __doc__, "runs/lra")
    parser.add_argument("--benchmark", type=Path, help="the file that scripts.benchmarks.lra wrote")
    args = parser.parse_args(argv)

    def show() -> None:
        measured = read_benchmark(args.benchmark) if args.benchmark else ""
        TABLE.show(args, "scripts/lra.sh or scripts/lra_all.sh", measured)

    return run_main(show)


if __name__ == "__main__":
    sys.exit(main())
