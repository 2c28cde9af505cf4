"""cosFormer: ReLU features reweighted by the distance of the tokens (Qin et al. 2022, arXiv 2202.08791)."""

import math

import torch
from torch import Tensor

from lln_fairseq.attention.kernel_features import KernelFeatureAttention
from lln_fairseq.attention.registry import register_attention
from lln_fairseq.ops.dtypes import compute_dtype


@register_attention("cosformer")
class CosformerAttention(KernelFeatureAttention):
    """P_ij ∝ ReLU(q_i)·ReLU(k_j) cos(π/2 · (i - j)/M), by the features [ReLU(x) cos θ_i, ReLU(x) sin θ_i].

    θ_i = π/2 · i/M (cos-based re-weighting, section 3). M is the number of real tokens of the sequence, as in the
    authors' code for one without padding, and i counts them from 0: the weights of a sentence depend neither on its
    batch nor on its padding.
    """

    def feature_maps(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q.dtype)
        angles = self._angles(q, key_padding_mask).to(dtype)
        waves = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (B or 1, 1, N, 2), all >= 0
        phi_q, phi_k = ((x.to(dtype).relu()[..., None, :] * waves[..., None]).flatten(-2) for x in (q, k))
        return phi_q, phi_k

    @staticmethod
    def _angles(q: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """θ in [0, π/2) of every token, (B or 1, 1, N); that of a padded one is finite and means nothing."""
        real = q.new_ones(1, q.shape[-2], dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
        position = (real.cumsum(dim=1) - 1).clamp(min=0)
        count = real.sum(dim=1, keepdim=True).clamp(min=1)
        return (math.pi / 2 * (position.double() / count))[:, None]
