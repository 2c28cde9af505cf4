"""Measure a model layer by layer over several batches, and print the results as tables or draw them as a figure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln_fairseq.analysis import layer_scalars, measure
from lln_fairseq.analysis.lognormal import NormalFit, normality
from lln_fairseq.analysis.probe import Layer, ablated, record_layers
from lln_fairseq.analysis.rank_collapse import numerical_rank, relative_residual

# The variants of the model in the measurements by depth: with or without skip connections, with or without MLPs.
VARIANTS = {
    "model": (True, True),
    "no skip": (False, True),
    "no MLP": (True, False),
    "neither": (False, False),
}


class Column(NamedTuple):
    """A column of a table: the name of a measure, the heading, and the format of the numbers (a format spec)."""

    measure: str
    heading: str
    form: str = ".3f"


TABLES = {
    "concentration": (
        Column("tau_sm", "τ_sm"),
        Column("tau_lln", "τ_lln"),
        Column("alpha", "α"),
        Column("beta", "β"),
        Column("entropy", "entropy [bits]"),
        Column("spectral_gap", "spectral gap", ".4f"),
        Column("variance", "Var P", ".2e"),
        Column("rank", "rank of P", ".1f"),
    ),
    "log-normality of P, normality of queries and keys (KS: Kolmogorov-Smirnov distance)": (
        Column("log_mean", "mean ln P"),
        Column("log_variance", "Var ln P"),
        Column("log_ks", "KS"),
        Column("q_std", "q: σ"),
        Column("q_skewness", "q: skew"),
        Column("q_kurtosis", "q: kurtosis"),
        Column("q_ks", "q: KS"),
        Column("k_std", "k: σ"),
        Column("k_skewness", "k: skew"),
        Column("k_kurtosis", "k: kurtosis"),
        Column("k_ks", "k: KS"),
    ),
}

# The measurements of the hidden states by depth: title and format.
BY_DEPTH = {
    "residual": ("relative residual ‖X - 1xᵀ‖ / ‖X‖ of the hidden states: 0 if all tokens are alike", ".1e"),
    "rank": ("numerical rank of the hidden states", ".1f"),
}


@dataclass
class AttentionReport:
    """The measurements of a model, as means over sequences.

    Attributes:
        sequences: the number of measured sequences.
        tokens: the number of their tokens, without padding.
        longest: the number of tokens of the longest sequence.
        layers: for each layer, a dictionary from the name of a measure to its values: one for each head, (H,), or a
            single one, (1,), for a measure of the whole layer. A measure that does not apply is NaN.
        by_depth: by_depth[name][variant] is a list of values, with the names of BY_DEPTH and the variants of VARIANTS.
            Entry 0 of the list is for the embeddings, entry i for the output of the i-th layer.
    """

    sequences: int = 0
    tokens: int = 0
    longest: int = 0
    layers: list[dict[str, Tensor]] = field(default_factory=list)
    by_depth: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON. In the layers, NaN and infinities become None.

        Each measure of a layer has the entries "mean" (over the heads) and "by_head".
        """
        layers = []
        for layer in self.layers:
            values = {}
            for name, heads in layer.items():
                values[name] = {"mean": _json_number(heads.nanmean()), "by_head": [_json_number(x) for x in heads]}
            layers.append(values)
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "longest": self.longest,
            "layers": layers,
            **self.by_depth,
        }


def measure_model(model: Any, batches: Iterable[dict[str, Any]]) -> AttentionReport:
    """Measure every layer of a model, in evaluation mode.

    Args:
        model: a fairseq RoBERTa with an attention of this package.
        batches: the "net_input" entries of fairseq batches, on the model's device. There must be at least one.

    Raises:
        ValueError: if the model has no attention of this package, or if a sequence is too long for the model.
    """
    report = AttentionReport()
    limit = model.max_positions()
    # By layer and measure (or by name and variant), the values of every batch: the first dimension is the sequences.
    by_layer: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    by_depth: dict[str, dict[str, list[Tensor]]] = {name: defaultdict(list) for name in BY_DEPTH}
    for net_input in batches:
        size, length = net_input["src_tokens"].shape
        if length > limit:
            raise ValueError(f"the data has a sequence of {length} tokens, but the model takes at most {limit}")
        for variant, (skip, mlp) in VARIANTS.items():
            with ablated(model, skip, mlp):
                layers = record_layers(model, net_input)
            padding = layers[0].context.padding
            states = [layers[0].before, *(layer.after for layer in layers)]
            residuals = [_measure_states(relative_residual, X, padding) for X in states]
            ranks = [_measure_states(numerical_rank, X, padding) for X in states]
            by_depth["residual"][variant].append(torch.stack(residuals, dim=1))
            by_depth["rank"][variant].append(torch.stack(ranks, dim=1))
            if variant == "model":
                for number, layer in enumerate(layers):
                    for name, values in _measure_layer(layer).items():
                        by_layer[number][name].append(values)
        report.sequences += size
        report.tokens += size * length if padding is None else int((~padding).sum())
        report.longest = max(report.longest, length)
    for measures in by_layer.values():
        report.layers.append({name: torch.cat(values).nanmean(dim=0) for name, values in measures.items()})
    for name, variants in by_depth.items():
        report.by_depth[name] = {}
        for variant, batch_values in variants.items():
            report.by_depth[name][variant] = torch.cat(batch_values).nanmean(dim=0).tolist()
    return report


def _measure_states(function: Callable[[Tensor], Tensor], X: Tensor, padding: Tensor | None) -> Tensor:
    """Measure the hidden states (B, N, C) of each sequence without its padding: (B,) in float64 on the CPU.

    The function returns a scalar for the hidden states (n, C) of a sequence.
    """
    values = [function(states) for states in measure.remove_padding(X, padding)]
    return torch.stack(values).cpu().double()


def _measure_layer(layer: Layer) -> dict[str, Tensor]:
    """Return every measure of a layer by its name, as float64 tensors on the CPU.

    A tensor is (B, H), or (B, 1) for a measure of the whole layer, with the same value for all sequences.
    """
    padding = layer.context.padding
    measured = measure.measure_batch(layer.attention, layer.q, layer.k, layer.context)
    values = dict(zip(measure.NAMES, measured.unbind(dim=1), strict=True))
    scalars = layer.scalars().double().cpu().expand(len(layer.q), 1, -1)
    values.update(zip(layer_scalars.NAMES, scalars.unbind(dim=-1), strict=True))
    for name, x in (("q", layer.q), ("k", layer.k)):
        fits = [normality(heads) for heads in measure.remove_padding(x, padding)]
        for moment in NormalFit._fields:
            by_head = [getattr(fit, moment) for fit in fits]
            values[f"{name}_{moment}"] = torch.stack(by_head).cpu().double()
    return values


def format_report(report: AttentionReport) -> str:
    """Format the report as text: tables with a row for each layer, then tables with a row for each depth.

    The numbers are means over sequences and heads. A measure that does not apply is shown as "-".
    """
    lines = [f"{report.sequences} sequences, {report.tokens} tokens, the longest with {report.longest}"]
    for title, columns in TABLES.items():
        rows = [["layer", *(column.heading for column in columns)]]
        for number, layer in enumerate(report.layers):
            means = [f"{layer[column.measure].nanmean():{column.form}}" for column in columns]
            rows.append([str(number), *means])
        lines += ["", title, *_align_columns(rows)]
    for name, (title, form) in BY_DEPTH.items():
        variants = report.by_depth[name]
        rows = [["depth", *variants]]
        for depth, values in enumerate(zip(*variants.values(), strict=True)):
            rows.append([str(depth), *(f"{value:{form}}" for value in values)])
        lines += ["", title, *_align_columns(rows)]
    if report.longest > measure.MAX_TOKENS:
        lines += [
            "",
            f"More than {measure.MAX_TOKENS} tokens in a sequence: linear attentions are measured on {measure.ROWS} "
            "rows of P, with the exact spectral gap. For other attentions, P is not measured.",
        ]
    return "\n".join(lines)


def draw_report(report: AttentionReport, path: Path, subject: str) -> None:
    """Write a PNG figure with six panels to `path`: five measures by layer, and the relative residual by depth.

    `subject` says in the title what was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # The label of the panel's axis, and the measures to draw by their name in the legend.
    panels = (
        ("temperature 1/(σ_q σ_k)", {"softmax (τ_sm)": "tau_sm", "LLN (τ_lln)": "tau_lln"}),
        ("entropy of a row [bits]", {"mean over heads": "entropy"}),
        ("spectral gap 1 - |λ2|", {"mean over heads": "spectral_gap"}),
        ("variance of ln P", {"mean over heads": "log_variance"}),
        ("KS distance", {"P to log-normal": "log_ks", "queries to Gaussian": "q_ks", "keys to Gaussian": "k_ks"}),
    )
    figure = Figure(figsize=(15, 8), layout="constrained")
    FigureCanvasAgg(figure)
    *layer_axes, depth_axis = figure.subplots(2, 3).flat
    for axis, (label, measures) in zip(layer_axes, panels, strict=True):
        for (heading, name), style in zip(measures.items(), ("o-", "x--", "s:"), strict=False):
            _draw_measure(axis, [layer[name] for layer in report.layers], style, heading)
        axis.set(xlabel="layer", ylabel=label)
    for variant, residuals in report.by_depth["residual"].items():
        depth_axis.semilogy(residuals, "o-", label=variant)
    depth_axis.set(xlabel="depth (0: embeddings)", ylabel="relative residual ‖X - 1xᵀ‖ / ‖X‖")
    for axis in (*layer_axes, depth_axis):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axis.lines:
            axis.legend()
    figure.suptitle(f"{subject}: {report.sequences} sequences, {report.tokens} tokens; small points: single heads")
    figure.savefig(path, format="png", dpi=110)


def _draw_measure(axis: Any, values: Sequence[Tensor], style: str, heading: str) -> None:
    """Draw one measure over the layers: the mean over heads as a line, and each head as a point.

    The values of a layer are (H,), or (1,) for a measure of the whole layer. If all values are NaN, nothing is drawn.
    """
    if all(heads.isnan().all() for heads in values):
        return
    (line,) = axis.plot([heads.nanmean().item() for heads in values], style, label=heading)
    for number, heads in enumerate(values):
        if len(heads) > 1:
            axis.plot([number] * len(heads), heads, ".", color=line.get_color(), alpha=0.3)


def _align_columns(rows: list[list[str]]) -> list[str]:
    """Format each row as a line of text. Columns are right-aligned, two spaces apart, and "nan" becomes "-"."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = ["-" if cell == "nan" else cell for cell in row]
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))
    return lines


def _json_number(x: Tensor) -> float | None:
    """Return the value of a scalar tensor, or None if it is not finite, because JSON has no NaN."""
    return x.item() if x.isfinite() else None
