"""Redraw the figures of arXiv 2311.13541 and of the separation experiments.

    python -m scripts.figures.paper                                   # the simulated figures
    python -m scripts.figures.paper --only 2 5 --out my_figures
    python -m scripts.figures.paper --only 1 8 9 10 --run lln=runs/pretrain_lln_diag softmax=runs/pretrain_softmax

Each figure is written to OUT/figure_N.png and its numbers to OUT/figure_N.csv. Figures 2, 5, 6, 7 and the separation
figures are simulated. Figures 1, 8, 9 and 10 are drawn from training runs: give the directory of a run or its
TensorBoard directory. Figure 1 needs runs with the probe (--probe-interval), and Figure 10a needs runs of sentence
classification. A figure without data is skipped, and the program says what is missing.
"""

# The simulations draw Gaussian queries and keys as in the paper's section 3. σ_q² and σ_k² are the variances of their
# entries, s = σ_q² σ_k², and P is the attention matrix.

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from scipy import stats
from torch import Tensor

from lln_fairseq.analysis import lognormal
from lln_fairseq.analysis.concentration import entropy, linear_spectral_gap, spectral_gap
from lln_fairseq.analysis.events import Curve, read_curves
from lln_fairseq.analysis.separation import (
    NORMALIZATIONS,
    Separation,
    cross_attention,
    self_attention,
    softmax_regression,
)
from lln_fairseq.attention import Attention, build_attention
from lln_fairseq.command import run_main
from lln_fairseq.ops import reference
from lln_fairseq.terminal import program_parser
from scripts.figures import (
    FigureSkippedError,
    Panel,
    Settings,
    Sheet,
    figure_1,
    figure_8,
    figure_9,
    figure_10,
)

HEAD_DIM = 64
TEMPERATURES = (0.25, 5.0)  # τ = 1/√s for s between 16 and 0.04, the range of the calibrated tables


class GaussianInputs:
    """Standard normal queries and keys, float64 (1, heads, tokens, HEAD_DIM), the same for every attention."""

    def __init__(self, tokens: int, heads: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (2, 1, heads, tokens, HEAD_DIM)
        self.tokens = tokens
        self.heads = heads
        self.q, self.k = torch.randn(shape, generator=generator, dtype=torch.float64)

    def scaled(self, s: float) -> tuple[Tensor, Tensor]:
        """Return q and k, each multiplied by the fourth root of s, so that σ_q² σ_k² = s."""
        return s**0.25 * self.q, s**0.25 * self.k

    def features(self, name: str, s: float, **options: float | str) -> tuple[Tensor, Tensor] | None:
        """Return the features φ(q) and φ(k) of a linear attention, or None if the attention is not linear."""
        return self._build(name, options).feature_maps(*self.scaled(s))

    def matrix(self, name: str, s: float, **options: float | str) -> Tensor:
        """Return P, (1, heads, tokens, tokens). With features it is computed from them, which is faster."""
        features = self.features(name, s, **options)
        if features is not None:
            return reference.kernel_matrix(*features)
        return self._build(name, options).attention_matrix(*self.scaled(s))

    def _build(self, name: str, options: dict) -> Attention:
        attention = build_attention(name, num_heads=self.heads, head_dim=HEAD_DIM, max_positions=self.tokens, **options)
        return attention.double().eval()


def geometric_range(low: float, high: float, points: int) -> list[float]:
    """Return `points` numbers from `low` to `high`, both included, with a constant ratio between neighbors."""
    return torch.linspace(math.log(low), math.log(high), points, dtype=torch.float64).exp().tolist()


@dataclass(frozen=True)
class Kernel:
    """A registered attention with options, and how its curve is drawn."""

    label: str
    attention: str
    style: str
    color: str
    options: dict[str, Any] = field(default_factory=dict)


SOFTMAX = Kernel("softmax", "softmax", "o-", "C0")
OTHER_KERNELS = (
    Kernel("LLN, matched", "lln", "s--", "C1"),
    Kernel("LLN, matched by the paper's line", "lln", ":", "C1", {"constants": "paper"}),
    Kernel("LLN, α = β = 1", "lln", "^-", "C2", {"alpha": 1.0, "beta": 1.0}),
    Kernel("quadratic", "quadratic", "-", "C3"),
    Kernel("linear quadratic", "linear_quadratic", "-.", "C3"),
    Kernel("ReLU", "relu", "-", "C4"),
    Kernel("linear ReLU", "linear_relu", "--", "C4"),
)


def figure_2(settings: Settings) -> Sheet:
    """Draw entropy and spectral gap against temperature, and note how far each attention is from softmax.

    LLN with moment matching follows softmax. At low temperatures it is more concentrated than softmax: its ln P has the
    same variance, but a heavier right tail than a Gaussian (Figure 7). The quadratic and the ReLU kernels do not depend
    on the temperature.
    """
    tokens = 64 if settings.fast else 512
    points = 4 if settings.fast else 13
    inputs = GaussianInputs(tokens, heads=2)
    temperatures = geometric_range(*TEMPERATURES, points)
    size = f"Gaussian q, k, N = {tokens}, D = {HEAD_DIM}"
    x = "temperature $τ = 1/(σ_q σ_k)$"
    sheet = Sheet(
        [
            Panel(f"Entropy, {size}", x, "entropy of a row [bits]", "log"),
            Panel(f"Spectral gap, {size}", x, "spectral gap $1 - |λ_2|$", "log"),
        ],
        size=(6.4, 4.8),
    )
    sheet.note(f"distance from softmax over τ in {list(TEMPERATURES)}, {size}:")
    sheet.note(f"  {'':<34}{'entropy [bits]':^18}{'spectral gap':^18}")
    sheet.note(f"  {'':<34}{'mean':>9}{'max':>9}{'mean':>9}{'max':>9}")
    softmax_entropies, softmax_gaps = _measure(inputs, SOFTMAX, temperatures)
    sheet.line(0, SOFTMAX.label, temperatures, softmax_entropies, SOFTMAX.style, color=SOFTMAX.color)
    sheet.line(1, SOFTMAX.label, temperatures, softmax_gaps, SOFTMAX.style, color=SOFTMAX.color)
    for kernel in OTHER_KERNELS:
        entropies, gaps = _measure(inputs, kernel, temperatures)
        sheet.line(0, kernel.label, temperatures, entropies, kernel.style, color=kernel.color)
        sheet.line(1, kernel.label, temperatures, gaps, kernel.style, color=kernel.color)
        distances = [*_mean_and_max_distance(entropies, softmax_entropies), *_mean_and_max_distance(gaps, softmax_gaps)]
        sheet.note(f"  {kernel.label:<34}" + "".join(f"{distance:>9.3f}" for distance in distances))
    sheet.legend()
    return sheet


def _measure(inputs: GaussianInputs, kernel: Kernel, temperatures: list[float]) -> tuple[list[float], list[float]]:
    """Return the entropy in bits and the spectral gap for each temperature, as two lists of means over the heads."""
    entropies = []
    gaps = []
    for tau in temperatures:
        s = tau**-2
        P = inputs.matrix(kernel.attention, s, **kernel.options)
        features = inputs.features(kernel.attention, s, **kernel.options)
        gap = spectral_gap(P) if features is None else linear_spectral_gap(*features)
        entropies.append(entropy(P).mean().item())
        gaps.append(gap.mean().item())
    return entropies, gaps


def _mean_and_max_distance(values: list[float], softmax: list[float]) -> tuple[float, float]:
    distances = [abs(a - b) for a, b in zip(values, softmax, strict=True)]
    return sum(distances) / len(distances), max(distances)


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
    """Return the variance over the draws of ln Σ exp(σ z) for every σ². `normal` are the z, (draws, terms)."""
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
    return max(abs(value / truth - 1) for value, truth in zip(values, expected, strict=True))


LENGTHS = (100, 200, 400, 700, 1000, 1500, 2000)
SIGN_VECTORS = (1, 2, 3, 4, 6, 8, 11, 15, 20)
WIDTHS = (7, 12, 22, 42)
DELTAS = (0.3, 0.1, 0.03, 0.01, 0.001, 0.0001)
MARGINS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
DEFAULT_TOKENS = 1000  # the n of all sweeps except the one over n, before rounding to whole blocks
DEFAULT_WIDTH = 12
PARAMETER_TITLES = {
    "n": "tokens n",
    "m": "sign vectors m",
    "d": "features d",
    "a1": "a₁ of D₁",
    "c": "c = 1 - b",
    "delta": "failure probability δ",
}
LOGARITHMIC_PARAMETERS = ("n", "delta", "d")


@dataclass(frozen=True)
class Sweeps:
    """An experiment of lln_fairseq/analysis/separation.py, and its sweeps over one parameter at a time.

    Attributes:
        title: the title of the experiment.
        experiment: the function that runs the experiment.
        extra_features: the number of features, out of d, that do not belong to the identity blocks of the input matrix
            X. None if X has no such blocks.
        values: the values of each swept parameter.
        fixed: further arguments of the experiment, which are the same in all sweeps.
    """

    title: str
    experiment: Callable[..., Separation]
    extra_features: int | None
    values: Mapping[str, Sequence[float]]
    fixed: Mapping[str, Any] = field(default_factory=dict)


COMMON: dict[str, Sequence[float]] = {"n": LENGTHS, "m": SIGN_VECTORS, "d": WIDTHS, "delta": DELTAS}
SWEEPS = {
    "regression": Sweeps(
        "Softmax regression",
        softmax_regression,
        extra_features=None,
        values={"n": LENGTHS, "m": SIGN_VECTORS},
    ),
    "self_ones": Sweeps(
        "Self-attention, X all ones",
        self_attention,
        extra_features=2,
        values={**COMMON, "a1": (0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5), "c": MARGINS},
    ),
    "self_identity": Sweeps(
        "Self-attention, X the identity",
        self_attention,
        extra_features=2,
        values={**COMMON, "a1": (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0), "c": MARGINS},
        fixed={"mixing": "identity"},
    ),
    "cross": Sweeps(
        "Cross-attention",
        cross_attention,
        extra_features=1,
        values={**COMMON, "a1": (0.3, 0.5, 0.8, 0.9, 1.0, 1.1, 1.5, 2.0, 3.0, 4.0)},
    ),
}


def separation_figure(name: str, settings: Settings) -> Sheet:
    """Draw how often networks with softmax, linear and LLN attention separate two inputs, a panel for each parameter.

    A draw of random sign vectors succeeds if the network is 0 on the first input and positive on the second.
    """
    sweeps = SWEEPS[name]
    draws = 20 if settings.fast else 100
    panels = []
    for parameter in sweeps.values:
        x_scale = "log" if parameter in LOGARITHMIC_PARAMETERS else "linear"
        panels.append(Panel("", PARAMETER_TITLES[parameter], "draws that succeed [%]", x_scale))
    sheet = Sheet(panels, columns=3, size=(4.6, 3.4))
    sheet.figure.suptitle(f"{sweeps.title}: in how many of {draws} draws are two data sets separated?")
    for panel, (parameter, values) in enumerate(sweeps.values.items()):
        if settings.fast:
            values = (DEFAULT_WIDTH,) if parameter == "d" else values[::4]
        _draw_sweep(sheet, panel, sweeps, parameter, values, draws)
    sheet.legend(0)

    tokens = round_tokens(sweeps, DEFAULT_TOKENS, DEFAULT_WIDTH)
    default = sweeps.experiment(**experiment_arguments(sweeps, "n", DEFAULT_TOKENS), draws=draws)
    sheet.note(f"n = {tokens}, d = {DEFAULT_WIDTH}, {draws} draws that separate (F(D0) = 0, F(D1) > 0):")
    for normalization, counts in default.counts.items():
        sheet.note(f"  {normalization:<8}{counts.separates:>4} ({counts.zero_on_d0}, {counts.positive_on_d1})")
    sheet.note(f"  the paper's event, softmax separates and linear is 0 on both: {default.claim}")
    return sheet


def _draw_sweep(sheet: Sheet, panel: int, sweeps: Sweeps, parameter: str, values: Sequence[float], draws: int) -> None:
    """Draw the percentages of successful draws for every value of one parameter into a panel."""
    results = [sweeps.experiment(**experiment_arguments(sweeps, parameter, value), draws=draws) for value in values]
    for number, normalization in enumerate(NORMALIZATIONS):
        percentages = [100 * result.counts[normalization].separates / draws for result in results]
        # Later curves have smaller markers, because curves often coincide.
        marker_size = 9 - 2.5 * number
        sheet.line(panel, normalization, values, percentages, "o-", color=f"C{number}", markersize=marker_size)
    claims = [100 * result.claim / draws for result in results]
    sheet.line(panel, "softmax separates, linear is 0", values, claims, "k:")
    sheet.axes[panel].set_ylim(-5, 105)
    if parameter == "m":
        sheet.axes[panel].xaxis.set_major_locator(MaxNLocator(integer=True))


def experiment_arguments(sweeps: Sweeps, parameter: str, value: float) -> dict[str, Any]:
    """Return the arguments of an experiment with one parameter set, and n rounded to whole blocks."""
    arguments = {"n": DEFAULT_TOKENS, "d": DEFAULT_WIDTH, **sweeps.fixed, parameter: value}
    arguments["n"] = round_tokens(sweeps, arguments["n"], arguments["d"])
    return arguments


def round_tokens(sweeps: Sweeps, n: int, d: int) -> int:
    """Round n to a multiple of the width of the identity blocks of X, but to at least one block."""
    block_width = 1
    if sweeps.extra_features is not None:
        block_width = d - sweeps.extra_features
    return max(round(n / block_width), 1) * block_width


FIGURES: dict[str, Callable[[Settings], Sheet]] = {
    "1": figure_1,
    "2": figure_2,
    "5": figure_5,
    "6": figure_6,
    "7": figure_7,
    "8": figure_8,
    "9": figure_9,
    "10": figure_10,
}
for sweep_name in SWEEPS:
    FIGURES[f"separation_{sweep_name}"] = partial(separation_figure, sweep_name)


def split_label(text: str) -> tuple[str, Path]:
    """Split LABEL=DIR into the label and the directory. Without a label, the label is the last component of DIR.

    Both parts can contain "=". If the whole text is an existing directory, it is not split. Otherwise it is split at
    the first "=" that is followed by an existing directory, or at the last "=" if there is no such directory.
    """
    candidates = [("", text)]
    for i, letter in enumerate(text):
        if letter == "=":
            candidates.append((text[:i], text[i + 1 :]))
    chosen = candidates[-1]
    for candidate in candidates:
        if Path(candidate[1]).is_dir():
            chosen = candidate
            break
    label = chosen[0]
    directory = Path(chosen[1])
    return label or directory.name, directory


def labeled_run(text: str) -> tuple[str, dict[str, Curve]]:
    """Return the label of a run and its curves by their tags, as a `type` of argparse for LABEL=DIR or DIR."""
    label, directory = split_label(text)
    folder = directory
    if (directory / "tensorboard").is_dir():
        folder = directory / "tensorboard"
    curves = read_curves(folder)
    if not curves:
        raise argparse.ArgumentTypeError(f"no TensorBoard scalars below '{directory}'")
    return label, curves


def draw_figures(names: list[str], out: Path, settings: Settings) -> int:
    """Draw figures into a directory, and print their notes. Return the exit code: 1 if all figures were skipped."""
    out.mkdir(parents=True, exist_ok=True)
    exit_code = 1
    for name in names:
        try:
            sheet = FIGURES[name](settings)
        except FigureSkippedError as error:
            print(f"figure {name} skipped: {error}")
            continue
        path = out / f"figure_{name}.png"
        sheet.save(path)
        exit_code = 0
        print(f"figure {name}: {path}")
        for note in sheet.notes:
            print(f"  {note}")
    return exit_code


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.figures.paper", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        metavar="FIGURE",
        help=f"figures to draw, from {', '.join(FIGURES)} (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/figures"), help="output directory (default: %(default)s)"
    )
    parser.add_argument(
        "--run",
        nargs="+",
        action="extend",
        type=labeled_run,
        default=[],
        metavar="LABEL=DIR",
        help="runs to draw, by default labeled with the name of their directory",
    )
    parser.add_argument("--fast", action="store_true", help="use tiny sizes, to test the program")
    args = parser.parse_args(argv)
    runs = dict(args.run)
    if len(runs) < len(args.run):
        parser.error("several runs have the same label: give --run LABEL=DIR")
    return draw_figures(args.only, args.out, Settings(args.fast, runs))


if __name__ == "__main__":
    sys.exit(run_main(main))
