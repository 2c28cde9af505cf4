"""Attention matrices computed straight from their definitions, in quadratic time and in the dtype of their inputs.

Tests and measurements use these functions, which share no code with the fast implementations. Unless stated otherwise,
q and k are (B, H, N, D), padding is None or bool (B, N) with True = padded, every matrix is (B, H, N, N), and
a row is 0 if all its keys are padding.
"""

import torch
from torch import Tensor

from lln_fairseq.ops.formula import FLOOR


def per_head(x: float | Tensor, like: Tensor) -> Tensor:
    """Return a parameter of the heads, such as α, as a tensor that broadcasts to (B, H, N, D).

    Args:
        x: a number, or a tensor that broadcasts to (B, H).
        like: a tensor with the dtype and device of the result.
    """
    return torch.as_tensor(x, dtype=like.dtype, device=like.device)[..., None, None]


def _softmax_over_keys(scores: Tensor, padding: Tensor | None, allowed: Tensor | None = None) -> Tensor:
    """Return the softmax of each row of scores over the keys that are allowed and not padding.

    Args:
        scores: (B, H, N, N).
        allowed: bool, broadcasts to the scores. None allows every pair of a query and a key.

    Returns: (B, H, N, N). A row without such a key is 0.
    """
    banned = torch.zeros_like(scores, dtype=torch.bool)
    if padding is not None:
        banned = banned | padding[:, None, None, :]
    if allowed is not None:
        banned = banned | ~allowed
    empty = banned.all(dim=-1, keepdim=True)
    scores = scores.masked_fill(banned & ~empty, float("-inf"))
    return scores.softmax(dim=-1).masked_fill(empty, 0.0)


def lln_matrix(
    q: Tensor, k: Tensor, alpha: float | Tensor, beta: float | Tensor, padding: Tensor | None = None
) -> Tensor:
    """Return the LLN matrix P_ij = <e^{αq_i}, e^{βk_j}> / Σ_l <e^{αq_i}, e^{βk_l}> (paper, eq. 8 and 9).

    Large αq and βk do not overflow. alpha and beta are numbers or tensors that broadcast to (B, H).
    """
    x = per_head(alpha, q) * q
    y = per_head(beta, k) * k
    # In batches of 64 rows, because the logsumexp reads D numbers for every entry of the matrix.
    rows = [(part.unsqueeze(-2) + y.unsqueeze(-3)).logsumexp(dim=-1) for part in x.split(64, dim=-2)]
    log_kernel = torch.cat(rows, dim=-2)
    return _softmax_over_keys(log_kernel, padding)


def softmax_matrix(q: Tensor, k: Tensor, padding: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
    """Return P = softmax(q kᵀ / √D) (paper, eq. 1) over the keys that are allowed and not padding.

    `allowed` is bool and broadcasts to (B, H, N, N). None allows every pair of a query and a key. q may have another N
    than k.
    """
    return _softmax_over_keys(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, padding, allowed)


def block_diag_matrix(
    q: Tensor,
    k: Tensor,
    block_size: int,
    padding: Tensor | None = None,
    global_tokens: int | Tensor | None = None,
    neighbors: int = 0,
    band: int | None = None,
) -> Tensor:
    """Return the matrix of softmax attention inside blocks of `block_size` tokens (paper, section 4.2).

    Entries whose query and key lie in blocks more than `neighbors` apart are 0, unless one of them is a global token.
    With a band, entries whose query and key are farther apart than the band are 0 instead. The last block may be
    shorter.
    """
    if band is not None:
        token = torch.arange(q.shape[-2], device=q.device)
        return softmax_matrix(q, k, padding, (token[:, None] - token).abs() <= band)
    inside, is_global = _inside(q, block_size, global_tokens, neighbors)
    return softmax_matrix(q, k, padding, inside | is_global.mT)


def lln_diag_matrix(
    q: Tensor,
    k: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    block_size: int,
    padding: Tensor | None = None,
) -> Tensor:
    """Return the mean of the LLN matrix and the block-diagonal matrix (paper, section 4.2).

    If all keys of a block are padding, its rows are half of the rows of the LLN matrix, so that they sum to 1/2.
    """
    lln = lln_matrix(q, k, alpha, beta, padding)
    return (lln + block_diag_matrix(q, k, block_size, padding)) / 2


def joint_matrix(
    q: Tensor,
    k: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    block_size: int,
    offset: float | Tensor,
    padding: Tensor | None = None,
    global_tokens: int | Tensor | None = None,
) -> Tensor:
    """Return the joint form of LLN and block-diagonal softmax that ops/formula.py defines.

    Args:
        alpha, beta, offset: numbers, or tensors that broadcast to (B, H).
        block_size: tokens in a block. If all keys of a block are padding, its rows are rows of the LLN matrix.
        global_tokens: the number of global tokens at the start of every sequence: an int, an integer tensor (B,), or
            None for no global tokens.
    """
    lln = lln_matrix(q, k, alpha, beta, padding)
    inside, is_global = _inside(q, block_size, global_tokens)
    exact = softmax_matrix(q, k, padding, inside)
    outside = lln.masked_fill(inside, 0.0)
    mass = outside.sum(dim=-1, keepdim=True)
    weight = 1 / (mass + (1 - mass) / per_head(offset, q).exp()).clamp_min(FLOOR)
    without_key = exact.sum(dim=-1, keepdim=True) == 0
    matrix = torch.where(without_key, lln, (1 - weight * mass) * exact + weight * outside)
    return torch.where(is_global.mT, softmax_matrix(q, k, padding), matrix)


def _inside(
    q: Tensor, block_size: int, global_tokens: int | Tensor | None, neighbors: int = 0
) -> tuple[Tensor, Tensor]:
    """Return which keys count as inside a query's block, (B or 1, 1, N, N), and which are global, (B or 1, 1, 1, N)."""
    token = torch.arange(q.shape[-2], device=q.device)
    block = token // block_size
    number = torch.as_tensor(0 if global_tokens is None else global_tokens, device=q.device)
    is_global = token < number.reshape(-1, 1, 1, 1)
    return ((block[:, None] - block[None, :]).abs() <= neighbors) | is_global, is_global


def kernel_matrix(phi_q: Tensor, phi_k: Tensor, padding: Tensor | None = None) -> Tensor:
    """Return P_ij = <φ(q_i), φ(k_j)> / Σ_l <φ(q_i), φ(k_l)> (paper, eq. 4) for features φ(q), φ(k) (B, H, N, F).

    A row is also 0 if all its products <φ(q_i), φ(k_j)> are 0.
    """
    scores = phi_q @ phi_k.transpose(-2, -1)
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], 0.0)
    total = scores.sum(dim=-1, keepdim=True)
    return scores / total.masked_fill(total == 0, 1.0)
