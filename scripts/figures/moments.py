"""Figures 5, 6 and 7: mean, variance and histogram of ln P, and the variance of a log-normal sum."""

import math
from typing import Any

import numpy as np
import torch
from scipy import stats

from lln_fairseq.analysis import lognormal
from scripts.figures.gaussian import HEAD_DIM, Inputs, spread
from scripts.figures.sheet import Panel, Settings, Sheet

UNMATCHED = {"alpha": 1.0, "beta": 1.0}
LLN: tuple[tuple[str, dict[str, Any], str, str], ...] = (  # label, options, style and colour of a curve
    ("LLN, α = β = 1", UNMATCHED, "^-", "C2"),
    ("LLN, matched", {}, "s--", "C1"),
    ("LLN, matched by the paper's line", {"constants": "paper"}, ":", "C1"),
)


def figure_5(settings: Settings) -> Sheet:
    tokens, heads, points = (512, 4, 4) if settings.fast else (1024, 4, 13)
    inputs, grid = Inputs(tokens, heads), spread(0.05, 8.0, points)
    x = "$s = σ_q^2 σ_k^2$"
    sheet = Sheet(
        [Panel("(a) softmax, variance of ln P", x, "variance [nat²]"),
         Panel("(a) softmax, mean of ln P", x, "mean [nat]"),
         Panel("(b) softmax and LLN", x, "variance of ln P [nat²]", "log", "log")]
    )  # fmt: skip
    softmax = [lognormal.lognormal_fit(inputs.matrix("softmax", s)) for s in grid]
    theory = [lognormal.softmax_moments(s, tokens) for s in grid]
    variances = [fit.sigma2.mean().item() for fit in softmax]
    sheet.line(0, "measured", grid, variances, "o")
    sheet.line(0, "theory: s", grid, [moments.sigma2 for moments in theory], "k--")
    sheet.line(0, "s + s²/2D", grid, [s + s**2 / (2 * HEAD_DIM) for s in grid], "k:")
    sheet.line(1, "measured", grid, [fit.mu.mean().item() for fit in softmax], "o")
    sheet.line(1, "theory: -ln N - s/2", grid, [moments.mu for moments in theory], "k--")
    sheet.line(2, "softmax", grid, variances, "o-", color="C0")
    sheet.note(f"(a) variance within {_worst(variances, grid):.1%} of s, N = {tokens}, D = {HEAD_DIM}")
    for label, options, style, colour in LLN:
        measured = [lognormal.lognormal_fit(inputs.matrix("lln", s, **options)).sigma2.mean().item() for s in grid]
        sheet.line(2, label, grid, measured, style, color=colour)
        sheet.note(f"(b) {label}: variance off softmax's by at most {_worst(measured, variances):.1%}")
    sheet.legend()
    return sheet


def figure_6(settings: Settings) -> Sheet:
    draws, points = (2_000, 4) if settings.fast else (20_000, 11)
    x, y = "σ² of each term [nat²]", "variance of the ln of the sum [nat²]"
    sheet = Sheet([Panel("(a) moderate, dashed: Fenton", x, y), Panel("(b) broad, dashed: straight lines", x, y)])
    ranges = (np.linspace(0.2, 1.2, points), np.linspace(1.0, 20.0, 2 * points - 1))
    for number, terms in enumerate((16, 64, 256)):
        generator = torch.Generator().manual_seed(terms)
        normal = torch.randn(draws, terms, generator=generator, dtype=torch.float64)
        for panel, grid in enumerate(ranges):
            measured = [(math.sqrt(sigma2) * normal).logsumexp(-1).var().item() for sigma2 in grid]
            sheet.line(panel, f"d = {terms}", grid, measured, "o", color=f"C{number}")
            if panel == 0:
                theory = [lognormal.fenton_variance(sigma2, terms) for sigma2 in grid]
                sheet.note(f"(a) d = {terms}: within {_worst(measured, theory):.1%} of Fenton's approximation")
            else:
                broad = grid >= 5
                fit = stats.linregress(grid[broad], np.array(measured)[broad])
                grid = grid[broad]
                theory = fit.intercept + fit.slope * grid
                sheet.note(
                    f"(b) d = {terms}: {fit.slope:.3f} σ² {fit.intercept:+.3f} from 5 on, r² = {fit.rvalue**2:.4f}"
                )
            sheet.line(panel, f"d = {terms}, theory" if panel == 0 else f"d = {terms}, line", grid, theory, "--",
                       color=f"C{number}")  # fmt: skip
    sheet.legend()
    return sheet


def figure_7(settings: Settings) -> Sheet:
    """Histograms of ln P at s = 1, and the same against normal quantiles."""
    tokens, heads, s = (128, 2, 1.0) if settings.fast else (1024, 4, 1.0)
    inputs = Inputs(tokens, heads)
    sheet = Sheet(
        [Panel(f"Histogram of ln P, $σ_q^2 σ_k^2$ = {s:g}", "ln P [nat]", "density [1/nat]"),
         Panel("Quantiles against a Gaussian's", "standard normal quantile", "(ln P - μ)/σ")],
        size=(6.0, 4.2),
    )  # fmt: skip
    attentions: list[tuple[str, str, dict[str, Any], str]] = [("softmax", "softmax", {}, "C0")]
    for label, options, _, colour in LLN[:2]:
        attentions.append((label, "lln", options, colour))
    for label, name, options, colour in attentions:
        P = inputs.matrix(name, s, **options)
        logs = lognormal.log_entries(P)
        fit = lognormal.lognormal_fit(P)
        mu = fit.mu.mean().item()
        sigma = fit.sigma2.mean().sqrt().item()
        heights, edges = np.histogram(logs, bins=80, range=(mu - 5 * sigma, mu + 5 * sigma), density=True)
        sheet.steps(0, label, edges, heights, color=colour, fill=True, alpha=0.35)
        centres = (edges[1:] + edges[:-1]) / 2
        sheet.line(0, f"{label}: fit", centres, stats.norm.pdf(centres, mu, sigma), "--", color=colour)
        theory, sample = lognormal.qq((logs - mu) / sigma)
        sheet.line(1, label, theory, sample, ".", color=colour)
        sheet.note(f"{label:<16} μ + ln N = {mu + math.log(tokens):.3f}, σ² = {sigma**2:.4f}, "
                   f"KS distance {fit.ks.mean():.4f}")  # fmt: skip
    sheet.axes[1].axline((0, 0), slope=1, color="k", linewidth=0.8)
    sheet.legend()
    return sheet


def _worst(values: list[float], expected: list[float]) -> float:
    return max(abs(value / truth - 1) for value, truth in zip(values, expected, strict=True))
