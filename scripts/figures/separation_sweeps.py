"""The separation figures: how often a network on softmax, linear and LLN attention tells two data sets apart."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
UNITS = (1, 2, 3, 4, 6, 8, 11, 15, 20)
WIDTHS = (7, 12, 22, 42)
DELTAS = (0.3, 0.1, 0.03, 0.01, 0.001, 0.0001)
SIZE = 1000  # the n of all sweeps but that over n, rounded to whole blocks
NAMES = {
    "n": "tokens n",
    "m": "sign vectors m",
    "d": "features d",
    "a1": "a₁ of D₁",
    "c": "c = 1 - b",
    "delta": "failure probability δ",
}
LOG = ("n", "delta", "d")


class Sweeps(NamedTuple):
    """An experiment, what it is called, how many of its d features are not the identities', and values to sweep."""

    title: str
    experiment: Callable[..., Separation]
    others: int | None
    values: dict[str, tuple]
    fixed: dict[str, Any] = {}  # noqa: RUF012 - never written to


COMMON = {"n": LENGTHS, "m": UNITS, "d": WIDTHS, "delta": DELTAS}
MARGINS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9)

SWEEPS = {
    "regression": Sweeps("Softmax regression", softmax_regression, None, {"n": LENGTHS, "m": UNITS}),
    "self_ones": Sweeps("Self-attention, X all ones", self_attention, 2,
                        {**COMMON, "a1": (0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5), "c": MARGINS}),
    "self_identity": Sweeps("Self-attention, X the identity", self_attention, 2,
                            {**COMMON, "a1": (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0), "c": MARGINS},
                            {"mixing": "identity"}),
    "cross": Sweeps("Cross-attention", cross_attention, 1,
                    {**COMMON, "a1": (0.3, 0.5, 0.8, 0.9, 1.0, 1.1, 1.5, 2.0, 3.0, 4.0)}),
}  # fmt: skip


def figure(name: str) -> Callable[[Settings], Sheet]:
    return lambda settings: draw(SWEEPS[name], settings)


def draw(sweeps: Sweeps, settings: Settings) -> Sheet:
    draws = 20 if settings.fast else 100
    axes = ("linear", "log")
    panels = [Panel(f"by {name}", NAMES[name], "draws that succeed [%]", axes[name in LOG]) for name in sweeps.values]
    sheet = Sheet(panels, columns=3, size=(4.6, 3.4))
    sheet.figure.suptitle(f"{sweeps.title}: in how many of {draws} draws are two data sets told apart?")
    for panel, (name, values) in enumerate(sweeps.values.items()):
        if settings.fast:
            values = (12,) if name == "d" else values[::4]
        results = [sweeps.experiment(**arguments(sweeps, name, value), draws=draws) for value in values]
        for number, normalisation in enumerate(NORMALIZATIONS):
            shares = [100 * result.counts[normalisation].separates / draws for result in results]
            # Curves often lie on each other: the later, the smaller.
            sheet.line(panel, normalisation, values, shares, "o-", color=f"C{number}", markersize=9 - 2.5 * number)
        sheet.line(panel, "softmax separates, linear is 0", values, [100 * r.claim / draws for r in results], "k:")
        sheet.axes[panel].set_ylim(-5, 105)
        if name == "m":
            sheet.axes[panel].xaxis.set_major_locator(MaxNLocator(integer=True))
    sheet.legend(0)
    default = sweeps.experiment(**arguments(sweeps, "n", SIZE), draws=draws)
    sheet.note(f"n = {length(sweeps, SIZE, 12)}, d = 12, {draws} draws; separates (F(D0) = 0, F(D1) > 0):")
    for normalisation, counts in default.counts.items():
        sheet.note(f"  {normalisation:<8}{counts.separates:>4} ({counts.zero_on_d0}, {counts.positive_on_d1})")
    sheet.note(f"  the paper's event, softmax separates and linear is 0 on both: {default.claim}")
    return sheet


def arguments(sweeps: Sweeps, name: str, value: float) -> dict[str, Any]:
    """The experiment's arguments with one parameter at `value`, n made a whole number of blocks."""
    found = {"n": SIZE, "d": 12, **sweeps.fixed, name: value}
    return {**found, "n": length(sweeps, found["n"], found["d"])}


def length(sweeps: Sweeps, n: int, d: int) -> int:
    """The number of tokens nearest to n that is a multiple of the width of the identities."""
    width = 1 if sweeps.others is None else d - sweeps.others
    return max(round(n / width), 1) * width
