"""What linear attentions with explicit features share (arXiv 2311.13541, eq. 4)."""

from torch import Tensor

from lln_fairseq.attention.registry import Attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.linear_attention import linear_attention
from lln_fairseq.ops.padding import clear_padding


class KernelFeatureAttention(Attention):
    """P_ij = φ(q_i)·φ(k_j) / Σ_l φ(q_i)·φ(k_l) in linear time; a subclass says what φ >= 0 is.

    It has no attention matrix, so attention dropout does not apply. A query that has no feature in common with any key
    gives 0.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        return linear_attention(*self.feature_maps(q, k, key_padding_mask), v, key_padding_mask)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return reference.kernel_matrix(*self.feature_maps(q, k, key_padding_mask), key_padding_mask)

    def feature_maps(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q.dtype)
        return self.features(q.to(dtype)), self.features(k.to(dtype))

    @staticmethod
    def features(x: Tensor) -> Tensor:
        """φ of queries or keys (B, H, N, D) in float32 or float64, (B, H, N, F)."""
        raise NotImplementedError
