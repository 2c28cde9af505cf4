"""Draw Figures 9 and 10 of the paper from the results of scripts.experiments.vit."""

from pathlib import Path
from typing import Any

from lln_fairseq.analysis.events import Curve
from scripts.figures.runs import ACCURACY, LOSS_SCALE, figure_9, figure_10
from scripts.figures.sheet import Settings


def draw_vit_figures(results: dict[str, list[dict[str, Any]]], out: Path) -> list[Path]:
    """Draw OUT/figure_9.png and OUT/figure_10.png with the runs of all attentions that have α and β.

    Args:
        results: for each attention, the results that `ViTRun.finish` returned, one for each seed.
        out: directory of the figures, which must exist.

    Returns:
        The paths of the two PNGs. The list is empty, and nothing is drawn, if no attention has α and β.
    """
    runs = {}
    for attention, results_of_attention in results.items():
        for number, result in enumerate(results_of_attention, start=1):
            if result["history"][0]["alpha_beta"]:
                runs[f"{attention}, run {number}"] = history_curves(result["history"])
    if not runs:
        return []
    paths = [out / "figure_9.png", out / "figure_10.png"]
    for figure, path in zip((figure_9, figure_10), paths, strict=True):
        figure(Settings(runs=runs)).save(path)
    return paths


def history_curves(history: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the history of a run as curves over epochs, by their tags.

    The tags are those of the curves that fairseq writes for TensorBoard.
    """
    epochs = list(range(len(history)))
    curves = {ACCURACY: Curve(epochs, [epoch["valid"] for epoch in history])}
    if history[0]["loss_scale"]:
        curves[LOSS_SCALE] = Curve(epochs, [1 / epoch["loss_scale"] for epoch in history])
    for layer in range(len(history[0]["alpha_beta"])):
        for place, name in enumerate(("alpha", "beta")):
            values = [epoch["alpha_beta"][layer][place] for epoch in history]
            curves[f"attention/{name}/layer_{layer:02d}"] = Curve(epochs, values)
    return curves
