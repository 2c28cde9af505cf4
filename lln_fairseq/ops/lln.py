"""Linear Log-Normal attention, alone and mixed with block-diagonal softmax: the public functions and their dispatch.

For every batch entry and head, with L_d = logsumexp_j(β k_jd) over the keys that are not padded:

    W_jd = exp(β k_jd - L_d)        A_id = softmax_d(α q_id + L_d)        LLN(q, k, v) = A (Wᵀ v)

which equals eq. 8 of the paper for every α and β: the columns of W are distributions over the tokens, the rows of A
over the features. The cost is linear in N. Nothing is divided by zero, and results and gradients are finite as long as
|α q| and |β k| are below 1e9 and q·k and v are finite in float32; matched α, β ensure that for |q|, |k| up to 1e15. NaN
and infinities stay in their head, and what padding holds gets nowhere: see padding.py. causal.py says what holds where
every token sees only itself and those before it.
"""

from dataclasses import replace

from torch import Tensor
from torch.distributed import ProcessGroup

from lln_fairseq.ops.autograd import hybrid_attention
from lln_fairseq.ops.backends import HybridSpec, choose_backend
from lln_fairseq.ops.causal import causal_attention, scaled
from lln_fairseq.ops.checks import check_block_size, check_dropout, check_inputs, per_head
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.exchange import create_exchange
from lln_fairseq.ops.linear_attention import balanced_features
from lln_fairseq.ops.moment_matching import match_moments

MIXES = ("average", "joint", "joint_offset")  # of LLN and block-diagonal softmax

IN_ONE_PASS = ("head", "calibrated")  # scope and constants that every backend can match while it reads q and k

LLN_ALONE = HybridSpec(1.0, 0.0)


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
    """LLN attention (paper, eq. 8): Σ_j <e^{αq_i}, e^{βk_j}> v_j / Σ_l <e^{αq_i}, e^{βk_l}>.

    There is no N x N matrix, so there is nothing to apply attention dropout to.

    Args:
        q, k, v: (B, H, N, D), any strides; computed in float32 (float64 for float64 inputs).
        alpha, beta: numbers or tensors that broadcast to (B, H); gradients flow to tensors that require them. None:
            `match_moments` of q and k, with `scope` and `constants`.
        key_padding_mask: bool (B, N), True = padded. A sequence without a real key gives 0.
        backend: "triton" for the fused kernels of a GPU (compute capability 8.0 or higher), "cpu" for those of a CPU
            (float32, compiled at first use), "torch" for everything else, "auto" for the kernels where they can run.
        group: workers that hold the sequences together: q, k, v are this worker's consecutive tokens of them, and the
            result is its part of that of the whole sequences. All workers of the group must call it, with any number of
            tokens each, and differentiate it, once. The gradients of α and β are this worker's parts; their sum over
            the workers is the gradient. What is exchanged does not depend on the number of tokens: see exchange.py.
        causal: both sums over j <= i and l <= i: no row sees a later token that is finite, and one before the first
            real key is 0. Linear in N as well, in PyTorch on every device, without a group, for |v| up to 1e28 in
            float32: see causal.py. α and β that are matched look ahead, for they are of the whole sequence;
            `running_moments` gives such that do not, as a language model needs them.

    Returns: (B, H, N, D) in the dtype of q, and in its memory layout where batch and heads are one dimension in it.
    Raises: ValueError for shapes, dtypes, masks or backends that do not fit. Differentiable any number of times.
    """
    check_inputs(q, k, v, key_padding_mask)
    exchange = create_exchange(group, q)
    alpha, beta = _alpha_beta(alpha, beta, q, k, key_padding_mask, scope, constants, group if exchange else None)
    if causal:
        if exchange is not None or backend not in ("auto", "torch"):
            raise ValueError(f"causal attention is computed by one worker, in PyTorch; got backend '{backend}'")
        if alpha is None or beta is None:
            alpha, beta = match_moments(q, k, key_padding_mask)
        return causal_attention(*scaled(q, k, v, alpha[..., None], beta[..., None], key_padding_mask)).to(q.dtype)
    backend = choose_backend(backend, q, None, k, v, alpha, beta, key_padding_mask)
    return hybrid_attention(q, k, v, alpha, beta, key_padding_mask, replace(LLN_ALONE, exchange=exchange), backend)


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
) -> Tensor:
    """½ (LLN + block-diagonal softmax) in one pass (paper, section 4.2 and figure 3), or a joint mix of both.

    In the joint mixes a row sums to 1 and has softmax's shape inside the query's block, LLN's outside it: up to one
    block of tokens they are softmax attention. With u the mass that LLN gives to the keys outside the block,

        joint           inside 1 - u, outside u
        joint_offset    inside and outside as 1 - u to e^o u, the outside at most 16 u

    Args: as `lln_attention` and `block_diag_attention`; dropout concerns the block-diagonal probabilities alone, since
    LLN has no matrix to drop from. With dropout the result can be differentiated once.
        mix: "average", "joint" or "joint_offset".
        mix_parameter: o of joint_offset in [-80, 80], None = 0: a number or a tensor that broadcasts to (B, H); values
            are not checked, and gradients flow to it. The other mixes take none.
        group: as `lln_attention`; all workers but the last must hold a multiple of block_size tokens, so that no block
            lies on two of them, and the mix must be the average.
    """
    check_inputs(q, k, v, key_padding_mask)
    block_size = check_block_size(block_size, q.shape[-1])
    check_dropout(dropout_p)
    offset = head_offsets(mix, mix_parameter, q)
    joint = offset is not None
    exchange = create_exchange(group, q, block_size)
    if joint and exchange:
        raise ValueError(f"mix '{mix}' cannot be computed over several workers, choose average")
    alpha, beta = _alpha_beta(alpha, beta, q, k, key_padding_mask, scope, constants, group if exchange else None)
    backend = choose_backend(backend, q, block_size, k, v, alpha, beta, offset, key_padding_mask)
    weight = 1.0 if joint else 0.5
    mixed = HybridSpec(weight, weight, block_size, dropout_p, joint=joint, parameter=offset, exchange=exchange)
    return hybrid_attention(q, k, v, alpha, beta, key_padding_mask, mixed, backend)


def lln_features(
    q: Tensor, k: Tensor, alpha: float | Tensor, beta: float | Tensor, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A and W of the formula above, each (B, H, N, D) in float32 or float64: P = A Wᵀ.

    W is 0 at padded keys, and all 0 for a sequence without a real key. Arguments as for `lln_attention`.
    """
    dtype = compute_dtype(q.dtype)
    x, y = (
        per_head(a, q, name)[..., None, None] * z.to(dtype) for a, z, name in ((alpha, q, "alpha"), (beta, k, "beta"))
    )
    return balanced_features(x, y, key_padding_mask)


def head_offsets(mix: str, offset: float | Tensor | None, q: Tensor) -> Tensor | None:
    """Return the offset o of every head, (B, H), for a joint mix, and None for the average."""
    if mix not in MIXES:
        raise ValueError(f"unknown mix '{mix}', choose from {', '.join(MIXES)}")
    if offset is not None and mix != "joint_offset":
        raise ValueError(f"mix '{mix}' takes no mix_parameter")
    if mix == "average":
        return None
    return per_head(0.0 if offset is None else offset, q, "mix_parameter")


def _alpha_beta(
    alpha: float | Tensor | None, beta: float | Tensor | None, q: Tensor, k: Tensor, mask: Tensor | None, scope: str,
    constants: str, group: ProcessGroup | None,
) -> tuple[Tensor, Tensor] | tuple[None, None]:  # fmt: skip
    """α and β of shape (B, H): what is given, else what matches. None twice: the backend matches in its own passes."""
    if (alpha is None) != (beta is None):
        raise ValueError("alpha and beta must be given together or not at all")
    if alpha is not None and beta is not None:
        return per_head(alpha, q, "alpha"), per_head(beta, q, "beta")
    if group is None and (scope, constants) == IN_ONE_PASS:
        return None, None
    return match_moments(q, k, mask, scope, constants, group=group)
