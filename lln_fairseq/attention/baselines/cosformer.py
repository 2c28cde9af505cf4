"""cosFormer: ReLU features, reweighted by the distance between the tokens (Qin et al. 2022, arXiv 2202.08791)."""

import math

import torch
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention
from lln_fairseq.ops.formula import compute_dtype


@register_attention("cosformer")
class CosformerAttention(KernelFeatureAttention):
    """Linear attention with P_ij ∝ ReLU(q_i)·ReLU(k_j) cos(π/2 · (i - j)/M), the cos-based reweighting of section 3.

    The features of token i are [ReLU(x) cos θ_i, ReLU(x) sin θ_i] with θ_i = π/2 · i/M. M is the number of tokens of
    the sequence without its padding, and i counts these tokens from 0. The weights of a sequence therefore depend
    neither on the other sequences of the batch nor on the padding. Without padding they agree with the authors' code.
    """

    def linear_features(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q.dtype)
        angles = self._angles(q, context.padding).to(dtype)
        waves = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (B or 1, 1, N, 2), never negative

        def reweighted(x: Tensor) -> Tensor:
            return (x.to(dtype).relu()[..., None, :] * waves[..., None]).flatten(-2)

        return reweighted(q), reweighted(k)

    @staticmethod
    def _angles(q: Tensor, padding: Tensor | None) -> Tensor:
        """Return the angle θ_i of every token, in [0, π/2), float64 (B, 1, N), or (1, 1, N) without a mask.

        The angles of padding tokens are finite but meaningless. Of q, only the shape and device are used.
        """
        is_real = q.new_ones(1, q.shape[-2], dtype=torch.bool)
        if padding is not None:
            is_real = ~padding
        position = (is_real.cumsum(dim=1) - 1).clamp(min=0)
        num_real = is_real.sum(dim=1, keepdim=True).clamp(min=1)
        return (math.pi / 2 * (position.double() / num_real))[:, None]
