"""Linear attention with feature maps (paper, eq. 4)."""

from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype, without_autocast


@without_autocast
def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Compute out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_l φ(k_l), in time linear in N.

    Args:
        phi_q, phi_k: non-negative features (B, H, N, F).
        v: (B, H, N, D). Everything is computed in float32 (float64 for float64 v).
        key_padding_mask: bool (B, N), True = padded, or None. Padded keys and values are left out, and may hold NaN.

    Returns: (B, H, N, D) in the dtype of v; 0 where the normalizer is 0 (no real key, or no feature in common).
    """
    dtype = compute_dtype(v.dtype)
    phi_q = phi_q.to(dtype)
    phi_k = phi_k.to(dtype)
    values = v.to(dtype)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        phi_k = phi_k.masked_fill(padded, 0.0)
        values = values.masked_fill(padded, 0.0)  # 0 · inf in a padded row would be NaN
    normalizer = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
    out = phi_q @ (phi_k.mT @ values)
    return (out / normalizer.masked_fill(normalizer == 0, 1.0)).to(v.dtype)


def balanced_features(
    log_phi_q: Tensor, log_phi_k: Tensor, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return features in [0, 1] that give the same attention matrix as features given by their logarithms.

    With x = log φ(q), y = log φ(k) and L_f = logsumexp_j y_jf over the real keys, they are

        A_if = softmax_f(x_if + L_f)    every row is a distribution over the features
        W_jf = exp(y_jf - L_f)          every column is a distribution over the tokens, 0 for padded keys

    P = A Wᵀ, as in LLN attention: the factor e^L cancels for each feature, and the rest for each query. So nothing
    overflows, and no row of P loses all its digits. No gradient flows through L: normalized rows do not depend on it.

    Args:
        log_phi_q, log_phi_k: (B, H, N, F).
        key_padding_mask: bool (B, N), True = padded, or None.

    Returns: A and W, both (B, H, N, F) in the dtype of the inputs; W is 0 for a sequence without a real key.
    """
    if key_padding_mask is not None:
        log_phi_k = log_phi_k.masked_fill(key_padding_mask[:, None, :, None], float("-inf"))
    log_sums = log_phi_k.detach().logsumexp(dim=-2, keepdim=True)
    log_sums = log_sums.masked_fill(log_sums == float("-inf"), 0.0)  # without a real key: W = 0 instead of NaN
    return (log_phi_q + log_sums).softmax(dim=-1), (log_phi_k - log_sums).exp()
