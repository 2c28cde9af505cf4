"""Show the accuracies of your runs, as medians over the seeds, in the paper's Tables 1 (GLUE) and 5 (Long Range Arena).

python -m scripts.tables glue runs --latex table1.tex    # reads RUN/glue/TASK/seedN/valid.json below runs
python -m scripts.tables lra runs/lra                    # reads RUN/TASK/seedN/test.json below runs/lra
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.terminal import program_parser, text_table

Accuracies = Sequence[float | None]  # in percent, in the order of the tasks; None is missing


@dataclass(frozen=True)
class ScoreTable:
    """A table of the paper.

    Attributes:
        pattern: glob pattern of the result files relative to the directory of a run. The directory two levels above the
            file has the name of the task.
        tasks: the title of each task by its name.
        paper: the accuracies of every row, followed by the mean that the paper reports.
        program: the programs that make such runs, for an error message.
    """

    pattern: str
    tasks: dict[str, str]
    paper: dict[str, Accuracies]
    program: str


GLUE = ScoreTable(
    pattern="glue/*/seed*/valid.json",
    tasks={"mnli": "MNLI", "qnli": "QNLI", "qqp": "QQP", "sst2": "SST-2"},
    paper={  # Table 1 of arXiv 2311.13541
        "RoBERTa, softmax": (80.3, 87.2, 89.9, 90.6, 87.0),
        "Reformer": (35.4, None, 63.2, 50.9, 49.8),
        "Performer": (58.8, 63.4, 79.1, 81.4, 70.6),
        "ELU": (74.8, 82.5, 86.9, 87.2, 82.8),
        "Longformer": (77.2, None, 85.5, 88.6, 83.7),
        "Transformer-LS": (77.0, 84.8, 86.8, 90.2, 84.7),
        "TNN": (76.72, 85.06, 88.3, 90.6, 85.17),
        "T2": (77.28, 85.39, 88.56, 90.71, 85.48),
        "cosFormer": (76.7, None, 89.2, 91.0, 85.6),
        "T1": (79.06, 87.0, 88.61, 91.17, 86.46),
        "Flash": (79.45, 87.1, 88.83, 90.71, 86.52),
        "Nyströmformer": (80.9, 88.7, 86.3, 91.4, 86.8),
        "LLN": (77.0, 85.1, 88.9, 90.6, 85.4),
        "LLN+Diag": (80.0, 86.5, 89.7, 91.6, 86.9),
    },
    program="scripts/glue_all.sh",
)
LRA = ScoreTable(
    pattern="*/seed*/test.json",
    tasks={
        "text": "Text",
        "listops": "ListOps",
        "retrieval": "Retrieval",
        "pathfinder": "Pathfinder",
        "image": "Image",
    },
    paper={  # Table 5
        "softmax": (60.41, 38.05, 79.95, 71.3, 37.2, 57.38),
        "Reformer": (61.27, 37.05, 78.74, 67.23, 44.04, 57.67),
        "Performer": (57.85, 37.8, 80.5, 62.58, 37.56, 55.26),
        "Skyformer": (60.88, 39.36, 81.54, 70.23, 32.64, 56.93),
        "LLN+Diag": (60.72, 38.91, 81.21, 69.81, 38.65, 57.86),
    },
    program="scripts/lra.sh or scripts/lra_all.sh",
)
TABLES = {"glue": GLUE, "lra": LRA}


def read_accuracies(directory: Path, table: ScoreTable) -> dict[str, dict[str, list[float]]]:
    """Return the accuracies in percent of all seeds, by run and then by task, in the order of the runs' paths."""
    runs: dict[str, dict[str, list[float]]] = {}
    for file in sorted(directory.glob(f"**/{table.pattern}")):
        task = file.parts[-3]
        run = file.parents[table.pattern.count("/")]
        if task not in table.tasks:
            continue
        try:
            accuracy = 100 * json.loads(file.read_text())["accuracy"]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{file} is not a result file of lln-fairseq evaluate: {error!r}") from error
        name = run.name if run == directory else str(run.relative_to(directory))
        runs.setdefault(name, {}).setdefault(task, []).append(accuracy)
    if not runs:
        raise UserError(f"no RUN/{table.pattern} below {directory}: run {table.program}")
    return runs


def table_rows(runs: dict[str, dict[str, list[float]]], table: ScoreTable) -> list[list[str]]:
    """Return the cells of all rows. The last column has the number of seeds of each task, such as 3/3/1."""
    rows = [["", *table.tasks.values(), "mean", "seeds"]]
    for name, values in table.paper.items():
        rows.append([f"{name} (paper)", *map(accuracy_cell, values), ""])
    for name, seeds_by_task in runs.items():
        medians: list[float | None] = []
        for task in table.tasks:
            medians.append(statistics.median(seeds_by_task[task]) if task in seeds_by_task else None)
        known = [value for value in medians if value is not None]
        mean = statistics.fmean(known) if len(known) == len(medians) else None
        seeds = "/".join(str(len(seeds_by_task.get(task, []))) for task in table.tasks)
        rows.append([name, *map(accuracy_cell, [*medians, mean]), seeds])
    return rows


def mean_and_range(values: Sequence[float], digits: int = 1, sign: str = "") -> str:
    """Return "mean (lowest–highest)", only the value if there is one, or "" if there is none.

    With the sign "+", positive numbers have one, and the range is "lowest to highest".
    """
    if not values:
        return ""
    spec = f"{sign}.{digits}f"
    text = format(statistics.fmean(values), spec)
    if len(values) == 1:
        return text
    dash = " to " if sign else "–"
    return f"{text} ({min(values):{spec}}{dash}{max(values):{spec}})"


def accuracy_cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def latex(rows: list[list[str]]) -> str:
    """Return the rows as a LaTeX tabular, without the column of the seeds."""
    lines = [" & ".join(row[:-1]).replace("_", r"\_") + r" \\" for row in rows]
    columns = "l" + "c" * (len(rows[0]) - 2)
    start = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", lines[0], r"\hline"]
    return "\n".join([*start, *lines[1:], r"\hline", r"\end{tabular}"]) + "\n"


def show_table(table: ScoreTable, directory: Path, latex_file: Path | None) -> None:
    rows = table_rows(read_accuracies(directory, table), table)
    print(text_table(rows))
    if latex_file:
        latex_file.write_text(latex(rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.tables", __doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("directory", type=Path, help="directory of the runs")
    parser.add_argument("--latex", type=Path, help="also write a LaTeX tabular to this file")
    args = parser.parse_args(argv)
    return run_main(partial(show_table, TABLES[args.table], args.directory, args.latex))


if __name__ == "__main__":
    sys.exit(main())
