"""Kernel-feature attention in linear time, shared by every mechanism that is a feature map (paper, eq. 4)."""

from torch import Tensor

from lln_fairseq.ops.dtypes import compute_dtype, without_autocast


@without_autocast
def linear_attention(phi_q: Tensor, phi_k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_l φ(k_l), both sums over the keys that are not padded.

    Args:
        phi_q, phi_k: non-negative features (B, H, N, F); v: (B, H, N, D). Summed and divided in float32 or float64.
        key_padding_mask: bool (B, N), True = padded.

    Returns: (B, H, N, D) in the dtype of v; 0 where the normaliser is 0 (no real key, or no feature in common).
    """
    dtype = compute_dtype(v.dtype)
    phi_q, phi_k, values = phi_q.to(dtype), phi_k.to(dtype), v.to(dtype)
    if key_padding_mask is not None:
        padded = key_padding_mask[:, None, :, None]
        # v too: 0 · inf in a padded row would be NaN.
        phi_k, values = phi_k.masked_fill(padded, 0.0), values.masked_fill(padded, 0.0)
    normaliser = phi_q @ phi_k.sum(dim=-2).unsqueeze(-1)
    out = phi_q @ (phi_k.mT @ values)
    return (out / normaliser.masked_fill(normaliser == 0, 1.0)).to(v.dtype)


def balanced_features(
    log_phi_q: Tensor, log_phi_k: Tensor, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Features in [0, 1] with the attention matrix of those given by their logarithms x, y (B, H, N, F).

    With L_f = logsumexp_j y_jf over the keys that are not padded:

        A_if = softmax_f(x_if + L_f)    each row a distribution over the features
        W_jf = exp(y_jf - L_f)          each column a distribution over the tokens, 0 for padded keys

    P = A Wᵀ, as in LLN attention: the factor e^L cancels feature by feature, the rest query by query, so nothing
    overflows and no row of P loses all its digits. For the same reason L needs no gradient once rows are normalised.
    """
    if key_padding_mask is not None:
        log_phi_k = log_phi_k.masked_fill(key_padding_mask[:, None, :, None], float("-inf"))
    log_sums = log_phi_k.detach().logsumexp(dim=-2, keepdim=True)
    log_sums = log_sums.masked_fill(log_sums == float("-inf"), 0.0)  # no real key: W = 0
    return (log_phi_q + log_sums).softmax(dim=-1), (log_phi_k - log_sums).exp()
