"""Figures 9 and 10 of the paper, from the results of scripts.experiments.vit."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

from scripts.figures.sheet import Panel, Sheet

Results = list[dict[str, Any]]  # one a seed


def while_training(matched: Results, path: Path) -> str:
    """Figure 9: α and β of every layer by epoch, means over the pictures, the heads and the seeds."""
    sheet = Sheet([Panel(f"({letter}) {name}", "epoch", name) for letter, name in (("a", "α"), ("b", "β"))])
    history = [[epoch["alpha_beta"] for epoch in run["history"]] for run in matched]
    layers = len(history[0][0])
    for panel in range(2):
        for layer in range(layers):
            by_epoch = [fmean(run[epoch][layer][panel] for run in history) for epoch in range(len(history[0]))]
            # The light end of the colour map is hard to see on white.
            colour = matplotlib.colormaps["viridis"](0.85 * layer / max(layers - 1, 1))
            sheet.line(panel, f"layer {layer}", range(len(by_epoch)), by_epoch, color=colour)
        if panel:
            sheet.axes[panel].sharey(sheet.axes[0])
        sheet.axes[panel].xaxis.get_major_locator().set_params(integer=True)
    sheet.legend(1, ncol=1 if layers <= 6 else 2)
    sheet.save(path)
    values = [value for run in history for epoch in run[1:] for pair in epoch for value in pair]
    return f"{path}.png: α, β while training between {min(values):.2f} and {max(values):.2f}"


def concentration(
    by_value: Mapping[float, Results], matched: Results | None, softmax: Results | None, path: Path
) -> str:
    """Draw Figure 10: test accuracy by fixed α = β, compared with matched α, β and softmax; the inverse loss scale."""
    scaled = [run["history"][0]["loss_scale"] is not None for found in by_value.values() for run in found]
    panels = [Panel("(a) accuracy", "fixed α = β", "accuracy on test [%]")]
    panels += [Panel("(b) stability in fp16", "epoch", "inverse loss scale", y_scale="log")] if all(scaled) else []
    sheet = Sheet(panels, size=(5.6, 3.8))
    values = sorted(by_value)
    sheet.line(0, "mean over seeds", values, [fmean(_tests(by_value[value])) for value in values], "-", color="C0")
    dots = [(value, test) for value in values for test in _tests(by_value[value])]
    sheet.line(0, "one seed", [x for x, _ in dots], [y for _, y in dots], "o", color="C0", alpha=0.5)
    for label, results, style in (("matched", matched, "C1-"), ("softmax", softmax, "k:")):
        if results:
            level = fmean(_tests(results))
            sheet.line(0, f"{label}, mean", [values[0], values[-1]], [level] * 2, style)
    if len(panels) > 1:
        for value in values:
            sheet.line(1, f"{value:g}", *_inverse_scales(by_value[value]), drawstyle="steps-post")
        if matched:
            sheet.line(1, "matched", *_inverse_scales(matched), color="black", drawstyle="steps-post")
        sheet.axes[1].xaxis.get_major_locator().set_params(integer=True)
    sheet.axes[0].set_xscale("log")
    sheet.axes[0].set_xticks(values, [f"{value:g}" for value in values])
    sheet.axes[0].minorticks_off()
    sheet.legend()
    sheet.save(path)
    without = "" if len(panels) > 1 else "; the inverse loss scale needs --fp16, on a GPU"
    return f"{path}.png: accuracy by fixed α = β{without}"


def _tests(results: Results) -> list[float]:
    return [run["test"] for run in results]


def _inverse_scales(results: Results) -> tuple[range, list[float]]:
    """By epoch, the largest of the seeds."""
    histories = [[1 / epoch["loss_scale"] for epoch in run["history"]] for run in results]
    largest = [max(values) for values in zip(*histories, strict=True)]
    return range(len(largest)), largest
