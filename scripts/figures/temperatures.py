"""Figure 2: entropy and spectral gap of several attentions by temperature."""

from typing import NamedTuple

from lln_fairseq.analysis.concentration import entropy, linear_spectral_gap, spectral_gap
from scripts.figures.gaussian import HEAD_DIM, Inputs, spread
from scripts.figures.sheet import Panel, Settings, Sheet

TEMPERATURES = (0.25, 5.0)  # τ = 1/√s for s between 16 and 0.04, the range of the calibrated tables


class Kernel(NamedTuple):
    """A curve: a registered attention with options."""

    label: str
    attention: str
    style: str
    colour: str
    options: dict = {}  # noqa: RUF012 - never written to


KERNELS = (
    Kernel("softmax", "softmax", "o-", "C0"),
    Kernel("LLN, matched", "lln", "s--", "C1"),
    Kernel("LLN, matched by the paper's line", "lln", ":", "C1", {"constants": "paper"}),
    Kernel("LLN, α = β = 1", "lln", "^-", "C2", {"alpha": 1.0, "beta": 1.0}),
    Kernel("quadratic", "quadratic", "-", "C3"),
    Kernel("linear quadratic", "linear_quadratic", "-.", "C3"),
    Kernel("ReLU", "relu", "-", "C4"),
    Kernel("linear ReLU", "linear_relu", "--", "C4"),
)


def figure_2(settings: Settings) -> Sheet:
    """Matched LLN follows softmax, and concentrates more at low temperature: at the same variance, its ln P has a
    heavier right tail than a Gaussian's (Figure 7). The other kernels do not follow the temperature at all.
    """
    tokens, heads, points = (64, 2, 4) if settings.fast else (512, 2, 13)
    inputs, temperatures = Inputs(tokens, heads), spread(*TEMPERATURES, points)
    size = f"Gaussian q, k, N = {tokens}, D = {HEAD_DIM}"
    x = "temperature $τ = 1/(σ_q σ_k)$"
    sheet = Sheet(
        [Panel(f"Entropy, {size}", x, "entropy of a row [bits]", "log"),
         Panel(f"Spectral gap, {size}", x, "spectral gap $1 - |λ_2|$", "log")],
        size=(6.4, 4.8),
    )  # fmt: skip
    curves = {kernel.label: _measure(inputs, kernel, temperatures) for kernel in KERNELS}
    for kernel in KERNELS:
        for panel, values in enumerate(curves[kernel.label]):
            sheet.line(panel, kernel.label, temperatures, values, kernel.style, color=kernel.colour)
    sheet.legend()
    sheet.note(f"distance from softmax over τ in {list(TEMPERATURES)}, {size}:")
    sheet.note(f"  {'':<34}{'entropy [bits]':^18}{'spectral gap':^18}")
    sheet.note(f"  {'':<34}{'mean':>9}{'max':>9}{'mean':>9}{'max':>9}")
    for kernel in KERNELS[1:]:
        cells = [_distance(*pair) for pair in zip(curves[kernel.label], curves["softmax"], strict=True)]
        sheet.note(f"  {kernel.label:<34}" + "".join(f"{value:>9.3f}" for pair in cells for value in pair))
    return sheet


def _measure(inputs: Inputs, kernel: Kernel, temperatures: list[float]) -> tuple[list[float], list[float]]:
    """Return the entropies in bits and the spectral gaps by temperature, means over the heads."""
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


def _distance(values: list[float], softmax: list[float]) -> tuple[float, float]:
    distances = [abs(a - b) for a, b in zip(values, softmax, strict=True)]
    return sum(distances) / len(distances), max(distances)
