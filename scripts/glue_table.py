"""Collects fine-tuning runs into the paper's Table 1: GLUE accuracy on the development sets, median over seeds.

python -m scripts.glue_table runs --latex table1.tex

It reads every RUN/glue/TASK/seedN/valid.json below the directory; one row for each RUN.
"""

from lln_fairseq.command import UserError, run_main, start

if __name__ == "__main__":
    start(__spec__.name)

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.columns import aligned

TASKS = {"mnli": "MNLI", "qnli": "QNLI", "qqp": "QQP", "sst2": "SST-2"}

# Table 1 of arXiv 2311.13541, accuracy in per cent: MNLI, QNLI, QQP, SST-2, the mean that it states.
PAPER = {
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
}


@dataclass
class Row:
    """One line of the table; accuracies in per cent by task, and how many seeds each is the median of."""

    name: str
    accuracy: dict[str, float] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    mean: float | None = None  # over the four tasks


def collect(directory: Path) -> list[Row]:
    """A row for every pre-training below a directory that has finished fine-tunings, by name."""
    found: dict[str, dict[str, list[float]]] = {}
    for file in sorted(directory.glob("**/glue/*/seed*/valid.json")):
        task, run = file.parts[-3], file.parents[3]
        if task in TASKS:
            name = str(run.relative_to(directory)) if run != directory else run.name
            found.setdefault(name, {}).setdefault(task, []).append(100 * json.loads(file.read_text())["accuracy"])
    rows = []
    for name, tasks in found.items():
        accuracy = {task: statistics.median(tasks[task]) for task in TASKS if task in tasks}
        mean = statistics.fmean(accuracy.values()) if accuracy.keys() == TASKS.keys() else None
        rows.append(Row(name, accuracy, {task: len(tasks[task]) for task in accuracy}, mean))
    return rows


def paper_rows() -> list[Row]:
    rows = []
    for name, (*values, mean) in PAPER.items():
        accuracy = {task: value for task, value in zip(TASKS, values, strict=True) if value is not None}
        rows.append(Row(f"{name} (paper)", accuracy, mean=mean))
    return rows


def cells(row: Row) -> list[str]:
    values = [row.accuracy.get(task) for task in TASKS] + [row.mean]
    return ["-" if value is None else f"{value:.1f}" for value in values]


def as_text(rows: list[Row]) -> str:
    lines = [["", *TASKS.values(), "mean", "seeds"]]
    for row in rows:
        seeds = "/".join(str(row.seeds.get(task, 0)) for task in TASKS) if row.seeds else ""
        lines.append([row.name, *cells(row), seeds])
    return aligned(lines)


def as_latex(rows: list[Row]) -> str:
    titles = " & ".join(["Attention", *TASKS.values(), "mean"])
    body = [" & ".join([row.name.replace("_", r"\_"), *cells(row)]) + r" \\" for row in rows]
    head = [r"\begin{tabular}{lccccc}", r"\hline", titles + r" \\", r"\hline"]
    return "\n".join([*head, *body, r"\hline", r"\end{tabular}"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.glue_table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"), help="default: runs")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--latex", type=Path, help="also write a LaTeX tabular to this file")
    args = parser.parse_args(argv)
    return run_main(lambda: show(args))


def show(args: argparse.Namespace) -> None:
    """Prints the table and writes the files that the command line asks for. Raises: UserError where no run is found."""
    ours = collect(args.directory)
    if not ours:
        raise UserError(f"no RUN/glue/TASK/seedN/valid.json below {args.directory}: run scripts/glue_all.sh")
    rows = [*paper_rows(), *ours]
    print(as_text(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if args.latex:
        args.latex.write_text(as_latex(rows), encoding="utf-8")
