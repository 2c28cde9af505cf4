"""Linear attention with feature maps (paper, eq. 4)."""

from torch import Tensor

from lln_fairseq.ops.autocast import without_autocast
from lln_fairseq.ops.formula import compute_dtype


@without_autocast
def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
    """Compute out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_l φ(k_l), in time linear in N.

    The computation is in float32, or in float64 if v is float64.

    Args:
        phi_q, phi_k: the features φ(q) and φ(k), non-negative, (B, H, N, F).
        v: (B, H, N, D).
        padding: bool (B, N), True = padded, or None. Padding keys and their values do not influence the
            result, even if they are NaN.

    Returns: (B, H, N, D) in the dtype of v. A row is 0 if its normalizer is 0: all keys are padding, or no key has a
        feature in common with the query.
    """
    dtype = compute_dtype(v.dtype)
    phi_q = phi_q.to(dtype)
    phi_k = phi_k.to(dtype)
    values = v.to(dtype)
    if padding is not None:
        padded = padding[:, None, :, None]
        phi_k = phi_k.masked_fill(padded, 0.0)
        values = values.masked_fill(padded, 0.0)  # 0 times an infinite value would be NaN
    normalizer = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
    out = phi_q @ (phi_k.mT @ values)
    return (out / normalizer.masked_fill(normalizer == 0, 1.0)).to(v.dtype)
