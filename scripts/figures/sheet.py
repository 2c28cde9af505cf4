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
    """A figure cannot be drawn from the runs of the command line. The message says what is missing."""


@dataclass
class Settings:
    """The input of every figure.

    Attributes:
        fast: True draws figures of tiny simulations, to test the program.
        runs: the curves of each run, by the label of the run and then by the tag of the curve.
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
    """A Matplotlib figure with several panels, which are numbered from 0, row by row.

    `line` and `steps` draw data into a panel and also record the data for a CSV file. `save` writes both files.

    Attributes:
        figure: the Matplotlib figure.
        axes: the Matplotlib axes of the panels. If the last row is not full, invisible axes follow.
        notes: lines that the program prints after the figure is saved.

    Args:
        panels: titles, labels and scales of the panels.
        columns: number of panels per row; None puts all panels into one row.
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
        """Draw and record a curve. `style` and `options` are arguments of Matplotlib's `plot`."""
        x_values = [float(value) for value in x]
        y_values = [float(value) for value in y]
        self.axes[panel].plot(x_values, y_values, style, label=label, **{"markersize": 4, **options})
        self._record(panel, label, x_values, y_values)

    def steps(self, panel: int, label: str, edges: Iterable[float], heights: Iterable[float], **options: Any) -> None:
        """Draw a histogram, and record the centers and heights of its bins.

        Args:
            panel: number of the panel.
            label: label of the histogram in the legend.
            edges: the edges of the bins, one more than `heights`.
            heights: the heights of the bins.
            **options: arguments of Matplotlib's `stairs`.
        """
        edge_values = [float(value) for value in edges]
        height_values = [float(value) for value in heights]
        self.axes[panel].stairs(height_values, edge_values, label=label, **options)
        centers = [(left + right) / 2 for left, right in itertools.pairwise(edge_values)]
        self._record(panel, label, centers, height_values)

    def legend(self, *panels: int, **options: Any) -> None:
        """Add a legend to each of the panels with these numbers. Without numbers, add one to every panel.

        `options` are arguments of Matplotlib's `legend`.
        """
        for panel in panels or range(len(self.panels)):
            self.axes[panel].legend(**{"fontsize": 8, **options})

    def note(self, text: str) -> None:
        """Add a line to `notes`. It states in numbers what the figure shows."""
        self.notes.append(text)

    def save(self, path: Path) -> None:
        """Write the figure and its data, and close the figure. The suffix of `path` is replaced by .png and by .csv."""
        self.figure.savefig(path.with_suffix(".png"), dpi=120)
        plt.close(self.figure)
        with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["panel", "x_axis", "y_axis", "curve", "x", "y"])
            writer.writerows(self.rows)

    def _record(self, panel: int, label: str, x_values: list[float], y_values: list[float]) -> None:
        """Add the points of a curve to the rows of the CSV file. Dollar signs are removed from titles and labels."""
        title = self.panels[panel].title.replace("$", "")
        x_label = self.panels[panel].x.replace("$", "")
        y_label = self.panels[panel].y.replace("$", "")
        for x, y in zip(x_values, y_values, strict=True):
            self.rows.append((title, x_label, y_label, label, f"{x:.6g}", f"{y:.6g}"))
