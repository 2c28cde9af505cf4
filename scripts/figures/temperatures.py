"""Draw Figure 2: entropy and spectral gap of several attentions by temperature."""

from dataclasses import dataclass, field
from typing import Any

from lln_fairseq.analysis.concentration import entropy, linear_spectral_gap, spectral_gap
from scripts.figures.gaussian import HEAD_DIM, GaussianInputs, geometric_range
from scripts.figures.sheet import Panel, Settings, Sheet

TEMPERATURES = (0.25, 5.0)  # τ = 1/√s for s between 16 and 0.04, the range of the calibrated tables


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
    same variance, but a heavier right tail than a Gaussian (Figure 7). The other kernels do not depend on the
    temperature.
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
    """Return the mean and the largest absolute difference from the values of softmax."""
    distances = [abs(a - b) for a, b in zip(values, softmax, strict=True)]
    return sum(distances) / len(distances), max(distances)
