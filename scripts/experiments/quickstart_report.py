"""The quickstart's table and picture, from what its runs wrote for TensorBoard."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lln_fairseq.analysis.events import Curve, read_curves
from scripts.columns import aligned


def table(out: Path, scores: dict[str, dict], pretrained: dict[str, str | None], times: dict[str, float]) -> str:
    """Format a column for each variant; `pretrained` has the attention it was pre-trained with, or None."""
    columns = list(scores)
    valid = {name: _pretraining(out, attention).get("valid/loss") for name, attention in pretrained.items()}

    def loss(name: str, index: int) -> str:
        curve = valid[name]
        return "-" if curve is None else f"{curve.values[index]:.2f}"

    rows = {
        "pre-training valid loss, first [bits]": [loss(name, 0) for name in columns],
        "pre-training valid loss, last [bits]": [loss(name, -1) for name in columns],
    }
    for split, label in (("valid", "dev"), ("test", "test")):
        rows[f"accuracy on {label} [%]"] = [f"{100 * scores[name][split]['accuracy']:.1f}" for name in columns]
        rows[f"majority class of {label} [%]"] = [f"{100 * scores[name][split]['majority']:.1f}" for name in columns]
    shown = aligned([["", *columns], *([label, *cells] for label, cells in rows.items())])
    seconds = {**times, "sum": sum(times.values())}
    steps = aligned([("wall time", "[s]"), *((name, f"{value:.0f}") for name, value in seconds.items())])
    return f"{shown}\n\n{steps}"


def draw(out: Path, pretrained: dict[str, str | None]) -> Path:
    """Loss curves of pre-training and fine-tuning, and the inverse loss scale of fp16 runs, as a PNG."""
    pretraining = {attention: _pretraining(out, attention) for attention in pretrained.values() if attention}
    finetuning = {name: read_curves(out / f"finetune_{name}" / "tensorboard") for name in pretrained}
    scales = {name: curves["train_inner/loss_scale"] for name, curves in pretraining.items() if _fp16(curves)}

    figure, axes = plt.subplots(1, 3 if scales else 2, figsize=(15 if scales else 10, 4), constrained_layout=True)
    _losses(axes[0], pretraining, "pre-training", "loss [bits per masked token]")
    _losses(axes[1], finetuning, "fine-tuning", "loss [bits per sentence]")
    for name, scale in scales.items():
        axes[2].semilogy(scale.steps, [1 / value for value in scale.values], label=name)
    if scales:
        axes[2].set(title="fp16 stability", xlabel="update", ylabel="inverse loss scale")
        axes[2].legend()
    path = out / "curves.png"
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
    return path


def _losses(axes: plt.Axes, runs: dict[str, dict[str, Curve]], title: str, label: str) -> None:
    for number, (name, curves) in enumerate(runs.items()):
        for tag, style in (("train_inner/loss", "-"), ("valid/loss", "o--")):
            if tag in curves:
                kind = "train" if tag.startswith("train") else "valid"
                axes.plot(*curves[tag], style, color=f"C{number}", markersize=4, label=f"{name}, {kind}")
    axes.set(title=title, xlabel="update", ylabel=label)
    axes.legend()


def _pretraining(out: Path, attention: str | None) -> dict[str, Curve]:
    return read_curves(out / f"pretrain_{attention}" / "tensorboard") if attention else {}


def _fp16(curves: dict[str, Curve]) -> bool:
    return "train_inner/loss_scale" in curves
