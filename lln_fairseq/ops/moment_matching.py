"""Moment matching: α and β that make LLN attention as concentrated as softmax attention (paper, sections 4.1 and A.7).

P is the attention matrix, σ_q and σ_k are the standard deviations of the queries and keys. The variance of log P of
softmax attention is s = σ_q² σ_k². If α² σ_q² = β² σ_k² = σ̃² / 2, the variance of log P of LLN attention depends only
on σ̃² and the head dimension. Moment matching chooses the σ̃² for which both variances are equal. Then

    α = σ̃ / (√2 σ_q)        β = σ̃ / (√2 σ_k)                                                       (eq. 10)

Equal variances do not mean equal entropies. The rows of LLN attention are not log-normal, and their entropy is lower
than that of softmax attention. For heads of dimension 64, the difference is up to 1.5 bits at 256 tokens, 1.7 bits at
512 tokens and 2.6 bits at 2,048 tokens.
"""

import functools
import json
import math
from collections.abc import Sequence
from operator import index
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.dispatch import FORMULA, check_inputs, choose_backend, is_traced_or_transformed
from lln_fairseq.ops.formula import LLN, Inputs, Spec, alpha_beta, interpolate, standard_deviations

SCOPES = ("head", "batch")
CONSTANTS = ("calibrated", "paper")
TABLE_FILE = Path(__file__).with_name("moment_matching_tables.json")  # of "calibrated", by head dimension

# Both attentions are simulated for S_POINTS values of s in this range. log σ̃² is interpolated linearly in log s between
# the points, and extrapolated with the slope of the nearest segment.
S_RANGE = (0.01, 16.0)
S_POINTS = 25


def match_moments(
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None = None,
    scope: str = "head",
    constants: str = "calibrated",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute α and β (eq. 10 of the paper) by moment matching for these queries and keys.

    Args:
        q, k: (B, H, N, D) with any strides.
        key_padding_mask: bool (B, N), True = padded, or None. Padding tokens do not count.
        scope: "head" = one α and β for each sequence and head, which do not depend on the other sequences or the length
            of the padding; "batch" = one α and β for the whole tensor, as in the authors' code.
        constants: "calibrated" uses a table simulated for this head dimension, "paper" the straight line of the paper.
        backend: "triton", "cpu", "torch" or "auto", as in `lln_attention`. The kernels compute only the scope "head"
            with the table. In all other cases PyTorch is used, even if a kernel is requested.

    Returns: α and β, both (B, H) in float32, or in float64 for float64 inputs; finite, positive and without gradient.
    Raises: ValueError if an argument is invalid, or if the backend cannot run on these tensors.
    """
    check_inputs(q, k, k, key_padding_mask)
    backend = choose_backend(backend, Spec(LLN), Inputs(q, k, k, padding=key_padding_mask))
    if scope != "head" or constants != "calibrated" or backend == FORMULA or is_traced_or_transformed(q, k):
        return match_moments_pytorch(q, k, key_padding_mask, scope, constants)
    table = calibration_table(q.shape[-1], q.device)
    return load_backend(backend).match_moments(q.detach(), k.detach(), key_padding_mask, table)


def check_moment_options(scope: str, constants: str) -> None:
    """Raise ValueError if one of the two is unknown."""
    if scope not in SCOPES:
        raise ValueError(f"unknown scope '{scope}', choose from {', '.join(SCOPES)}")
    if constants not in CONSTANTS:
        raise ValueError(f"unknown constants '{constants}', choose from {', '.join(CONSTANTS)}")


@torch.no_grad()
def match_moments_pytorch(
    q: Tensor,
    k: Tensor,
    padding: Tensor | None = None,
    scope: str = "head",
    constants: str = "calibrated",
    table: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute α and β as `match_moments` does, in PyTorch. Raise ValueError for an unknown scope or unknown constants.

    If there is no padding, k may have a different N from q. `table` has the vectors log s and log σ̃² to interpolate;
    None means the table that belongs to `constants`. It is ignored if constants is "paper".
    """
    check_moment_options(scope, constants)
    if constants == "paper":
        table = None
    elif table is None:
        table = _table_for(q)
    sigma_q = standard_deviations(q, padding, scope)
    sigma_k = standard_deviations(k, padding, scope)
    return alpha_beta(sigma_q, sigma_k, table)


@functools.cache
def calibration_table(head_dim: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return the table of moment matching for a head dimension: the vectors log s and log σ̃², float32 and ascending.

    The package contains the tables of common head dimensions. Other tables are simulated at the first call, which takes
    some seconds. The result is cached: do not modify it.
    """
    # The cache must hold tensors with data, also if the first call comes while operations are traced.
    with _disable_current_modes():
        points = _shipped_tables().get(str(head_dim)) or simulate_table(head_dim)
        log_s, log_sigma2 = (torch.tensor(x, dtype=torch.float32, device=device) for x in points)
        return log_s, log_sigma2


def _table_for(q: Tensor) -> Sequence[Tensor]:
    """Return the table for the head dimension D of q (B, H, N, D), on the device of q.

    While operations are traced or transformed, its tensors are new, because a trace cannot use the cached tensors.
    """
    if not is_traced_or_transformed(q):
        return calibration_table(q.shape[-1], q.device)
    head_dim = index(q.shape[-1])  # while tracing, a size is a tensor or a symbol
    return [torch.tensor(x, dtype=torch.float32, device=q.device) for x in _table_as_numbers(head_dim)]


def _table_as_numbers(head_dim: int) -> list[list[float]]:
    """Return the result of `calibration_table` as lists of numbers, which torch.compile treats as constants."""
    points = _shipped_tables().get(str(head_dim))
    if points is not None:  # torch.jit.trace would record the tensors of `calibration_table`, in the first call only
        return points
    with _disable_current_modes():
        return [x.tolist() for x in calibration_table(head_dim)]


# This marks the function as torch.compiler.assume_constant_result does, which would import the compiler for seconds.
_table_as_numbers.__dict__["_dynamo_marked_constant"] = True


@functools.cache
def _shipped_tables() -> dict[str, list[list[float]]]:
    """Load the tables of the package: a dict from the head dimension, as a string, to the lists log s and log σ̃²."""
    return json.loads(TABLE_FILE.read_text())


def log_softmax_matrix(x: Tensor, y: Tensor, s: float) -> Tensor:
    """Return log P (H, N, N) of softmax attention for σ_q² σ_k² = s.

    x and y are the queries and keys before scaling, (H, N, D), samples of N(0, 1).
    """
    return (math.sqrt(s) * x @ y.mT / math.sqrt(x.shape[-1])).log_softmax(dim=-1)


def log_lln_matrix(x: Tensor, y: Tensor, sigma2: float) -> Tensor:
    """Return log P (H, N, N) of LLN attention for σ̃² = sigma2, with α = β = σ̃ / √2 and x, y as for softmax."""
    scale = math.sqrt(sigma2 / 2)
    # In the whole range of σ̃ the exponentials fit into float32 without subtracting a maximum.
    return ((scale * x).exp() @ (scale * y).exp().mT).log().log_softmax(dim=-1)


def log_variance(log_p: Tensor) -> float:
    """Return the variance of log P (H, N, N) over the entries of each head, averaged over the heads."""
    return log_p.var(dim=(1, 2)).mean().item()


def simulate_table(head_dim: int, tokens: int = 1024, heads: int = 4, seed: int = 0) -> tuple[list[float], list[float]]:
    """Find, for several s, the σ̃² for which log P has the same variance with LLN as with softmax, by simulation.

    Both attentions get the same random queries and keys, (heads, tokens, head_dim) from N(0, 1). The number of tokens
    matters little: from 512 to 2048 tokens, the variances of log P change by at most 4% for s up to 16.

    Returns: log s, S_POINTS values in ascending order over S_RANGE, and log σ̃² for each of them.
    """
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, heads, tokens, head_dim, generator=generator, dtype=torch.float32, device="cpu")
    log_s = torch.linspace(math.log(S_RANGE[0]), math.log(S_RANGE[1]), S_POINTS, dtype=torch.float64, device="cpu")
    targets = torch.tensor(
        [log_variance(log_softmax_matrix(x, y, math.exp(point))) for point in log_s], dtype=torch.float64
    )
    # The variances grow by less than σ̃⁴ and by more than σ̃²/100 here, so this range holds every solution.
    log_sigma2 = torch.linspace(math.log(1e-1), math.log(1.2e2), 2 * S_POINTS, dtype=torch.float64)
    reached = torch.tensor(
        [log_variance(log_lln_matrix(x, y, math.exp(point))) for point in log_sigma2], dtype=torch.float64
    )
    return log_s.tolist(), interpolate(targets.log(), reached.log(), log_sigma2).tolist()
