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


def balanced_features(log_phi_q: Tensor, log_phi_k: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rescale features φ to the range [0, 1] without changing the attention matrix P that they define.

    The features are passed as their logarithms x = log φ(q) and y = log φ(k). With L_f = logsumexp_j y_jf over the keys
    that are not padding, the rescaled features are

        A_if = softmax_f(x_if + L_f)    every row is a distribution over the features
        W_jf = exp(y_jf - L_f)          every column is a distribution over the tokens, 0 for padding keys

    Then P = A Wᵀ, as in LLN attention: for each feature, the factors e^L and e^-L cancel, and the normalizer of the
    softmax cancels when the rows of P are normalized. So nothing overflows, and no row of P loses all its precision. No
    gradient flows through L, because the normalized rows do not depend on it.

    Args:
        log_phi_q, log_phi_k: x and y, (B, H, N, F).
        padding: bool (B, N), True = padded, or None.

    Returns: A and W, both (B, H, N, F) in the dtype of the inputs. W is 0 for a sequence that is all padding.
    """
    if padding is not None:
        log_phi_k = log_phi_k.masked_fill(padding[:, None, :, None], float("-inf"))
    log_sums = log_phi_k.detach().logsumexp(dim=-2, keepdim=True)
    log_sums = log_sums.masked_fill(log_sums == float("-inf"), 0.0)  # if all keys are padding: W = 0 instead of NaN
    return (log_phi_q + log_sums).softmax(dim=-1), (log_phi_k - log_sums).exp()
