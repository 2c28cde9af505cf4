"""The instruments of a model over a corpus, layer by layer: collected, as a table, as a picture."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.analysis import layer_scalars, measure
from lln_fairseq.analysis.lognormal import normality
from lln_fairseq.analysis.probe import Layer, ablated, record
from lln_fairseq.analysis.rank_collapse import numerical_rank, relative_residual

VARIANTS = {  # of what is shown by depth: skip connections, MLPs
    "model": (True, True),
    "no skip": (False, True),
    "no MLP": (True, False),
    "neither": (False, False),
}

# title: (column, heading, format), ...
TABLES = {
    "concentration": (
        ("tau_sm", "τ_sm", ".3f"),
        ("tau_lln", "τ_lln", ".3f"),
        ("alpha", "α", ".3f"),
        ("beta", "β", ".3f"),
        ("entropy", "entropy [bits]", ".3f"),
        ("spectral_gap", "spectral gap", ".4f"),
        ("variance", "Var P", ".2e"),
        ("rank", "rank of P", ".1f"),
    ),
    "log-normality of P, normality of queries and keys (KS: distance of Kolmogorov and Smirnov)": (
        ("log_mean", "mean ln P", ".3f"),
        ("log_variance", "Var ln P", ".3f"),
        ("log_ks", "KS", ".3f"),
        *((f"{x}_{moment}", f"{x}: {heading}", ".3f") for x in "qk" for moment, heading in
          (("std", "σ"), ("skewness", "skew"), ("kurtosis", "kurtosis"), ("ks", "KS"))),
    ),
}  # fmt: skip

BY_DEPTH = {  # of the hidden states X: title, format
    "residual": ("relative residual ‖X - 1xᵀ‖ / ‖X‖ of the hidden states: 0 if all tokens are alike", ".1e"),
    "rank": ("numerical rank of the hidden states", ".1f"),
}


@dataclass
class Report:
    """Means over sequences.

    layers: by layer and instrument a value for every head, or one if it is the layer's; NaN where it does not apply.
    by_depth: by name in BY_DEPTH and variant a value for every depth, from 0, the embeddings, to L.
    """

    sequences: int = 0
    tokens: int = 0
    longest: int = 0
    layers: list[dict[str, Tensor]] = field(default_factory=list)
    by_depth: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        layers = [
            {name: {"mean": _number(heads.nanmean()), "by_head": [_number(x) for x in heads]}
             for name, heads in layer.items()} for layer in self.layers
        ]  # fmt: skip
        counts = {"sequences": self.sequences, "tokens": self.tokens, "longest": self.longest}
        return counts | {"layers": layers} | self.by_depth


def collect(model: Any, batches: Iterable[dict[str, Any]]) -> Report:
    """Measures every layer of the model on batches of fairseq's `net_input`.

    Raises: ValueError for a model without an attention of this package, or a sequence longer than it takes.
    """
    report, limit = Report(), model.max_positions()
    found: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    depths: dict[str, dict[str, list[Tensor]]] = {name: defaultdict(list) for name in BY_DEPTH}
    for net_input in batches:
        size, length = net_input["src_tokens"].shape
        if length > limit:
            raise ValueError(f"the data has a sequence of {length} tokens, and the model takes {limit} at most")
        for variant, (skip, mlp) in VARIANTS.items():
            with ablated(model, skip, mlp):
                layers = record(model, net_input)
            states = [layers[0].before, *(layer.after for layer in layers)]
            mask = layers[0].key_padding_mask
            for name, instrument in (("residual", relative_residual), ("rank", _rank)):
                depths[name][variant].append(torch.stack([instrument(x, mask) for x in states], dim=1).cpu())
            if variant == "model":
                for number, layer in enumerate(layers):
                    for name, values in _measure(layer).items():
                        found[number][name].append(values)
        real = size * length if mask is None else int((~mask).sum())
        report.sequences, report.tokens = report.sequences + size, report.tokens + real
        report.longest = max(report.longest, length)
    report.layers = [{name: torch.cat(x).nanmean(dim=0) for name, x in layer.items()} for layer in found.values()]
    report.by_depth = {
        name: {variant: torch.cat(values).nanmean(dim=0).tolist() for variant, values in variants.items()}
        for name, variants in depths.items()
    }
    return report


def _rank(X: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    if key_padding_mask is not None:
        X = X.masked_fill(key_padding_mask[:, :, None], 0.0)
    return numerical_rank(X).double()


def _measure(layer: Layer) -> dict[str, Tensor]:
    """By instrument (B, H), or (B, 1) for the layer's own; float64."""
    q, k, mask = layer.q, layer.k, layer.key_padding_mask
    found = dict(zip(measure.NAMES, measure.measure(layer.attention, q, k, mask).unbind(dim=1), strict=True))
    scalars = layer.scalars().double().cpu().expand(len(q), 1, -1)
    found |= dict(zip(layer_scalars.NAMES, scalars.unbind(dim=-1), strict=True))
    for name, x in (("q", q), ("k", k)):
        found |= {f"{name}_{moment}": values.cpu() for moment, values in normality(x, mask)._asdict().items()}
    return found


def as_text(report: Report) -> str:
    """Tables by layer, means over sequences and heads; - where an instrument does not apply."""
    lines = [f"{report.sequences} sequences, {report.tokens} tokens, the longest {report.longest}"]
    for title, columns in TABLES.items():
        rows = [[f"{layer[name].nanmean():{form}}" for name, _, form in columns] for layer in report.layers]
        lines += ["", title, *_align([["layer", *(heading for _, heading, _ in columns)],
                                      *([str(number), *row] for number, row in enumerate(rows))])]  # fmt: skip
    for name, (title, form) in BY_DEPTH.items():
        variants = report.by_depth[name]
        rows = [[str(depth), *(f"{value:{form}}" for value in values)]
                for depth, values in enumerate(zip(*variants.values(), strict=True))]  # fmt: skip
        lines += ["", title, *_align([["depth", *variants], *rows])]
    if report.longest > measure.MAX_TOKENS:
        lines += ["", f"More than {measure.MAX_TOKENS} tokens a sequence: of linear attentions the exact spectral gap "
                  f"and {measure.ROWS} rows of P are measured, of others the temperatures alone."]  # fmt: skip
    return "\n".join(lines)


def draw(report: Report, path: Path) -> None:
    """Six panels by layer as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = (
        ("temperature 1/(σ_q σ_k)", {"softmax (τ_sm)": "tau_sm", "LLN (τ_lln)": "tau_lln"}),
        ("entropy of a row [bits]", {"mean over heads": "entropy"}),
        ("spectral gap 1 - |λ2|", {"mean over heads": "spectral_gap"}),
        ("variance of ln P", {"mean over heads": "log_variance"}),
        ("KS distance", {"P to log-normal": "log_ks", "queries to Gaussian": "q_ks", "keys to Gaussian": "k_ks"}),
    )
    figure = Figure(figsize=(15, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flat
    for axis, (label, lines) in zip(axes, panels, strict=False):
        for (heading, name), style in zip(lines.items(), ("o-", "x--", "s:"), strict=False):
            values = [layer[name] for layer in report.layers]
            if not all(x.isnan().all() for x in values):
                (line,) = axis.plot([x.nanmean().item() for x in values], style, label=heading)
                for number, heads in enumerate(values):
                    if len(heads) > 1:
                        axis.plot([number] * len(heads), heads, ".", color=line.get_color(), alpha=0.3)
        axis.set(xlabel="layer", ylabel=label)
    for name, residuals in report.by_depth["residual"].items():
        axes[5].semilogy(residuals, "o-", label=name)
    axes[5].set(xlabel="depth (0: embeddings)", ylabel="relative residual ‖X - 1xᵀ‖ / ‖X‖")
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axis.lines:
            axis.legend()
    figure.suptitle(f"{report.sequences} sequences, {report.tokens} tokens; points: single heads")
    figure.savefig(path, format="png", dpi=110)


def _align(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(("-" if cell == "nan" else cell).rjust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows]  # fmt: skip


def _number(x: Tensor) -> float | None:
    return x.item() if x.isfinite() else None  # JSON has no NaN
