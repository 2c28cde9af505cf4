"""Draw Figures 5, 6 and 7: moments and histograms of ln P, and sums of log-normal variables.

P is the attention matrix. s = σ_q² σ_k² is the product of the variances of the queries and of the keys.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from lln_fairseq.analysis import lognormal
from scripts.figures.gaussian import HEAD_DIM, GaussianInputs, geometric_range
from scripts.figures.sheet import Panel, Settings, Sheet


class LLNVariant(NamedTuple):
    """LLN attention with options, and how its curve is drawn."""

    label: str
    options: dict[str, Any]
    style: str
    color: str


UNMATCHED = LLNVariant("LLN, α = β = 1", {"alpha": 1.0, "beta": 1.0}, "^-", "C2")
MATCHED = LLNVariant("LLN, matched", {}, "s--", "C1")
PAPER_MATCHED = LLNVariant("LLN, matched by the paper's line", {"constants": "paper"}, ":", "C1")


def figure_5(settings: Settings) -> Sheet:
    """Draw the mean and the variance of ln P against s: for softmax, compared with the theory, and for LLN."""
    tokens = 512 if settings.fast else 1024
    points = 4 if settings.fast else 13
    inputs = GaussianInputs(tokens, heads=4)
    s_values = geometric_range(0.05, 8.0, points)
    x = "$s = σ_q^2 σ_k^2$"
    sheet = Sheet(
        [
            Panel("(a) softmax, variance of ln P", x, "variance [nat²]"),
            Panel("(a) softmax, mean of ln P", x, "mean [nat]"),
            Panel("(b) softmax and LLN", x, "variance of ln P [nat²]", "log", "log"),
        ]
    )
    fits = [lognormal.lognormal_fit(inputs.matrix("softmax", s)) for s in s_values]
    means = [fit.mu.mean().item() for fit in fits]
    variances = [fit.sigma2.mean().item() for fit in fits]
    theory = [lognormal.softmax_moments(s, tokens) for s in s_values]
    sheet.line(0, "measured", s_values, variances, "o")
    sheet.line(0, "theory: s", s_values, [moments.sigma2 for moments in theory], "k--")
    sheet.line(0, "s + s²/2D", s_values, [s + s**2 / (2 * HEAD_DIM) for s in s_values], "k:")
    sheet.line(1, "measured", s_values, means, "o")
    sheet.line(1, "theory: -ln N - s/2", s_values, [moments.mu for moments in theory], "k--")
    sheet.line(2, "softmax", s_values, variances, "o-", color="C0")
    error = max_relative_error(variances, s_values)
    sheet.note(f"(a) the variance differs from s by at most {error:.1%}, N = {tokens}, D = {HEAD_DIM}")
    for variant in (UNMATCHED, MATCHED, PAPER_MATCHED):
        lln_variances = []
        for s in s_values:
            fit = lognormal.lognormal_fit(inputs.matrix("lln", s, **variant.options))
            lln_variances.append(fit.sigma2.mean().item())
        sheet.line(2, variant.label, s_values, lln_variances, variant.style, color=variant.color)
        error = max_relative_error(lln_variances, variances)
        sheet.note(f"(b) {variant.label}: the variance differs from that of softmax by at most {error:.1%}")
    sheet.legend()
    return sheet


def figure_6(settings: Settings) -> Sheet:
    """Draw the variance of the ln of a sum of log-normal variables, with Fenton's approximation and linear fits."""
    draws = 2_000 if settings.fast else 20_000
    points = 4 if settings.fast else 11
    x = "σ² of each term [nat²]"
    y = "variance of the ln of the sum [nat²]"
    sheet = Sheet(
        [
            Panel("(a) moderate, dashed: Fenton", x, y),
            Panel("(b) broad, dashed: straight lines", x, y),
        ]
    )
    moderate = np.linspace(0.2, 1.2, points)
    broad = np.linspace(1.0, 20.0, 2 * points - 1)
    fitted = broad[broad >= 5]
    for number, terms in enumerate((16, 64, 256)):
        color = f"C{number}"
        generator = torch.Generator().manual_seed(terms)
        normal = torch.randn(draws, terms, generator=generator, dtype=torch.float64)

        measured = _log_sum_variances(normal, moderate)
        sheet.line(0, f"d = {terms}", moderate, measured, "o", color=color)
        theory = [lognormal.fenton_variance(sigma2, terms) for sigma2 in moderate]
        error = max_relative_error(measured, theory)
        sheet.note(f"(a) d = {terms}: differs from Fenton's approximation by at most {error:.1%}")
        sheet.line(0, f"d = {terms}, theory", moderate, theory, "--", color=color)

        measured = _log_sum_variances(normal, broad)
        sheet.line(1, f"d = {terms}", broad, measured, "o", color=color)
        fit = stats.linregress(fitted, np.array(measured)[broad >= 5])
        sheet.note(f"(b) d = {terms}: {fit.slope:.3f} σ² {fit.intercept:+.3f} for σ² >= 5, r² = {fit.rvalue**2:.4f}")
        sheet.line(1, f"d = {terms}, line", fitted, fit.intercept + fit.slope * fitted, "--", color=color)
    sheet.legend()
    return sheet


def _log_sum_variances(normal: torch.Tensor, sigma2_values: np.ndarray) -> list[float]:
    """Return the variance of ln Σ exp(σ z) over the draws for every σ². The sum is over the terms of a draw.

    Args:
        normal: standard normal variables z, (draws, terms).
        sigma2_values: the values of σ².
    """
    return [(math.sqrt(sigma2) * normal).logsumexp(-1).var().item() for sigma2 in sigma2_values]


def figure_7(settings: Settings) -> Sheet:
    """Draw histograms of ln P at s = 1, and the quantiles of ln P against those of a normal distribution."""
    tokens = 128 if settings.fast else 1024
    heads = 2 if settings.fast else 4
    s = 1.0
    inputs = GaussianInputs(tokens, heads)
    sheet = Sheet(
        [
            Panel(f"Histogram of ln P, $σ_q^2 σ_k^2$ = {s:g}", "ln P [nat]", "density [1/nat]"),
            Panel("Quantiles against a Gaussian's", "standard normal quantile", "(ln P - μ)/σ"),
        ],
        size=(6.0, 4.2),
    )
    attentions: list[tuple[str, str, dict[str, Any], str]] = [("softmax", "softmax", {}, "C0")]
    for variant in (UNMATCHED, MATCHED):
        attentions.append((variant.label, "lln", variant.options, variant.color))
    for label, name, options, color in attentions:
        P = inputs.matrix(name, s, **options)
        logs = lognormal.log_entries(P)
        fit = lognormal.lognormal_fit(P)
        mu = fit.mu.mean().item()
        sigma = fit.sigma2.mean().sqrt().item()
        heights, edges = np.histogram(logs, bins=80, range=(mu - 5 * sigma, mu + 5 * sigma), density=True)
        sheet.steps(0, label, edges, heights, color=color, fill=True, alpha=0.35)
        centers = (edges[1:] + edges[:-1]) / 2
        sheet.line(0, f"{label}: fit", centers, stats.norm.pdf(centers, mu, sigma), "--", color=color)
        theory, sample = lognormal.qq((logs - mu) / sigma)
        sheet.line(1, label, theory, sample, ".", color=color)
        sheet.note(
            f"{label:<16} μ + ln N = {mu + math.log(tokens):.3f}, σ² = {sigma**2:.4f}, KS distance {fit.ks.mean():.4f}"
        )
    sheet.axes[1].axline((0, 0), slope=1, color="k", linewidth=0.8)
    sheet.legend()
    return sheet


def max_relative_error(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest of |value / expected value - 1| over pairs from two sequences of the same length."""
    return max(abs(value / truth - 1) for value, truth in zip(values, expected, strict=True))
