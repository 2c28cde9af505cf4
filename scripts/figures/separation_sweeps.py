"""Draw the separation figures: how often networks with softmax, linear and LLN attention separate two inputs.

The experiments are those of lln_fairseq/analysis/separation.py, and a sweep repeats one of them with several values of
one parameter: the number of tokens n, of features d or of sign vectors m, the accepted probability of failure delta, or
the entries a1 and c of the inputs. A draw of random sign vectors succeeds if the network is 0 on the first input and
positive on the second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.ticker import MaxNLocator

from lln_fairseq.analysis.separation import (
    NORMALIZATIONS,
    Separation,
    cross_attention,
    self_attention,
    softmax_regression,
)
from scripts.figures.sheet import Panel, Settings, Sheet

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
    """An experiment and its sweeps. Each sweep varies one parameter and keeps the others at their defaults.

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
    """Draw the figure of the experiment SWEEPS[name], with a panel for each swept parameter."""
    sweeps = SWEEPS[name]
    draws = 20 if settings.fast else 100
    panels = []
    for parameter in sweeps.values:
        x_scale = "log" if parameter in LOGARITHMIC_PARAMETERS else "linear"
        panels.append(Panel(f"by {parameter}", PARAMETER_TITLES[parameter], "draws that succeed [%]", x_scale))
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
    """Run the experiment for every value of one parameter, and draw the percentages of successful draws into a panel.

    Args:
        sheet: the figure.
        panel: number of the panel.
        sweeps: the experiment.
        parameter: name of the swept parameter.
        values: values of the swept parameter.
        draws: number of draws of the sign vectors for each value.
    """
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
    """Return the arguments of an experiment in which one parameter has a given value, and the others their defaults.

    The number of tokens n is rounded to whole blocks, see `round_tokens`.
    """
    arguments = {"n": DEFAULT_TOKENS, "d": DEFAULT_WIDTH, **sweeps.fixed, parameter: value}
    arguments["n"] = round_tokens(sweeps, arguments["n"], arguments["d"])
    return arguments


def round_tokens(sweeps: Sweeps, n: int, d: int) -> int:
    """Round n to a multiple of the width of the identity blocks, but to at least one block.

    With d features, the width is d - sweeps.extra_features. If X has no blocks, n is returned unchanged.
    """
    block_width = 1
    if sweeps.extra_features is not None:
        block_width = d - sweeps.extra_features
    return max(round(n / block_width), 1) * block_width
