"""Accuracies of finished runs, medians over seeds, beside a paper's table; the part of a program that shows it."""

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lln_fairseq.command import UserError
from scripts.terminal import aligned, program_parser

Accuracies = tuple[float | None, ...]


@dataclass
class Row:
    """One line of the table; accuracies in per cent by task, and how many seeds each is the median of."""

    name: str
    accuracy: dict[str, float] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    mean: float | None = None  # over the paper's tasks


@dataclass(frozen=True)
class ScoreTable:
    """`pattern`: where a result is below its run, RUN/... with the task two folders above the file.

    `tasks`: title by task; `paper`: for each of its rows the accuracies of the first tasks and the mean that it states.
    Tasks beyond those of the paper are shown where a run has them.
    """

    pattern: str
    tasks: Mapping[str, str]
    paper: Mapping[str, Accuracies]

    @property
    def in_paper(self) -> list[str]:
        return list(self.tasks)[: len(next(iter(self.paper.values()))) - 1]

    def collect(self, directory: Path) -> list[Row]:
        """A row for every run below a directory that has results, by name."""
        found: dict[str, dict[str, list[float]]] = {}
        for file in sorted(directory.glob(f"**/{self.pattern}")):
            task, run = file.parts[-3], file.parents[self.pattern.count("/")]
            if task in self.tasks:
                name = str(run.relative_to(directory)) if run != directory else run.name
                found.setdefault(name, {}).setdefault(task, []).append(_accuracy(file))
        rows = []
        for name, tasks in found.items():
            accuracy = {task: statistics.median(tasks[task]) for task in self.tasks if task in tasks}
            wanted = [accuracy[task] for task in self.in_paper if task in accuracy]
            mean = statistics.fmean(wanted) if len(wanted) == len(self.in_paper) else None
            rows.append(Row(name, accuracy, {task: len(tasks[task]) for task in accuracy}, mean))
        return rows

    def paper_rows(self) -> list[Row]:
        rows = []
        for name, (*values, mean) in self.paper.items():
            pairs = zip(self.in_paper, values, strict=True)
            rows.append(Row(f"{name} (paper)", {task: value for task, value in pairs if value is not None}, mean=mean))
        return rows

    def as_text(self, rows: list[Row]) -> str:
        tasks = self._shown(rows)
        lines = [["", *(self.tasks[task] for task in tasks), "mean", "seeds"]]
        for row in rows:
            seeds = "/".join(str(row.seeds.get(task, 0)) for task in tasks) if row.seeds else ""
            lines.append([row.name, *_cells(row, tasks), seeds])
        return aligned(lines)

    def as_latex(self, rows: list[Row]) -> str:
        tasks = self._shown(rows)
        titles = " & ".join(["Attention", *(self.tasks[task] for task in tasks), "mean"])
        body = [" & ".join([row.name.replace("_", r"\_"), *_cells(row, tasks)]) + r" \\" for row in rows]
        head = [rf"\begin{{tabular}}{{l{'c' * (len(tasks) + 1)}}}", r"\hline", titles + r" \\", r"\hline"]
        return "\n".join([*head, *body, r"\hline", r"\end{tabular}"]) + "\n"

    def show(self, args: argparse.Namespace, begin_with: str, more: str = "") -> None:
        """Prints the table, then `more`, and writes the files that `options` has found in the command line.

        Raises: UserError where there is no run and nothing more; `begin_with` is what makes runs.
        """
        ours = self.collect(args.directory)
        if not ours and not more:
            raise UserError(f"no RUN/{self.pattern} below {args.directory}: run {begin_with}")
        rows = [*self.paper_rows(), *ours]
        print("\n\n".join(filter(None, [self.as_text(rows), more])))
        if args.latex:
            args.latex.write_text(self.as_latex(rows), encoding="utf-8")

    def _shown(self, rows: list[Row]) -> list[str]:
        return [task for task in self.tasks if task in self.in_paper or any(task in row.accuracy for row in rows)]


def options(program: str, description: str | None, directory: str) -> argparse.ArgumentParser:
    """What every program that shows such a table takes: where the runs are, and files to write."""
    parser = program_parser(f"python -m {program}", description)
    parser.add_argument("directory", nargs="?", type=Path, default=Path(directory), help="default: %(default)s")
    parser.add_argument("--latex", type=Path, help="also write a LaTeX tabular to this file")
    return parser


def _accuracy(file: Path) -> float:
    """In per cent. Raises: UserError for a file that lln-fairseq evaluate did not write."""
    try:
        return 100 * json.loads(file.read_text())["accuracy"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file} is not what lln-fairseq evaluate writes: {error!r}") from error


def _cells(row: Row, tasks: list[str]) -> list[str]:
    values = [row.accuracy.get(task) for task in tasks] + [row.mean]
    return ["-" if value is None else f"{value:.1f}" for value in values]
