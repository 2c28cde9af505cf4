"""Linear Log-Normal attention and LLN+Diag: the public functions.

LLN attention of a sequence and head is computed as A (Wᵀ v), with

    L_d = logsumexp_j(β k_jd)        W_jd = exp(β k_jd - L_d)        A_id = softmax_d(α q_id + L_d)

where the sum runs over the keys j that are not padding. A (Wᵀ v) equals eq. 8 of the paper for every α and β, at a cost
linear in N. The columns of W are distributions over the tokens, and the rows of A are distributions over the features,
so no divisor is ever 0.

Numerical range: results and gradients are finite as long as |α q| and |β k| are below 1e9 and q·k and v are finite in
float32. If α and β come from moment matching, this holds for |q| and |k| up to 1e15.

NaN and padding: NaN and infinity never spread from one head to another. Values at padding positions never influence the
other tokens (formula.py).
"""

import torch
from torch import Tensor

from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.dispatch import (
    FORMULA,
    attend,
    check_block_size,
    check_inputs,
    choose_backend,
    count_global_tokens,
    scalar_per_head,
)
from lln_fairseq.ops.formula import (
    AVERAGE,
    JOINT,
    LLN,
    Inputs,
    Spec,
    key_features,
    load_heads,
    query_features,
    sum_keys,
)
from lln_fairseq.ops.moment_matching import check_moment_options, match_moments_pytorch

MIXES = ("average", "joint_offset")  # formulas that combine LLN and block-diagonal softmax


def lln_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    backend: str = "auto",
    scope: str = "head",
    constants: str = "calibrated",
) -> Tensor:
    """Compute LLN attention (paper, eq. 8): Σ_j <e^{αq_i}, e^{βk_j}> v_j / Σ_l <e^{αq_i}, e^{βk_l}>.

    The N x N attention matrix is never formed, so there is no attention dropout.

    Args:
        q, k, v: (B, H, N, D) with any strides. The computation is in float32, or in float64 for float64 inputs.
        alpha, beta: numbers, or tensors that broadcast to (B, H) and may require gradients. If both are None,
            `match_moments` computes them with `scope` and `constants`.
        key_padding_mask: bool (B, N), True = padded, or None. The result is 0 for a sequence that is all padding.
        backend: "triton" = GPU kernels (compute capability 8.0 or higher); "cpu" = C kernels (float32, compiled at
            first use); "torch" = PyTorch on any device; "auto" = the kernels for the device of q if they can run on
            these tensors, otherwise PyTorch.
        scope, constants: the arguments of `match_moments`; used only if alpha and beta are None.

    Returns: (B, H, N, D) in the dtype of q. If batch and heads of q can be viewed as one dimension, the result has the
        memory layout of q. It can be differentiated any number of times.
    Raises: ValueError if an argument is invalid, or if the backend cannot run on these tensors.
    """
    check_inputs(q, k, v, key_padding_mask)
    tensors = Inputs(q, k, v, padding=key_padding_mask)
    return _match_and_attend(Spec(LLN), tensors, alpha, beta, backend, scope, constants)


def lln_diag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    block_size: int | None = None,
    backend: str = "auto",
    dropout_p: float = 0.0,
    scope: str = "head",
    constants: str = "calibrated",
    mix: str = "average",
    mix_parameter: float | Tensor | None = None,
    global_tokens: int | Tensor | None = None,
    max_global_tokens: int | None = None,
) -> Tensor:
    """Compute LLN+Diag, a hybrid of LLN and block-diagonal softmax attention (paper, section 4.2 and figure 3).

    The mix decides how both are combined. "average" is ½ (LLN + block-diagonal softmax), as in the paper.
    "joint_offset" uses softmax weights for the keys inside the query's block and LLN weights for the keys outside it.
    Both are normalized together, so that each row sums to 1. If u is the weight that LLN alone would give to the keys
    outside, inside and outside have the ratio (1 - u) : e^o u, but the weight outside is at most 16 u. A sequence that
    fits in one block gets plain softmax attention.

    Args:
        q, k, v, alpha, beta, key_padding_mask, backend, scope, constants: the same as in `lln_attention`.
        block_size: tokens in a block, at least 1. None means D.
        dropout_p: probability of dropping a softmax weight inside a block, in [0, 1). LLN has no dropout.
        mix: "average" or "joint_offset".
        mix_parameter: o for the mix "joint_offset": a number, or a tensor that broadcasts to (B, H) and may require a
            gradient. None means 0. The values must be in [-80, 80], which is not checked. With "average" it must be
            None.
        global_tokens: the number of tokens at the start of every sequence that are global; only with the mix
            "joint_offset". An int for all sequences, an integer tensor (B,), or None for no global tokens. A number
            above N counts as N.
            As keys, global tokens count as inside the block of every query. As queries, they attend to all keys by
            softmax. If S = block_size and no sequence has more than M global tokens, N (S + M) softmax scores are
            computed. With a tensor on a GPU, the host waits for its values, unless max_global_tokens is given.
        max_global_tokens: M, if you know an upper bound of the numbers in a tensor: they are then not checked, and a
            number above M counts as M. Without a tensor, it has no effect.

    Returns: (B, H, N, D), as `lln_attention` does. With dropout, the result can be differentiated only once.
    Raises: ValueError if an argument is invalid, if the backend cannot run on these tensors, or if the mix does not
        allow mix_parameter or global_tokens.
    """
    check_inputs(q, k, v, key_padding_mask)
    block_size = check_block_size(block_size, q.shape[-1])
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if mix not in MIXES:
        raise ValueError(f"unknown mix '{mix}', choose from {', '.join(MIXES)}")
    if mix == "average":
        if mix_parameter is not None:
            raise ValueError(f"mix '{mix}' takes no mix_parameter")
        if global_tokens is not None:
            raise ValueError(f"mix '{mix}' has no global tokens, choose joint_offset")
        tensors = Inputs(q, k, v, padding=key_padding_mask)
        spec = Spec(AVERAGE, block_size, dropout_p)
        return _match_and_attend(spec, tensors, alpha, beta, backend, scope, constants)
    offset = scalar_per_head(0.0 if mix_parameter is None else mix_parameter, q, "mix_parameter")
    is_one_block = q.shape[2] <= block_size and backend == "auto" and q.is_cpu and not torch.is_grad_enabled()
    if is_one_block and not torch.jit.is_tracing():  # what is traced can run with longer sequences
        # In one block this is softmax, and the offset, α and β, which have no influence, need no gradient here.
        _check_matching(alpha, beta, scope, constants)
        return block_diag_attention(q, k, v, key_padding_mask, block_size, dropout_p)
    counts, max_global = count_global_tokens(global_tokens, max_global_tokens, q, k, v)
    tensors = Inputs(q, k, v, offset=offset, padding=key_padding_mask, global_counts=counts)
    spec = Spec(JOINT, block_size, dropout_p, max_global=max_global)
    return _match_and_attend(spec, tensors, alpha, beta, backend, scope, constants)


def lln_features(
    q: Tensor, k: Tensor, alpha: float | Tensor, beta: float | Tensor, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return A and W, the factors of the LLN matrix P = A Wᵀ, whose formulas are in the docstring of this module.

    Args:
        q, k: (B, H, N, D).
        alpha, beta: numbers, or tensors that broadcast to (B, H).
        key_padding_mask: bool (B, N), True = padded, or None.

    Returns: two tensors (B, H, N, D) in float32, or in float64 for float64 inputs. W is 0 for padding keys.
    Raises: ValueError if alpha or beta does not broadcast to (B, H). Nothing else is checked.
    """
    alpha = scalar_per_head(alpha, q, "alpha")
    beta = scalar_per_head(beta, q, "beta")
    heads = load_heads(Spec(LLN), Inputs(q, k, k, alpha, beta, padding=key_padding_mask))
    sums = sum_keys(heads)
    return query_features(heads, sums).view(q.shape), key_features(heads, sums).view(k.shape)


def _check_matching(alpha: object, beta: object, scope: str, constants: str) -> None:
    """Raise ValueError if only one of alpha and beta is None, or if both are and the options are unknown."""
    if (alpha is None) != (beta is None):
        raise ValueError("alpha and beta must be given together or not at all")
    if alpha is None:
        check_moment_options(scope, constants)


def _match_and_attend(
    spec: Spec,
    tensors: Inputs,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    backend: str,
    scope: str,
    constants: str,
) -> Tensor:
    """Find α and β, and compute the call.

    If α and β are to be matched per head with the shipped table, the backend does it, while it reads q and k anyway.
    """
    if (alpha is None) != (beta is None):
        raise ValueError("alpha and beta must be given together or not at all")
    q, k, *_ = tensors
    if alpha is not None and beta is not None:
        tensors = tensors._replace(alpha=scalar_per_head(alpha, q, "alpha"), beta=scalar_per_head(beta, q, "beta"))
    backend = choose_backend(backend, spec, tensors)
    backend_matches = backend != FORMULA and scope == "head" and constants == "calibrated"
    if alpha is None and not backend_matches:
        matched_alpha, matched_beta = match_moments_pytorch(q, k, tensors.padding, scope, constants)
        tensors = tensors._replace(alpha=matched_alpha, beta=matched_beta)
    return attend(spec, tensors, backend)
