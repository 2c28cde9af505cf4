"""Draw figures with several panels and record their numbers. Here are the figures that are drawn from training runs.

Figures 1, 8, 9 and 10 of the paper are drawn from TensorBoard's curves. Runs without the curves that a figure needs are
left out. If no run is left, the figure raises FigureSkippedError.
"""

import csv
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lln_fairseq.analysis.events import Curve

ACCURACY = "valid/accuracy"
LOSS_SCALE = "train_inner/inverse_loss_scale"
BESIDE_THE_PANEL = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # options of a legend that would cover curves

Curves = dict[str, Curve]  # the curves of one run by their tags


class FigureSkippedError(Exception):
    """A figure cannot be drawn from the given runs. The message says what is missing."""


@dataclass
class Settings:
    """The input of every figure."""

    fast: bool = False  # True draws figures of tiny simulations, to test the program
    runs: dict[str, Curves] = field(default_factory=dict)  # by the label of the run


class Panel(NamedTuple):
    """The title of one plot, which may be empty, and the labels (with units) and scales of its axes."""

    title: str
    x: str
    y: str
    x_scale: str = "linear"
    y_scale: str = "linear"


class Sheet:
    """A Matplotlib figure with several panels, which are numbered from 0, row by row.

    `line` and `steps` draw data into a panel and also record the data for a CSV file. `save` writes both files.

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
        self.notes: list[str] = []  # printed after the figure is saved

    def line(
        self, panel: int, label: str, x: Iterable[float], y: Iterable[float], style: str = "-", **options: Any
    ) -> None:
        """Draw and record a curve. `style` and `options` are arguments of Matplotlib's `plot`."""
        x_values = [float(value) for value in x]
        y_values = [float(value) for value in y]
        self.axes[panel].plot(x_values, y_values, style, label=label, **{"markersize": 4, **options})
        self._record(panel, label, x_values, y_values)

    def steps(self, panel: int, label: str, edges: Iterable[float], heights: Iterable[float], **options: Any) -> None:
        """Draw a histogram, and record the centers and heights of its bins. `options` are for Matplotlib's `stairs`."""
        edge_values = [float(value) for value in edges]
        height_values = [float(value) for value in heights]
        self.axes[panel].stairs(height_values, edge_values, label=label, **options)
        centers = [(left + right) / 2 for left, right in itertools.pairwise(edge_values)]
        self._record(panel, label, centers, height_values)

    def legend(self, *panels: int, **options: Any) -> None:
        """Add a legend to each of the panels with these numbers, or to all. `options` are for Matplotlib's `legend`."""
        for panel in panels or range(len(self.panels)):
            self.axes[panel].legend(**{"fontsize": 8, **options})

    def note(self, text: str) -> None:
        """Add a line that states in numbers what the figure shows. It is not drawn: `draw_figures` prints it."""
        self.notes.append(text)

    def save(self, path: Path) -> None:
        """Write the figure to `path` with the suffix .png and its data with .csv, and close the figure."""
        for axes in self.axes:
            label_logarithmic_axes(axes)
        self.figure.savefig(path.with_suffix(".png"), dpi=120)
        plt.close(self.figure)
        with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["panel", "x_axis", "y_axis", "curve", "x", "y"])
            writer.writerows(self.rows)

    def _record(self, panel: int, label: str, x_values: list[float], y_values: list[float]) -> None:
        x_label = self.panels[panel].x.replace("$", "")
        title = self.panels[panel].title.replace("$", "") or x_label
        y_label = self.panels[panel].y.replace("$", "")
        for x, y in zip(x_values, y_values, strict=True):
            self.rows.append((title, x_label, y_label, label, f"{x:.6g}", f"{y:.6g}"))


def label_logarithmic_axes(axes: Axes) -> None:
    """Label the logarithmic axes of a finished plot with plain numbers, at powers of ten.

    An axis of less than two decades also has labels at 2 and 5 times the powers. Matplotlib's labels of a short axis,
    such as 3 x 10⁻¹ and 4 x 10⁻¹, overlap.
    """
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())


class LayerScalar(NamedTuple):
    """A scalar that is logged for every layer, and its axis."""

    name: str  # the TensorBoard tag without the layer, such as "attention/alpha"
    y: str
    y_scale: str = "linear"


def figure_1(settings: Settings) -> Sheet:
    """Draw temperature, entropy and spectral gap by update, with a row of panels per run and a curve per layer."""
    scalars = (
        LayerScalar("probe/tau_sm", "temperature $τ = 1/(σ_q σ_k)$", "log"),
        LayerScalar("probe/entropy", "entropy of a row [bits]"),
        LayerScalar("probe/spectral_gap", "spectral gap $1 - |λ_2|$"),
    )
    return _draw_layer_scalars(settings, scalars, "the probe's scalars (train with --probe-interval)")


def figure_9(settings: Settings) -> Sheet:
    """Draw α and β by update, with a row of panels per run and a curve per layer."""
    scalars = (LayerScalar("attention/alpha", "α"), LayerScalar("attention/beta", "β"))
    return _draw_layer_scalars(settings, scalars, "α and β (LLN attention)")


def figure_8(settings: Settings) -> Sheet:
    """Draw the training and validation losses and, if any run used fp16, the inverse of the loss scale."""

    def has_loss(curves: Curves) -> bool:
        return "train_inner/loss" in curves or "valid/loss" in curves

    runs = _select_runs(settings, has_loss, "a loss")
    has_loss_scale = any(LOSS_SCALE in curves for curves in runs.values())
    panels = [Panel("(a) loss", "update", "loss [bits per target]")]
    if has_loss_scale:
        panels.append(Panel("(b) stability in fp16", "update", "inverse loss scale", y_scale="log"))
    sheet = Sheet(panels, size=(6.0, 4.2))
    for number, (label, curves) in enumerate(runs.items()):
        for tag, kind, style in (("train_inner/loss", "train", "-"), ("valid/loss", "valid", "o--")):
            if tag in curves:
                curve = curves[tag]
                sheet.line(0, f"{label}, {kind}", curve.steps, curve.values, style, color=f"C{number}")
                sheet.note(f"{label}: last {kind} loss {curve.values[-1]:.3f} at update {curve.steps[-1]}")
        if LOSS_SCALE in curves:
            _draw_loss_scale(sheet, 1, label, curves[LOSS_SCALE], color=f"C{number}")
    if not has_loss_scale:
        sheet.note("(b) left out: no run has fp16's loss scale")
    sheet.legend()
    return sheet


def figure_10(settings: Settings) -> Sheet:
    """Draw the best accuracy of each run against its α, and the inverse of the loss scale of fp16 runs.

    A panel without data is left out. The α of a run is the mean over its layers and updates; a line shows the range.
    """

    def has_alpha_and_result(curves: Curves) -> bool:
        return bool(_layer_curves(curves, "attention/alpha")) and (ACCURACY in curves or LOSS_SCALE in curves)

    runs = _select_runs(
        settings,
        has_alpha_and_result,
        "α together with an accuracy on valid (a sentence classification) or fp16's loss scale",
    )
    accuracies = {label: curves[ACCURACY] for label, curves in runs.items() if ACCURACY in curves}
    loss_scales = {label: curves[LOSS_SCALE] for label, curves in runs.items() if LOSS_SCALE in curves}
    panels = []
    if accuracies:
        panels.append(Panel("(a) accuracy by α", "α, mean over layers", "best accuracy on valid [%]"))
    if loss_scales:
        panels.append(Panel("(b) stability in fp16", "update", "inverse loss scale", y_scale="log"))
    sheet = Sheet(panels, size=(6.0, 4.2))
    for number, (label, accuracy) in enumerate(accuracies.items()):
        alphas: list[float] = []
        for curve in _layer_curves(runs[label], "attention/alpha").values():
            alphas += curve.values
        mean = sum(alphas) / len(alphas)
        best = max(accuracy.values)
        sheet.line(0, label, [mean], [best], "o", color=f"C{number}", markersize=8)
        sheet.axes[0].hlines(best, min(alphas), max(alphas), color=f"C{number}", alpha=0.5)
        sheet.note(f"{label}: α {mean:.2f} ({min(alphas):.2f} to {max(alphas):.2f}), accuracy {best:.2f} %")
    for number, (label, curve) in enumerate(loss_scales.items()):
        _draw_loss_scale(sheet, len(panels) - 1, label, curve, color=f"C{number}")
    sheet.legend()
    if accuracies:
        sheet.legend(0, **BESIDE_THE_PANEL)
    return sheet


def _draw_loss_scale(sheet: Sheet, panel: int, label: str, curve: Curve, color: str) -> None:
    sheet.line(panel, label, curve.steps, curve.values, color=color, drawstyle="steps-post")
    sheet.note(f"{label}: largest inverse loss scale {max(curve.values):g}")


def _draw_layer_scalars(settings: Settings, scalars: Sequence[LayerScalar], description: str) -> Sheet:
    """Draw scalars by update, with a row of panels per run, a column per scalar and a curve per layer."""

    def has_scalars(curves: Curves) -> bool:
        return all(_layer_curves(curves, scalar.name) for scalar in scalars)

    runs = _select_runs(settings, has_scalars, description)
    panels = []
    for label in runs:
        for scalar in scalars:
            panels.append(Panel(label, "update", scalar.y, y_scale=scalar.y_scale))
    sheet = Sheet(panels, columns=len(scalars))
    for row, (label, curves) in enumerate(runs.items()):
        for column, scalar in enumerate(scalars):
            panel = row * len(scalars) + column
            layers = _layer_curves(curves, scalar.name)
            if row:
                sheet.axes[panel].sharey(sheet.axes[column])
            for layer, curve in layers.items():
                # The light end of the color map is hard to see on white.
                color = matplotlib.colormaps["viridis"](0.85 * layer / max(*layers, 1))
                sheet.line(panel, f"layer {layer}", curve.steps, curve.values, color=color)
            first = sum(curve.values[0] for curve in layers.values()) / len(layers)
            last = sum(curve.values[-1] for curve in layers.values()) / len(layers)
            sheet.note(f"{label}: {scalar.name}, mean over layers: first {first:.3f}, last {last:.3f}")
        legend_columns = 1 if len(layers) <= 12 else 2
        sheet.legend((row + 1) * len(scalars) - 1, ncol=legend_columns, **BESIDE_THE_PANEL)
    return sheet


def _layer_curves(curves: Curves, name: str) -> dict[int, Curve]:
    """Return the curves whose tags are NAME/layer_NN, by the number of the layer, in ascending order."""
    prefix = f"{name}/layer_"
    return {int(tag.removeprefix(prefix)): curves[tag] for tag in sorted(curves) if tag.startswith(prefix)}


def _select_runs(settings: Settings, condition: Callable[[Curves], bool], description: str) -> dict[str, Curves]:
    """Return the runs whose curves satisfy a condition, or raise FigureSkippedError with its `description` in words."""
    if not settings.runs:
        raise FigureSkippedError("no runs given (--run LABEL=DIR)")
    runs = {label: curves for label, curves in settings.runs.items() if condition(curves)}
    if not runs:
        raise FigureSkippedError(f"none of the runs {', '.join(settings.runs)} has {description}")
    return runs
