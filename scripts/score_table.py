"""Show the accuracies of finished runs, as medians over seeds, in a table with the accuracies of the paper."""

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lln_fairseq.command import UserError
from scripts.terminal import aligned, program_parser

PaperAccuracies = tuple[float | None, ...]


@dataclass
class TableRow:
    """One row of a score table: the accuracies in percent, and the number of seeds behind each of them."""

    name: str
    accuracy: dict[str, float] = field(default_factory=dict)  # by task
    seeds: dict[str, int] = field(default_factory=dict)  # by task; empty for a row of the paper
    mean: float | None = None  # over the paper's tasks; None if one of them is missing


@dataclass(frozen=True)
class ScoreTable:
    """A table of accuracies with a row for each run and a column for each task.

    Attributes:
        pattern: glob pattern of the result files relative to the directory of a run, such as glue/*/seed*/valid.json.
            The directory two levels above the file must have the name of the task.
        tasks: the title of each task by its name, the paper's tasks first. Other tasks are shown only if a run has
            results for them.
        paper: the rows of the paper by name. A row has the accuracy in percent on each of the paper's tasks, or None if
            it is not reported, and at the end the mean that the paper reports.
    """

    pattern: str
    tasks: Mapping[str, str]
    paper: Mapping[str, PaperAccuracies]

    @property
    def paper_tasks(self) -> list[str]:
        """The names of the tasks that the paper reports, in the order of `tasks`."""
        first_row = next(iter(self.paper.values()))
        num_tasks = len(first_row) - 1
        return list(self.tasks)[:num_tasks]

    def collect_rows(self, directory: Path) -> list[TableRow]:
        """Return a row for every run in a directory and its subdirectories, in the order of their paths.

        A row has the medians over the seeds. It has a mean only if there are results for all tasks of the paper.

        Raises:
            UserError: if a result file was not written by lln-fairseq evaluate.
        """
        accuracies: dict[str, dict[str, list[float]]] = {}  # by run and task, one per seed
        for file in sorted(directory.glob(f"**/{self.pattern}")):
            task = file.parts[-3]
            run = file.parents[self.pattern.count("/")]
            if task in self.tasks:
                name = run.name if run == directory else str(run.relative_to(directory))
                accuracies.setdefault(name, {}).setdefault(task, []).append(read_accuracy(file))
        rows = []
        for name, accuracies_by_task in accuracies.items():
            row = TableRow(name)
            for task in self.tasks:
                if task in accuracies_by_task:
                    row.accuracy[task] = statistics.median(accuracies_by_task[task])
                    row.seeds[task] = len(accuracies_by_task[task])
            if all(task in row.accuracy for task in self.paper_tasks):
                row.mean = statistics.fmean(row.accuracy[task] for task in self.paper_tasks)
            rows.append(row)
        return rows

    def paper_rows(self) -> list[TableRow]:
        """Return the rows of the paper, with " (paper)" after their names."""
        rows = []
        for name, (*values, mean) in self.paper.items():
            row = TableRow(f"{name} (paper)", mean=mean)
            for task, value in zip(self.paper_tasks, values, strict=True):
                if value is not None:
                    row.accuracy[task] = value
            rows.append(row)
        return rows

    def as_text(self, rows: list[TableRow]) -> str:
        """Return the table as text. The last column has the number of seeds for each task, such as 3/3/1."""
        tasks = self._shown_tasks(rows)
        lines = [["", *(self.tasks[task] for task in tasks), "mean", "seeds"]]
        for row in rows:
            seeds = ""
            if row.seeds:
                seeds = "/".join(str(row.seeds.get(task, 0)) for task in tasks)
            lines.append([row.name, *_accuracy_cells(row, tasks), seeds])
        return aligned(lines)

    def as_latex(self, rows: list[TableRow]) -> str:
        """Return the table as a LaTeX tabular, without the column of the numbers of seeds."""
        tasks = self._shown_tasks(rows)
        titles = ["Attention", *(self.tasks[task] for task in tasks), "mean"]
        lines = [rf"\begin{{tabular}}{{l{'c' * (len(tasks) + 1)}}}", r"\hline", " & ".join(titles) + r" \\", r"\hline"]
        for row in rows:
            cells = [row.name.replace("_", r"\_"), *_accuracy_cells(row, tasks)]
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\hline", r"\end{tabular}"]
        return "\n".join(lines) + "\n"

    def show(self, args: argparse.Namespace, program: str, further_text: str = "") -> None:
        """Print the table of the paper's rows and of the runs below args.directory.

        If args.latex is given, the table is also written to this file in LaTeX.

        Args:
            args: the command line, parsed by the parser that `table_parser` returns.
            program: the program that creates runs, for the error message.
            further_text: text to print after the table, such as further tables.

        Raises:
            UserError: if there are no runs and no further text.
        """
        run_rows = self.collect_rows(args.directory)
        if not run_rows and not further_text:
            raise UserError(f"no RUN/{self.pattern} below {args.directory}: run {program}")
        rows = [*self.paper_rows(), *run_rows]
        print(self.as_text(rows))
        if further_text:
            print(f"\n{further_text}")
        if args.latex:
            args.latex.write_text(self.as_latex(rows), encoding="utf-8")

    def _shown_tasks(self, rows: list[TableRow]) -> list[str]:
        """Return the paper's tasks, and all other tasks for which any row has an accuracy, in the order of `tasks`."""
        shown = set(self.paper_tasks)
        for row in rows:
            shown |= set(row.accuracy)
        return [task for task in self.tasks if task in shown]


def table_parser(program: str, description: str | None, directory: str) -> argparse.ArgumentParser:
    """Return the argument parser of a program that shows a score table.

    The program takes the directory of the runs and the option --latex FILE. `ScoreTable.show` takes the parsed result.

    Args:
        program: the module of the program; users run it as `python -m PROGRAM`.
        description: the description of the program in its help.
        directory: the default of the directory.
    """
    parser = program_parser(f"python -m {program}", description)
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path(directory), help="directory of the runs (default: %(default)s)"
    )
    parser.add_argument("--latex", type=Path, help="also write a LaTeX tabular to this file")
    return parser


def read_accuracy(file: Path) -> float:
    """Return the accuracy in percent. Raise UserError if lln-fairseq evaluate has not written the file."""
    try:
        return 100 * json.loads(file.read_text())["accuracy"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} is not a result file of lln-fairseq evaluate: {error!r}") from error


def _accuracy_cells(row: TableRow, tasks: list[str]) -> list[str]:
    """Return the accuracies on the tasks and the mean as text, each with one decimal, or "-" if it is missing."""
    cells = []
    for value in [*(row.accuracy.get(task) for task in tasks), row.mean]:
        cells.append("-" if value is None else f"{value:.1f}")
    return cells
