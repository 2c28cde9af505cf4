"""Make the table and the plot of scripts/compare_attentions.py from the files that its runs wrote."""

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
class AttentionResults:
    """The results of one attention. Seeds without results are missing in the dicts.

    A column is a column of the table: a task and a split, such as "sst2 valid".

    Attributes:
        attention: the attention spec.
        train: the curve of the training loss in pre-training, in bits per masked token, by seed.
        valid: the curve of the validation loss in pre-training, in bits per masked token, by seed.
        scores: the fine-tuning scores in percent, by column and then by seed.
        majority: the accuracy in percent of always predicting the most frequent class, by column.
    """

    attention: str
    train: dict[int, Curve] = field(default_factory=dict)
    valid: dict[int, Curve] = field(default_factory=dict)
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    majority: dict[str, float] = field(default_factory=dict)

    @property
    def last_losses(self) -> list[float]:
        """The last validation loss of every seed."""
        return [curve.values[-1] for curve in self.valid.values()]

    def losses_above(self, baseline: "AttentionResults") -> list[float]:
        """Return how much higher the last validation loss is than the baseline's, for every seed that both have.

        Runs with the same seed see the same text in the same order. So these differences can show effects that are
        smaller than the differences between seeds. A seed is left out if the last validations of both runs were at
        different updates.
        """
        differences = []
        for seed, curve in self.valid.items():
            baseline_curve = baseline.valid.get(seed)
            if baseline_curve is not None and curve.steps[-1] == baseline_curve.steps[-1]:
                differences.append(curve.values[-1] - baseline_curve.values[-1])
        return differences


def run_directory(out: Path, attention: str, seed: int) -> Path:
    """Return OUT/ATTENTION/seedN, the directory of the runs with one attention and one seed.

    In ATTENTION, every sequence of other characters than letters, digits and underscores is replaced by one "-", since
    Hydra or a shell could interpret them.
    """
    return out / re.sub(r"\W+", "-", attention) / f"seed{seed}"


def read_results(
    out: Path, attentions: Sequence[str], seeds: Sequence[int], metrics: dict[str, str]
) -> list[AttentionResults]:
    """Read the results of a comparison. Return one entry for each attention, in order. Missing runs are left out.

    Args:
        out: the directory of the comparison.
        attentions: attention specs.
        seeds: the seeds to read.
        metrics: the metric to report for each task, such as "accuracy". If its name has underscores, the mean of
            several metrics is reported: "pearson_spearman" is the mean of "pearson" and "spearman".
    """
    results = []
    for attention in attentions:
        result = AttentionResults(attention)
        for seed in seeds:
            directory = run_directory(out, attention, seed)
            curves = read_curves(directory / "tensorboard")
            if "train_inner/loss" in curves:
                result.train[seed] = curves["train_inner/loss"]
            if "valid/loss" in curves:
                result.valid[seed] = curves["valid/loss"]
            for task, metric in metrics.items():
                for file in sorted((directory / "glue" / task).glob("*.json"), reverse=True):  # valid before test
                    score = json.loads(file.read_text())
                    column = f"{task} {file.stem}"
                    # fairseq's name pearson_spearman stands for the mean of both.
                    value = statistics.fmean(score[name] for name in metric.split("_"))
                    result.scores.setdefault(column, {})[seed] = 100 * value
                    if metric == "accuracy":
                        result.majority[column] = 100 * score["majority"]
        results.append(result)
    return results


def score_columns(results: Sequence[AttentionResults]) -> list[str]:
    """Return all columns that occur in the scores of any attention, in the order of their first occurrence."""
    columns: dict[str, None] = {}
    for result in results:
        columns.update(dict.fromkeys(result.scores))
    return list(columns)


def majority_accuracies(results: Sequence[AttentionResults]) -> dict[str, float]:
    """Return the accuracy in percent of always predicting the most frequent class, by column of the table.

    A column is a task and a split. Columns whose metric is not accuracy are left out.
    """
    majority: dict[str, float] = {}
    for result in results:
        majority |= result.majority
    return majority


def format_median_and_range(values: Sequence[float], format_spec: str) -> str:
    """Return "median (lowest to highest)". A single value is returned on its own, and no values give "-".

    `format_spec` is the format of each number, such as ".1f".
    """
    if not values:
        return "-"
    median = format(statistics.median(values), format_spec)
    if len(values) == 1:
        return median
    return f"{median} ({min(values):{format_spec}} to {max(values):{format_spec}})"


def comparison_table(results: Sequence[AttentionResults], seeds: Sequence[int]) -> str:
    """Return a table with a row per attention, followed by a line that explains it.

    Cells show the median and the range over the seeds. The column "above" shows how much higher the validation loss is
    than that of the first attention, the baseline. The last column is the number of seeds that have a validation loss
    and, if there are any scores, the score of every column.

    Args:
        results: the results of each attention, at least one.
        seeds: the seeds, for the line after the table.
    """
    baseline = results[0]
    columns = score_columns(results)
    titles = [f"{column} [%]" for column in columns]
    lines = [["attention", "valid loss [bits]", f"above {baseline.attention}", *titles, "seeds"]]
    for result in results:
        above = ""
        if result is not baseline:
            above = format_median_and_range(result.losses_above(baseline), "+.3f")
        scores = [format_median_and_range(list(result.scores.get(column, {}).values()), ".1f") for column in columns]
        finished_seeds = set(result.valid)
        for column in columns:
            finished_seeds &= set(result.scores.get(column, {}))
        loss = format_median_and_range(result.last_losses, ".2f")
        lines.append([result.attention, loss, above, *scores, str(len(finished_seeds))])
    majority = majority_accuracies(results)
    if majority:
        cells = []
        for column in columns:
            cells.append(f"{majority[column]:.1f}" if column in majority else "-")
        lines.append(["(majority class)", "-", "", *cells, ""])
    note = (
        f"median (lowest to highest) over the seeds {', '.join(map(str, seeds))}; valid loss: the last one of "
        f"pre-training; above {baseline.attention}: its difference from {baseline.attention} with the same seed"
    )
    return f"{aligned(lines)}\n{note}"


def plot_comparison(path: Path, results: Sequence[AttentionResults]) -> Path:
    """Write a PNG with the losses of pre-training by update and, if there are any, the scores. Return its path."""
    panels = 2 if score_columns(results) else 1
    figure, axes = plt.subplots(1, panels, figsize=(6.5 * panels, 5), constrained_layout=True, squeeze=False)
    loss_axes = axes[0, 0]
    for number, result in enumerate(results):
        _plot_losses(loss_axes, result, color=f"C{number}")
    loss_axes.set(
        xlabel="update",
        ylabel="loss [bits per masked token]",
        title="loss in training (thin) and validation (points), range over seeds",
    )
    loss_axes.legend()
    if panels == 2:
        _plot_scores(axes[0, 1], results)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
    return path


def _plot_losses(axes: plt.Axes, result: AttentionResults, color: str) -> None:
    """Plot the training and the validation loss of one attention at the updates that were logged for all seeds."""
    thin: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.6}
    thick: dict[str, Any] = {"linewidth": 1.8, "markersize": 4}
    for curves, style, label, line_options in (
        (result.train, "-", None, thin),
        (result.valid, "o-", result.attention, thick),
    ):
        losses_by_seed = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves.values()]
        if not losses_by_seed:
            continue
        steps = sorted(set.intersection(*map(set, losses_by_seed)))
        if not steps:
            continue
        means = []
        lowest = []
        highest = []
        for step in steps:
            values = [losses[step] for losses in losses_by_seed]
            means.append(statistics.fmean(values))
            lowest.append(min(values))
            highest.append(max(values))
        axes.plot(steps, means, style, color=color, label=label, **line_options)
        axes.fill_between(steps, lowest, highest, color=color, alpha=0.15, linewidth=0)


def _plot_scores(axes: plt.Axes, results: Sequence[AttentionResults]) -> None:
    """Plot the median and the range of the scores by column.

    A dashed line shows the accuracy of always predicting the most frequent class.
    """
    columns = score_columns(results)
    for number, result in enumerate(results):
        color = f"C{number}"
        for place, column in enumerate(columns):
            values = list(result.scores.get(column, {}).values())
            if values:
                x = place + 0.7 * ((number + 0.5) / len(results) - 0.5)
                axes.plot([x, x], [min(values), max(values)], color=color, alpha=0.5, linewidth=4)
                axes.plot(x, statistics.median(values), "D", color=color, markersize=6)
                axes.plot([x] * len(values), values, ".", color="black", markersize=4)
    for column, accuracy in majority_accuracies(results).items():
        place = columns.index(column)
        axes.plot([place - 0.4, place + 0.4], [accuracy, accuracy], "--", color="gray", linewidth=1)
    axes.set(ylabel="score [%]", title="fine-tuning: median and range over seeds, dashed: majority class")
    axes.set_xticks(range(len(columns)), columns)
    axes.grid(True, axis="y", alpha=0.3)
