"""Choice of α and β such that LLN attention is as concentrated as softmax attention (paper, section 4.1 and A.7).

With s = σ_q² σ_k², the variance of log P of softmax attention, and α² σ_q² = β² σ_k² = σ̃² / 2, the variance of log P
of LLN attention depends on σ̃² and the head dimension alone. α and β follow from the σ̃² at which both are equal:

    α = σ̃ / (√2 σ_q)        β = σ̃ / (√2 σ_k)                                                       (eq. 10)

Rows of equal log-variance are not equally concentrated: those of LLN attention are not log-normal, and their entropy is
lower: with heads of 64 by up to 1.5 bits at 256 tokens, 1.7 at 512, 2.6 at 2,048. The constants "entropy" match the
entropy of the rows instead.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from lln_fairseq.ops.backends import choose_backend, is_traced_or_transformed, load_backend
from lln_fairseq.ops.checks import check_inputs
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.exchange import Exchange, create_exchange

SCOPES = ("head", "batch")
# Those of a table each, by what both attentions are made equal in, and the paper's.
TABLES_FILES = {
    "calibrated": Path(__file__).with_name("moment_matching_tables.json"),
    "entropy": Path(__file__).with_name("entropy_matching_tables.json"),
}
CONSTANTS = (*TABLES_FILES, "paper")

# σ_lln² = a σ̃² + b, the straight line of eq. 34 with the constants of the authors' code. It holds in the broad range,
# σ̃² in [1, 4] in the units of A.7, and is far off at the s of a newly initialised model.
PAPER_A, PAPER_B = 0.14855178144710912, -0.35487039130661086

MIN_SIGMA = 1e-6
# log σ̃² at the most, where LLN attention has long had but one feature left. Beyond it float32 could not tell α q from
# its neighbours. csrc/moments.h and the Triton kernels have the same limit.
LOG_SIGMA2_LIMIT = 24.0

# The grid of s on which both attentions are simulated; between its points and beyond its ends log σ̃² is linear in
# log s, with the slope of the nearest segment.
S_RANGE, S_POINTS = (0.01, 16.0), 25


def match_moments(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None = None,
    scope: str = "head",
    constants: str = "calibrated",
    backend: str = "auto",
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """α and β of eq. 10 for these queries and keys.

    Args:
        q, k: (B, H, N, D).
        key_padding_mask: bool (B, N), True = padded; padded tokens do not count.
        scope: "head" = one pair per sequence and head: independent of batch mates, padding and workers; "batch" = one
            pair for the whole tensor, as the authors' code has it.
        constants: "calibrated" and "entropy" = the tables simulated for this head dimension, by the variance of log P
            and by the entropy of its rows; "paper" = the paper's straight line.
        backend: as for `lln_attention`; the fused kernels compute scope "head" with a table.
        group: workers that hold a sequence together, as for `lln_attention`.

    Returns: α, β of shape (B, H), float32 (float64 for float64 inputs), without gradient.
    Raises: ValueError for an unknown scope, unknown constants, or tensors that do not fit.
    """
    check_inputs(q, k, k, key_padding_mask)
    for value, known, name in ((scope, SCOPES, "scope"), (constants, CONSTANTS, "constants")):
        if value not in known:
            raise ValueError(f"unknown {name} '{value}', choose from {', '.join(known)}")
    name = choose_backend(backend, q, None, k, key_padding_mask)
    if exchange := create_exchange(group, q):
        return matched_moments(q, k, key_padding_mask, scope, constants, exchange=exchange)
    if (
        scope != "head"
        or constants not in TABLES_FILES
        or q.numel() == 0
        or is_traced_or_transformed(q, k, key_padding_mask)
    ):
        return matched_moments(q, k, key_padding_mask, scope, constants)
    q, k = q.detach(), k.detach()
    return load_backend(name).match_moments(q, k, key_padding_mask, calibration_table(q.shape[-1], q.device, constants))


@torch.no_grad()
def matched_moments(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None, scope: str = "head", constants: str = "calibrated",
    table: Sequence[Tensor] | None = None, exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`match_moments` in PyTorch, unchecked; without a mask q and k may differ in length."""
    sigmas = standard_deviations((q, k), key_padding_mask, scope, exchange)
    return _matching(sigmas, constants, table or (() if constants == "paper" else _table_of(q, constants)))


@torch.no_grad()
def running_moments(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None, constants: str = "calibrated",
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """α and β of `match_moments` for every token, from the tokens up to it: they look at nothing that comes later.

    α_i belongs to query i and β_j to key j, so that P_ij has <e^{α_i q_i}, e^{β_j k_j}> and its state stays small.

    Args: q, k, key_padding_mask, constants: as for `match_moments`, of scope "head".
        before: the moments of the tokens before these, as an earlier call returned them.
    Returns: α, β of shape (B, H, N), without gradient; the moments of all tokens, (B, H, 6), in float64.
    Raises: ValueError as `match_moments`.
    """
    check_inputs(q, k, k, key_padding_mask)
    if constants not in CONSTANTS:
        raise ValueError(f"unknown constants '{constants}', choose from {', '.join(CONSTANTS)}")
    moments = torch.cat([_token_moments(x, key_padding_mask) for x in (q, k)]).cumsum(dim=-1)
    if before is not None:
        moments = moments + before.movedim(-1, 0)[..., None]
    sigmas = [_deviation(x, "head").to(compute_dtype(q.dtype)) for x in (moments[:3], moments[3:])]
    alpha, beta = _matching(sigmas, constants, () if constants == "paper" else _table_of(q, constants))
    if q.shape[2]:
        return alpha, beta, moments[..., -1].movedim(0, -1)
    return alpha, beta, moments.new_zeros(*q.shape[:2], len(moments)) if before is None else before


def _matching(sigmas: Sequence[Tensor], constants: str, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """α and β of eq. 10 for σ_q and σ_k of any shape."""
    sigma_q, sigma_k = sigmas
    log_s = 2 * (sigma_q.log() + sigma_k.log())
    log_sigma2 = ((log_s.exp() - PAPER_B) / PAPER_A).log() if constants == "paper" else interpolate(log_s, *table)
    sigma_tilde = (log_sigma2.clamp_max(LOG_SIGMA2_LIMIT) / 2).exp()
    return sigma_tilde / (math.sqrt(2) * sigma_q), sigma_tilde / (math.sqrt(2) * sigma_k)


def standard_deviations(
    tensors: Sequence[Tensor], key_padding_mask: Tensor | None = None, scope: str = "head",
    exchange: Exchange | None = None,
) -> list[Tensor]:  # fmt: skip
    """σ of each x (B, H, N, D) over the real tokens and features of each sequence and head (or of all), (B, H).

    At least 1e-6, so that α and β stay finite for a constant x or a sequence that is all padding.
    """
    found = [_moments(x, key_padding_mask) for x in tensors]
    if exchange is not None:
        found = exchange.sum(*found)
    return [_deviation(moments, scope).to(compute_dtype(x.dtype)) for x, moments in zip(tensors, found, strict=True)]


def _moments(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return how many numbers x has in each head, their sum and the sum of their squares, float64 (3, B, H)."""
    return _token_moments(x, key_padding_mask).sum(dim=-1)


def _token_moments(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return `_moments` of every token, (3, B, H, N).

    Where the mean is much larger than σ, E[x²] - E[x]² cancels all digits that a float32 sum of squares has. So float32
    sums (x - o)², with the mean o of the first real token, and float64 computes Σx² = Σ(x - o)² + 2 o Σx - D o².
    """
    x = x.detach().to(compute_dtype(x.dtype))
    features = x.shape[-1]
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # an Apple GPU has no float64
    total = x.sum(dim=-1)
    real = torch.ones_like(total, dtype=torch.bool)
    if key_padding_mask is not None:
        real = real & ~key_padding_mask[:, None, :]
    is_first = real & (real.cumsum(dim=-1) == 1)
    origin = total.where(is_first, 0.0).sum(dim=-1, keepdim=True) / features
    # Unlike x - origin, cdist needs no memory of the size of x.
    origins = origin[..., None].expand(*origin.shape, features)
    distance = torch.cdist(x, origins, compute_mode="donot_use_mm_for_euclid_dist")[..., 0]
    total, origin = total.to(wide), origin.to(wide)
    square = distance.to(wide).square() + origin * (2 * total - features * origin)
    count = torch.full_like(total, float(features))
    return torch.stack((count, total, square)).where(real, 0.0)


def _deviation(moments: Tensor, scope: str) -> Tensor:
    if scope == "batch":
        moments = moments.sum(dim=(1, 2), keepdim=True).expand_as(moments)
    count, total, square = moments[0].clamp_min(1.0), moments[1], moments[2]
    variance = square / count - (total / count).square()
    return variance.clamp_min(MIN_SIGMA**2).sqrt()


def interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """The piecewise linear function through (xs, ys), xs ascending, its end segments continued."""
    right = torch.bucketize(x, xs).clamp(1, xs.numel() - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    return ys[left] + slope * (x - xs[left])


@functools.cache
def calibration_table(
    head_dim: int, device: torch.device | str = "cpu", constants: str = "calibrated"
) -> tuple[Tensor, Tensor]:
    """(log s, log σ̃²) for a head dimension, float32 on the device: shipped for common ones, else simulated once."""
    with _disable_current_modes():  # what is kept must be tensors with data, whatever is traced at the moment
        points = _shipped_tables(constants).get(str(head_dim)) or simulate_table(head_dim, constants=constants)
        log_s, log_sigma2 = (torch.tensor(x, dtype=torch.float32, device=device) for x in points)
        return log_s, log_sigma2


def _table_of(q: Tensor, constants: str) -> Sequence[Tensor]:
    """The table for q; where operations are recorded or imitated, as tensors made there."""
    if not is_traced_or_transformed(q):
        return calibration_table(q.shape[-1], q.device, constants)
    numbers = _table_numbers(index(q.shape[-1]), constants)  # while tracing, a size is a tensor or a symbol
    return [torch.tensor(x, dtype=torch.float32, device=q.device) for x in numbers]


def _table_numbers(head_dim: int, constants: str) -> list[list[float]]:
    """`calibration_table` as numbers, which torch.compile takes as they are."""
    with _disable_current_modes():
        return [x.tolist() for x in calibration_table(head_dim, constants=constants)]


# What torch.compiler.assume_constant_result does, without its import of the compiler, which takes seconds.
_table_numbers.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def _shipped_tables(constants: str) -> dict[str, list[list[float]]]:
    return json.loads(TABLES_FILES[constants].read_text())


def log_softmax(x: Tensor, y: Tensor, s: float) -> Tensor:
    """log P of softmax attention of x, y (heads, N, D) ~ N(0, 1) scaled to σ_q² σ_k² = s."""
    return (math.sqrt(s) * x @ y.mT / math.sqrt(x.shape[-1])).log_softmax(dim=-1)


def log_lln(x: Tensor, y: Tensor, sigma2: float) -> Tensor:
    """log P of LLN attention of x, y (heads, N, D) ~ N(0, 1) with α = β = σ̃ / √2, for σ̃² = sigma2."""
    scale = math.sqrt(sigma2 / 2)
    # The exponentials of the whole range of σ̃ fit into float32 without subtracting a maximum.
    return ((scale * x).exp() @ (scale * y).exp().mT).log().log_softmax(dim=-1)


def log_variance(log_p: Tensor) -> float:
    """Var log P over the entries of a head, the mean over heads."""
    return log_p.var(dim=(1, 2)).mean().item()


def missing_entropy(log_p: Tensor) -> float:
    """ln N - H(P), the mean over rows, in nats: the divergence from the uniform distribution."""
    return (log_p.exp() * (log_p + math.log(log_p.shape[-1]))).sum(dim=-1).mean().item()


MEASURES: dict[str, Callable[[Tensor], float]] = {"calibrated": log_variance, "entropy": missing_entropy}


def simulate_table(
    head_dim: int, tokens: int = 1024, heads: int = 4, seed: int = 0, constants: str = "calibrated"
) -> tuple[list[float], list[float]]:
    """Pairs (log s, log σ̃²) at which LLN attention on Gaussian inputs measures the same as softmax, see MEASURES.

    Both attentions see the same x, y ~ N(0, 1) of shape (heads, tokens, head_dim); deterministic for a seed.
    The variances depend little on `tokens`: 4% at most between 512 and 2048 for s up to 16. By the entropies log σ̃²
    falls by about 0.05 between them at s = 16, by less at smaller s.
    """
    measure = MEASURES[constants]
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, heads, tokens, head_dim, generator=generator, dtype=torch.float32, device="cpu")
    log_s = torch.linspace(math.log(S_RANGE[0]), math.log(S_RANGE[1]), S_POINTS, dtype=torch.float64, device="cpu")
    wanted = torch.tensor([measure(log_softmax(x, y, math.exp(point))) for point in log_s], dtype=torch.float64)
    # What is measured grows by less than σ̃⁴ and more than σ̃²/100 here, so this range holds every solution.
    log_sigma2 = torch.linspace(math.log(1e-1), math.log(1.2e2), 2 * S_POINTS, dtype=torch.float64)
    reached = torch.tensor([measure(log_lln(x, y, math.exp(point))) for point in log_sigma2], dtype=torch.float64)
    return log_s.tolist(), interpolate(wanted.log(), reached.log(), log_sigma2).tolist()
