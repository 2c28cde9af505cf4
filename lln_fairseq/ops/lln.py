"""Linear Log-Normal attention and LLN+Diag: the public functions.

For every sequence and head, with L_d = logsumexp_j(β k_jd) over the real keys,

    W_jd = exp(β k_jd - L_d)        A_id = softmax_d(α q_id + L_d)        LLN(q, k, v) = A (Wᵀ v)

which equals eq. 8 of the paper for every α and β, at a cost linear in N.

Why this form: the columns of W are distributions over the tokens, and the rows of A are distributions over the
features, so no divisor is ever 0.

Numerical range: results and gradients are finite as long as |α q| and |β k| are below 1e9 and q·k and v are finite in
float32. With matched α and β this holds for |q|, |k| up to 1e15. causal.py states the limits of the causal form.

NaN and padding: NaN and infinity never spread to another head, and padded values never reach a real token (padding.py).
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from lln_fairseq.ops.autograd import hybrid_attention
from lln_fairseq.ops.backends import HybridSpec, choose_backend
from lln_fairseq.ops.causal import causal_attention, scale_inputs
from lln_fairseq.ops.checks import check_block_size, check_dropout, check_inputs, per_head
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.exchange import create_exchange
from lln_fairseq.ops.global_tokens import attend_from_global_tokens, check_global_tokens
from lln_fairseq.ops.linear_attention import balanced_features
from lln_fairseq.ops.moment_matching import match_moments

KERNEL_MIXES = ("average", "joint", "joint_offset")  # formulas that combine LLN and block-diagonal softmax


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
    group: ProcessGroup | None = None,
    causal: bool = False,
) -> Tensor:
    """Compute LLN attention (paper, eq. 8): Σ_j <e^{αq_i}, e^{βk_j}> v_j / Σ_l <e^{αq_i}, e^{βk_l}>.

    It never forms the N x N matrix, so there is no attention dropout.

    Args:
        q, k, v: (B, H, N, D), any strides; computed in float32 (float64 for float64 inputs).
        alpha, beta: numbers, or tensors that broadcast to (B, H) and may require gradients. If both are None,
            `match_moments` computes them with `scope` and `constants`.
        key_padding_mask: bool (B, N), True = padded. A sequence without a real key gives 0.
        backend: "triton" = GPU kernels (compute capability 8.0 or higher); "cpu" = C kernels (float32, compiled at
            first use); "torch" = PyTorch on any device; "auto" = the device's kernels if they can run, else PyTorch.
        scope, constants: as for `match_moments`; used only if alpha and beta are None.
        group: process group whose workers each hold consecutive tokens of the same sequences. q, k, v and the result
            are this worker's part. All workers of the group must make the call and its backward pass, with any number
            of tokens each. The result can be differentiated once. The gradients of α and β are this worker's terms of
            a sum over the workers. The data exchanged does not grow with the number of tokens (see exchange.py).
        causal: if True, token i attends only to tokens up to i. Rows before the first real key are 0. Computed in
            PyTorch on every device, without a group, for |v| up to 1e28 in float32. Later tokens have no influence if
            they are finite and α and β are given. Without them, α and β are matched to the whole sequence, which
            leaks later tokens. A language model needs one pair per token: `running_moments`, `causal.scale_inputs`.

    Returns: (B, H, N, D) in the dtype of q, and with the strides of q if its batch and heads can be viewed as one
        dimension. Without a group it can be differentiated any number of times.
    Raises: ValueError for invalid arguments, or if the backend cannot run on these tensors.
    """
    check_inputs(q, k, v, key_padding_mask)
    exchange = create_exchange(group, q)
    if exchange is None:
        group = None
    alpha, beta = _resolve_alpha_beta(alpha, beta, q, k, key_padding_mask, scope, constants, group)
    if causal:
        if exchange is not None:
            raise ValueError("causal attention cannot be computed over several workers: call it without a group")
        if backend not in ("auto", "torch"):
            raise ValueError(f"backend of causal attention must be auto or torch, got '{backend}'")
        if alpha is None or beta is None:
            alpha, beta = match_moments(q, k, key_padding_mask)
        x, y, values = scale_inputs(q, k, v, alpha[..., None], beta[..., None], key_padding_mask)
        return causal_attention(x, y, values).to(q.dtype)
    backend = choose_backend(backend, q, None, k, v, alpha, beta, key_padding_mask)
    spec = HybridSpec(lln_weight=1.0, diag_weight=0.0, exchange=exchange)
    return hybrid_attention(q, k, v, alpha, beta, key_padding_mask, spec, backend)


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
    group: ProcessGroup | None = None,
    global_tokens: int | Tensor | None = None,
) -> Tensor:
    """Compute LLN+Diag, a hybrid of LLN and block-diagonal softmax attention (paper, section 4.2 and figure 3).

    "average" is ½ (LLN + block-diagonal softmax), as in the paper. The joint mixes use softmax weights inside the
    query's block and LLN weights outside it, normalized together so that each row sums to 1. A sequence of at most one
    block gets plain softmax attention. Let u be LLN's share of the keys outside the block:

        joint           weighs inside : outside as (1 - u) : u
        joint_offset    weighs inside : outside as (1 - u) : e^o u, with the outside weight capped at 16 u

    Args:
        q, k, v, alpha, beta, key_padding_mask, backend, scope, constants: as for `lln_attention`.
        block_size: tokens in a block; None = D.
        dropout_p: probability of dropping a block-diagonal attention weight; LLN has no matrix to drop from.
        mix: "average", "joint" or "joint_offset".
        mix_parameter: o for "joint_offset", a number or a tensor that broadcasts to (B, H) and may require a gradient;
            None = 0. Its values must be in [-80, 80], which is not checked. The other mixes take only None.
        group: as for `lln_attention`, only with the mix "average". All workers but the last must hold a multiple of
            block_size tokens, so that no block lies on two workers.
        global_tokens: how many tokens at the start of every sequence are global, only with a joint mix: one number, or
            an integer tensor (B,), where more than N counts as N. As keys, they are inside for every query, beside its
            block. As queries, they attend to all keys by softmax. With at most M global tokens in a sequence and blocks
            of S, the cost is that of N (S + M) scores. A tensor on a GPU makes the host wait for its largest value;
            one on the CPU does not.

    Returns: as `lln_attention`. With dropout, the result can be differentiated once.
    Raises: ValueError for invalid arguments, or if the backend cannot run on these tensors.
    """
    check_inputs(q, k, v, key_padding_mask)
    block_size = check_block_size(block_size, q.shape[-1])
    check_dropout(dropout_p)
    offset = head_offsets(mix, mix_parameter, q)
    is_joint = offset is not None
    global_counts, max_global_count = check_global_tokens(global_tokens, mix, q, k, v)
    exchange = create_exchange(group, q, block_size)
    if exchange is None:
        group = None
    elif is_joint:
        raise ValueError(f"mix '{mix}' cannot be computed over several workers, choose average")
    alpha, beta = _resolve_alpha_beta(alpha, beta, q, k, key_padding_mask, scope, constants, group)
    inputs = (k, v, alpha, beta, offset, key_padding_mask, global_counts)
    backend = choose_backend(backend, q, block_size, *inputs, max_global_tokens=max_global_count)
    weight = 1.0 if is_joint else 0.5
    spec = HybridSpec(
        weight,
        weight,
        block_size,
        dropout_p,
        joint=is_joint,
        offset=offset,
        exchange=exchange,
        global_tokens=global_counts,
        max_global_tokens=max_global_count,
    )
    out = hybrid_attention(q, k, v, alpha, beta, key_padding_mask, spec, backend)
    if global_counts is None:
        return out
    return attend_from_global_tokens(out, q, k, v, key_padding_mask, global_counts, max_global_count, dropout_p)


def lln_features(
    q: Tensor, k: Tensor, alpha: float | Tensor, beta: float | Tensor, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return A and W, the factors of the LLN matrix P = A Wᵀ that the module's docstring defines.

    The arguments are those of `lln_attention`; they are not checked.

    Returns: two tensors (B, H, N, D) in float32 (float64 for float64 inputs). W is 0 at padded keys, and everywhere for
        a sequence without a real key.
    """
    dtype = compute_dtype(q.dtype)
    x = per_head(alpha, q, "alpha")[..., None, None] * q.to(dtype)
    y = per_head(beta, q, "beta")[..., None, None] * k.to(dtype)
    return balanced_features(x, y, key_padding_mask)


def head_offsets(mix: str, offset: float | Tensor | None, q: Tensor) -> Tensor | None:
    """Return the offset o of every head, (B, H), for a joint mix, and None for the mix "average".

    For a joint mix, an offset of None counts as 0. q is (B, H, N, D). Raises ValueError for an unknown mix, for an
    offset with a mix other than "joint_offset", and for an offset that does not broadcast to (B, H).
    """
    if mix not in KERNEL_MIXES:
        raise ValueError(f"unknown mix '{mix}', choose from {', '.join(KERNEL_MIXES)}")
    if offset is not None and mix != "joint_offset":
        raise ValueError(f"mix '{mix}' takes no mix_parameter")
    if mix == "average":
        return None
    return per_head(0.0 if offset is None else offset, q, "mix_parameter")


def _resolve_alpha_beta(
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scope: str,
    constants: str,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return α and β, (B, H): the given ones, or if both are None those that moment matching chooses for q and k.

    With scope "head", the constants "calibrated" and no process group, None is returned for both: the backend then
    matches the moments itself, in the passes over q and k that it makes in any case.
    Raises ValueError if only one of them is None.
    """
    if (alpha is None) != (beta is None):
        raise ValueError("alpha and beta must be given together or not at all")
    if alpha is not None and beta is not None:
        return per_head(alpha, q, "alpha"), per_head(beta, q, "beta")
    if group is None and scope == "head" and constants == "calibrated":
        return None, None
    return match_moments(q, k, mask, scope, constants, group=group)
