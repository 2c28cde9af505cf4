"""Figures 9 and 10 of the paper, from the results of scripts.experiments.vit."""

from pathlib import Path
from typing import Any

from lln_fairseq.analysis.events import Curve
from scripts.figures.runs import ACCURACY, LOSS_SCALE, figure_9, figure_10
from scripts.figures.sheet import Settings


def draw(results: dict[str, list[dict[str, Any]]], out: Path) -> list[Path]:
    """Draw both figures of the rows that have α and β. `results`: those of a row, one a seed."""
    runs = {}
    for attention, found in results.items():
        for seed, result in enumerate(found, start=1):
            if result["history"][0]["alpha_beta"]:
                runs[f"{attention}, run {seed}"] = curves(result["history"])
    if not runs:
        return []
    paths = [out / "figure_9.png", out / "figure_10.png"]
    for figure, path in zip((figure_9, figure_10), paths, strict=True):
        figure(Settings(runs=runs)).save(path)
    return paths


def curves(history: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return what a training of fairseq would have written for TensorBoard, by epoch."""
    epochs = list(range(len(history)))
    found = {ACCURACY: Curve(epochs, [epoch["valid"] for epoch in history])}
    if history[0]["loss_scale"]:
        found[LOSS_SCALE] = Curve(epochs, [1 / epoch["loss_scale"] for epoch in history])
    for layer in range(len(history[0]["alpha_beta"])):
        for place, name in enumerate(("alpha", "beta")):
            values = [epoch["alpha_beta"][layer][place] for epoch in history]
            found[f"attention/{name}/layer_{layer:02d}"] = Curve(epochs, values)
    return found
