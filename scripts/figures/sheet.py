"""Draw a figure with several panels and record the numbers that it shows."""

import csv
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lln_fairseq.analysis.events import Curve


class FigureSkippedError(Exception):
    """A figure cannot be drawn from the runs of the command line; the message says what is missing."""


@dataclass
class Settings:
    """The input of every figure.

    Attributes:
        fast: True for tiny sizes, to test the program.
        runs: the curves of each run, by the label of the run and the tag of the curve.
    """

    fast: bool = False
    runs: dict[str, dict[str, Curve]] = field(default_factory=dict)


class Panel(NamedTuple):
    """The title of one plot, and the labels (with units) and scales of its axes."""

    title: str
    x: str
    y: str
    x_scale: str = "linear"
    y_scale: str = "linear"


class Sheet:
    """A figure of panels, laid out row by row. `save` also writes what `line` and `steps` draw to a CSV file.

    Attributes:
        figure: the figure of matplotlib.
        axes: the axes of the panels; unused axes follow at the end and are invisible.
        notes: lines for the terminal.

    Args:
        panels: the panels.
        columns: panels per row, by default all of them.
        size: width and height of a panel in inches.
    """

    def __init__(self, panels: list[Panel], columns: int | None = None, size: tuple[float, float] = (4.8, 3.8)) -> None:
        columns = min(columns or len(panels), len(panels))
        rows = -(-len(panels) // columns)
        self.figure, axes = plt.subplots(
            rows, columns, squeeze=False, figsize=(size[0] * columns, size[1] * rows), constrained_layout=True
        )
        self.panels = panels
        self.axes = list(axes.flat)
        for axis in self.axes[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(self.axes, panels, strict=False):
            axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, xscale=panel.x_scale, yscale=panel.y_scale)
            axis.grid(True, which="major", alpha=0.3)
        self.rows: list[tuple] = []
        self.notes: list[str] = []

    def line(
        self, panel: int, label: str, x: Iterable[float], y: Iterable[float], style: str = "-", **options: Any
    ) -> None:
        """Draw and record a curve; `options` are those of matplotlib's plot."""
        x_values = [float(value) for value in x]
        y_values = [float(value) for value in y]
        self.axes[panel].plot(x_values, y_values, style, label=label, **{"markersize": 4, **options})
        self._record(panel, label, x_values, y_values)

    def steps(self, panel: int, label: str, edges: Iterable[float], heights: Iterable[float], **options: Any) -> None:
        """Draw a histogram and record the centers of its bins; `options` are those of matplotlib's stairs.

        There is one edge more than heights.
        """
        edge_values = [float(value) for value in edges]
        height_values = [float(value) for value in heights]
        self.axes[panel].stairs(height_values, edge_values, label=label, **options)
        centers = [(left + right) / 2 for left, right in itertools.pairwise(edge_values)]
        self._record(panel, label, centers, height_values)

    def legend(self, *panels: int, **options: Any) -> None:
        """Add a legend to these panels, or to all of them; `options` are those of matplotlib's legend."""
        for panel in panels or range(len(self.panels)):
            self.axes[panel].legend(**{"fontsize": 8, **options})

    def note(self, text: str) -> None:
        """Add a line for the terminal, which states a claim of the figure in numbers."""
        self.notes.append(text)

    def save(self, path: Path) -> None:
        """Replace the suffix of `path` by .png and .csv, write both files, and close the figure."""
        self.figure.savefig(path.with_suffix(".png"), dpi=120)
        plt.close(self.figure)
        with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["panel", "x_axis", "y_axis", "curve", "x", "y"])
            writer.writerows(self.rows)

    def _record(self, panel: int, label: str, x_values: list[float], y_values: list[float]) -> None:
        """Add the rows of a curve to the CSV; dollar signs of mathematical titles are removed."""
        title = self.panels[panel].title.replace("$", "")
        x_label = self.panels[panel].x.replace("$", "")
        y_label = self.panels[panel].y.replace("$", "")
        for x, y in zip(x_values, y_values, strict=True):
            self.rows.append((title, x_label, y_label, label, f"{x:.6g}", f"{y:.6g}"))
