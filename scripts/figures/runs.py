"""Figures 1, 8, 9 and 10: what runs wrote for TensorBoard."""

from collections.abc import Callable

import matplotlib

from lln_fairseq.analysis.events import Curve
from scripts.figures.sheet import Panel, Settings, Sheet, Skipped

ACCURACY = "valid/accuracy"
LOSS_SCALE = "train_inner/inverse_loss_scale"


def figure_1(settings: Settings) -> Sheet:
    """Temperature, entropy and spectral gap by update, a row for each run, a curve for each layer."""
    columns = (
        ("probe/tau_sm", "temperature $τ = 1/(σ_q σ_k)$", "log"),
        ("probe/entropy", "entropy of a row [bits]", "linear"),
        ("probe/spectral_gap", "spectral gap $1 - |λ_2|$", "linear"),
    )
    return _by_layer(settings, columns, "the probe's scalars (train with --probe-interval)")


def figure_9(settings: Settings) -> Sheet:
    """α and β by update, a row for each run, a curve for each layer."""
    return _by_layer(
        settings, (("attention/alpha", "α", "linear"), ("attention/beta", "β", "linear")), "α and β (LLN attention)"
    )


def figure_8(settings: Settings) -> Sheet:
    """Training and validation loss, and the inverse of fp16's loss scale."""
    runs = _having(settings, lambda curves: "train_inner/loss" in curves or "valid/loss" in curves, "a loss")
    scaled = {label: curves[LOSS_SCALE] for label, curves in runs.items() if LOSS_SCALE in curves}
    panels = [Panel("(a) loss", "update", "loss [bits per target]")]
    if scaled:
        panels.append(Panel("(b) stability in fp16", "update", "inverse loss scale", y_scale="log"))
    sheet = Sheet(panels, size=(6.0, 4.2))
    for number, (label, curves) in enumerate(runs.items()):
        for tag, kind, style in (("train_inner/loss", "train", "-"), ("valid/loss", "valid", "o--")):
            if tag in curves:
                sheet.line(0, f"{label}, {kind}", *curves[tag], style, color=f"C{number}")
                sheet.note(f"{label}: last {kind} loss {curves[tag].values[-1]:.3f} at {curves[tag].steps[-1]}")
        if label in scaled:
            sheet.line(1, label, *scaled[label], color=f"C{number}", drawstyle="steps-post")
            sheet.note(f"{label}: largest inverse loss scale {max(scaled[label].values):g}")
    if not scaled:
        sheet.note("(b) left out: no run has fp16's loss scale")
    sheet.legend()
    return sheet


def figure_10(settings: Settings) -> Sheet:
    """Accuracy by α (mean over layers and updates: the fixed value, or what matching gave), and inverse loss scale."""
    runs = _having(settings, lambda curves: _layers(curves, "attention/alpha") and {ACCURACY, LOSS_SCALE} & curves.keys(),
                   "α together with an accuracy on valid or fp16's loss scale")  # fmt: skip
    scored = {label: curves[ACCURACY] for label, curves in runs.items() if ACCURACY in curves}
    scaled = {label: curves[LOSS_SCALE] for label, curves in runs.items() if LOSS_SCALE in curves}
    panels = [Panel("(a) accuracy by α", "α, mean over layers", "best accuracy on valid [%]")] if scored else []
    panels += [Panel("(b) stability in fp16", "update", "inverse loss scale", y_scale="log")] if scaled else []
    sheet = Sheet(panels, size=(6.0, 4.2))
    for number, (label, accuracy) in enumerate(scored.items()):
        values = [value for curve in _layers(runs[label], "attention/alpha").values() for value in curve.values]
        mean, best = sum(values) / len(values), max(accuracy.values)
        sheet.line(0, label, [mean], [best], "o", color=f"C{number}", markersize=8)
        sheet.axes[0].hlines(best, min(values), max(values), color=f"C{number}", alpha=0.5)
        sheet.note(f"{label}: α {mean:.2f} ({min(values):.2f} to {max(values):.2f}), accuracy {best:.2f} %")
    for number, (label, curve) in enumerate(scaled.items()):
        sheet.line(len(panels) - 1, label, *curve, color=f"C{number}", drawstyle="steps-post")
        sheet.note(f"{label}: largest inverse loss scale {max(curve.values):g}")
    sheet.legend()
    return sheet


def _by_layer(settings: Settings, columns: tuple[tuple[str, str, str], ...], what: str) -> Sheet:
    runs = _having(settings, lambda curves: all(_layers(curves, name) for name, *_ in columns), what)
    panels = [Panel(label, "update", axis, y_scale=scale) for label in runs for _, axis, scale in columns]
    sheet = Sheet(panels, columns=len(columns))
    for row, (label, curves) in enumerate(runs.items()):
        for column, (name, *_) in enumerate(columns):
            layers = _layers(curves, name)
            colours = matplotlib.colormaps["viridis"].resampled(max(len(layers), 2))
            for number, curve in layers.items():
                colour = colours(list(layers).index(number))
                sheet.line(row * len(columns) + column, f"layer {number}", *curve, color=colour)
            first, last = (sum(c.values[i] for c in layers.values()) / len(layers) for i in (0, -1))
            sheet.note(f"{label}: {name}, mean over layers, {first:.3f} at first, {last:.3f} at last")
        sheet.legend((row + 1) * len(columns) - 1, ncol=1 if len(layers) <= 6 else 2)
    return sheet


def _layers(curves: dict[str, Curve], name: str) -> dict[int, Curve]:
    """{layer: Curve} of the tags NAME/layer_NN."""
    prefix = f"{name}/layer_"
    return {int(tag.removeprefix(prefix)): curves[tag] for tag in sorted(curves) if tag.startswith(prefix)}


def _having(
    settings: Settings, condition: Callable[[dict[str, Curve]], object], what: str
) -> dict[str, dict[str, Curve]]:
    """The runs for which the condition holds; raises Skipped if there is none."""
    if not settings.runs:
        raise Skipped("no runs given (--run LABEL=DIR)")
    runs = {label: curves for label, curves in settings.runs.items() if condition(curves)}
    if not runs:
        raise Skipped(f"none of the runs {', '.join(settings.runs)} has {what}")
    return runs
