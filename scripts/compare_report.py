"""Table, JSON and plot of scripts/compare_attentions.py, from what its runs wrote."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lln_fairseq.analysis.events import Curve, read_curves
from scripts.terminal import aligned


@dataclass
class Row:
    """One attention; a value for every seed that has come so far."""

    attention: str
    train: dict[int, Curve] = field(default_factory=dict)  # loss of pre-training in bits a masked token, by seed
    valid: dict[int, Curve] = field(default_factory=dict)
    scores: dict[str, dict[int, float]] = field(default_factory=dict)  # "sst2 valid": {seed: per cent}
    majority: dict[str, float] = field(default_factory=dict)  # what always guessing the same class would reach

    @property
    def last(self) -> list[float]:
        return [curve.values[-1] for curve in self.valid.values()]

    def above(self, other: "Row") -> list[float]:
        """How much higher its last valid loss is, by seed: with a seed both saw the same text in the same order.

        So this is seen where the seeds themselves lie further apart.
        """
        pairs = [(curve, other.valid[seed]) for seed, curve in self.valid.items() if seed in other.valid]
        return [ours.values[-1] - theirs.values[-1] for ours, theirs in pairs if ours.steps[-1] == theirs.steps[-1]]


def run_folder(out: Path, row: str, seed: int) -> Path:
    """Where a row's runs of one seed are: its name with nothing that Hydra or a shell takes for its own."""
    return out / re.sub(r"\W+", "-", row) / f"seed{seed}"


def read_rows(out: Path, attentions: Sequence[str], seeds: Sequence[int], metrics: dict[str, str]) -> list[Row]:
    """A row for every attention. `metrics`: the score that counts, by task."""
    rows = [Row(attention) for attention in attentions]
    for row in rows:
        for seed in seeds:
            folder = run_folder(out, row.attention, seed)
            curves = read_curves(folder / "tensorboard")
            for tag, curve_of in (("train_inner/loss", row.train), ("valid/loss", row.valid)):
                if tag in curves:
                    curve_of[seed] = curves[tag]
            for task, metric in metrics.items():
                for file in sorted((folder / "glue" / task).glob("*.json"), reverse=True):  # valid before test
                    score, column = json.loads(file.read_text()), f"{task} {file.stem}"
                    value = _score(score, metric)
                    row.scores.setdefault(column, {})[seed] = 100 * value
                    if metric == "accuracy":
                        row.majority[column] = 100 * score["majority"]
    return rows


def _score(score: dict, metric: str) -> float:
    """`pearson_spearman` is the mean of both, as fairseq names it."""
    return statistics.fmean(score[name] for name in metric.split("_"))


def cell(values: Sequence[float], form: str) -> str:
    """Median (lowest to highest), each in this form."""
    if not values:
        return "-"
    median, low, high = (f"{value:{form}}" for value in (statistics.median(values), min(values), max(values)))
    return median if len(values) == 1 else f"{median} ({low} to {high})"


def table(rows: Sequence[Row], seeds: Sequence[int]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row.scores))
    majority = {column: value for row in rows for column, value in row.majority.items()}
    heads = ["attention", "valid loss [bits]", f"above {rows[0].attention}", *(f"{x} [%]" for x in columns), "seeds"]
    lines = [heads]
    for row in rows:
        losses = [cell(row.last, ".2f"), cell(row.above(rows[0]), "+.3f") if row is not rows[0] else ""]
        scores = [cell(list(row.scores.get(column, {}).values()), ".1f") for column in columns]
        finished = sum(all(seed in row.scores.get(column, {}) for column in columns) for seed in row.valid)
        lines.append([row.attention, *losses, *scores, str(finished if columns else len(row.valid))])
    if majority:
        shown = [f"{majority[column]:.1f}" if column in majority else "-" for column in columns]
        lines.append(["(majority class)", "-", "", *shown, ""])
    over = f"median (lowest to highest) over the seeds {', '.join(map(str, seeds))}"
    note = f"{over}; valid loss: of pre-training, its last, and how much it is above the first row's of the same seed"
    return f"{aligned(lines)}\n{note}"


def draw(path: Path, rows: Sequence[Row]) -> Path:
    """Left the loss of pre-training by update, the mean and range over seeds; right the scores by task."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    columns = list(dict.fromkeys(column for row in rows for column in row.scores))
    for number, row in enumerate(rows):
        _loss(left, row, f"C{number}")
        for place, column in enumerate(columns):
            values = list(row.scores.get(column, {}).values())
            x = place + 0.7 * ((number + 0.5) / len(rows) - 0.5)
            if values:
                right.plot([x, x], [min(values), max(values)], color=f"C{number}", alpha=0.5, linewidth=4)
                right.plot(x, statistics.median(values), "D", color=f"C{number}", markersize=6)
                right.plot([x] * len(values), values, ".", color="black", markersize=4)
    for column, value in {column: v for row in rows for column, v in row.majority.items()}.items():
        place = columns.index(column)
        right.plot([place - 0.4, place + 0.4], [value, value], "--", color="grey", linewidth=1)
    left.set(xlabel="update", ylabel="loss [bits per masked token]",
             title="pre-training: train (thin) and valid (points), mean and range over seeds")  # fmt: skip
    left.legend()
    right.set(ylabel="score [%]", title="fine-tuning: median and range over seeds, dashed: majority class")
    right.set_xticks(range(len(columns)), columns)
    right.grid(True, axis="y", alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
    return path


def _loss(axes: plt.Axes, row: Row, color: str) -> None:
    for curves, style, label in ((row.train, "-", None), (row.valid, "o-", row.attention)):
        steps = sorted(set.intersection(*(set(curve.steps) for curve in curves.values()))) if curves else []
        if not steps:
            continue
        values = [[dict(zip(*curve, strict=True))[step] for curve in curves.values()] for step in steps]
        look: dict[str, Any] = {"linewidth": 1.8, "markersize": 4}
        if label is None:
            look = {"linewidth": 0.6, "alpha": 0.6}
        axes.plot(steps, list(map(statistics.fmean, values)), style, color=color, label=label, **look)
        axes.fill_between(steps, list(map(min, values)), list(map(max, values)), color=color, alpha=0.15, linewidth=0)
