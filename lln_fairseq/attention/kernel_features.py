"""Base class of linear attentions that are defined by a feature map (arXiv 2311.13541, eq. 4)."""

from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.formula import clear_padding, compute_dtype
from lln_fairseq.ops.linear_attention import linear_attention


class KernelFeatureAttention(Attention):
    """Linear attention with P_ij = φ(q_i)·φ(k_j) / Σ_l φ(q_i)·φ(k_l), for a non-negative feature map φ.

    A subclass defines φ in `features`, or overrides `linear_features` if φ depends on the position of the token. The
    cost is linear in the number of tokens. P is never formed, so attention dropout does not apply. If the features of a
    query are orthogonal to the features of all keys, its output is 0.
    """

    def features(self, x: Tensor) -> Tensor:
        """Compute φ(x), (B, H, N, F), of queries or keys x (B, H, N, D) in float32 or float64. It must not be negative.

        The subclass chooses F. The result has the dtype of x, whose values at padding are arbitrary.
        """
        raise NotImplementedError

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        phi_q, phi_k = self.linear_features(q, k, context)
        return linear_attention(phi_q, phi_k, v, context.padding)

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        phi_q, phi_k = self.linear_features(q, k, context)
        return reference.kernel_matrix(phi_q, phi_k, context.padding)

    def feature_maps(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor] | None:
        return self.linear_features(q, k, context)

    def linear_features(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        """Compute φ(q) and φ(k), each (B, H, N, F), in float32, or in float64 for float64 inputs."""
        dtype = compute_dtype(q.dtype)
        phi_q = self.features(q.to(dtype))
        phi_k = self.features(k.to(dtype))
        return phi_q, phi_k
