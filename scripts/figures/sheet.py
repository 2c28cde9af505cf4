"""A figure that remembers the numbers it shows."""

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


class Skipped(Exception):
    """A figure cannot be drawn from what was given; the message says what is missing."""


@dataclass
class Settings:
    """What every figure is drawn from: sizes for a trial or for real, and runs by label, {label: {tag: Curve}}."""

    fast: bool = False
    runs: dict[str, dict[str, Curve]] = field(default_factory=dict)


class Panel(NamedTuple):
    """Title and axes (with units) of one plot."""

    title: str
    x: str
    y: str
    x_scale: str = "linear"
    y_scale: str = "linear"


class Sheet:
    """Panels side by side. What `line` and `bars` draw also becomes rows of the CSV: panel, axes, curve, x, y."""

    def __init__(self, panels: list[Panel], columns: int | None = None, size: tuple[float, float] = (4.8, 3.8)) -> None:
        columns = min(columns or len(panels), len(panels))
        rows = -(-len(panels) // columns)
        self.figure, axes = plt.subplots(
            rows, columns, squeeze=False, figsize=(size[0] * columns, size[1] * rows), constrained_layout=True
        )
        self.panels, self.axes = panels, list(axes.flat)
        for axis in self.axes[len(panels) :]:
            axis.set_visible(False)
        for axis, panel in zip(self.axes, panels, strict=False):
            axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, xscale=panel.x_scale, yscale=panel.y_scale)
            axis.grid(True, which="major", alpha=0.3)
        self.rows: list[tuple] = []
        self.notes: list[str] = []

    def line(
        self, panel: int, label: str, x: Iterable[float], y: Iterable[float], style: str = "-", **how: Any
    ) -> None:
        x, y = [float(value) for value in x], [float(value) for value in y]
        self.axes[panel].plot(x, y, style, label=label, **{"markersize": 4, **how})
        self._record(panel, label, x, y)

    def steps(self, panel: int, label: str, edges: Iterable[float], heights: Iterable[float], **how: Any) -> None:
        """A histogram, recorded by the centres of its bins."""
        edges, heights = [float(value) for value in edges], [float(value) for value in heights]
        self.axes[panel].stairs(heights, edges, label=label, **how)
        self._record(panel, label, [(a + b) / 2 for a, b in itertools.pairwise(edges)], heights)

    def legend(self, *panels: int, **how: Any) -> None:
        for panel in panels or range(len(self.panels)):
            self.axes[panel].legend(**{"fontsize": 8, **how})

    def note(self, text: str) -> None:
        """A line for the terminal: the figure's claim in numbers."""
        self.notes.append(text)

    def save(self, path: Path) -> None:
        """path.png and path.csv."""
        self.figure.savefig(path.with_suffix(".png"), dpi=120)
        plt.close(self.figure)
        with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["panel", "x_axis", "y_axis", "curve", "x", "y"])
            writer.writerows(self.rows)

    def _record(self, panel: int, label: str, x: list[float], y: list[float]) -> None:
        title, x_name, y_name = (text.replace("$", "") for text in self.panels[panel][:3])
        self.rows += [(title, x_name, y_name, label, *(f"{v:.6g}" for v in pair)) for pair in zip(x, y, strict=True)]
