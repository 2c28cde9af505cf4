"""Skyformer: a Gaussian kernel in place of softmax, by the Nyström method (Chen et al. 2021, arXiv 2111.00035)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.landmarks import iterative_pinv
from lln_fairseq.ops.padding import clear_padding


@dataclass
class SkyformerConfig:
    landmarks: int = option(64, "tokens sampled of the queries, and as many of the keys", at_least=1)
    gamma: float = option(0.1, "γ, added to the diagonal of the landmarks' kernel matrix")
    iterations: int = option(6, "steps of the iterative inverse", at_least=1)


@register_attention("skyformer", SkyformerConfig)
class SkyformerAttention(Attention):
    """P = κ(q, s) M⁻¹ κ(s, k),  M = κ(s, s) + γ I,  κ(x, y) = exp(-|x - y|² / 2√D)  (section 4).

    The landmarks s are queries and keys of the same sentence at sampled positions: one of each of `landmarks` equal
    stretches of its real tokens, drawn anew while training, the middle one in evaluation. M is inverted as the authors
    do, by products, after dividing its rows and columns by the roots of their sums.

    P has no normaliser: a key far from all landmarks counts for nothing, and so does attention to it. There are no
    probabilities to drop, so attention dropout does not apply. Distances are taken in float32: in half precision the
    difference of two squares would be noise.
    """

    config: SkyformerConfig
    stochastic_rows = False

    def __init__(
        self, config: SkyformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        if config.gamma <= 0:
            raise ValueError(f"gamma must be positive, got {config.gamma}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        dtype = compute_dtype(v.dtype)
        scale = self.head_dim**-0.25
        with torch.autocast(q.device.type, enabled=False):
            q, k, values = q.to(dtype) * scale, k.to(dtype) * scale, v.to(dtype)
            q, k, values = clear_padding(q, k, values, key_padding_mask)
            rows = self.positions(q, key_padding_mask)[:, None, :, None].expand(-1, self.num_heads, -1, self.head_dim)
            landmarks = torch.cat([q.gather(2, rows), k.gather(2, rows)], dim=2)
            kernel = gaussian_kernel(landmarks, landmarks)
            kernel = kernel + self.config.gamma * torch.eye(kernel.shape[-1], dtype=dtype, device=q.device)
            root = kernel.sum(dim=-1, keepdim=True).rsqrt()
            inverse = iterative_pinv(root * kernel * root.mT, self.config.iterations)
            context = root * (inverse @ (root * (gaussian_kernel(landmarks, k) @ values)))
            return (gaussian_kernel(q, landmarks) @ context).to(v.dtype)

    def positions(self, q: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The tokens (B, landmarks) to sample: one of each stretch of the real ones; some twice if those are few."""
        (batch, _, length, _), count = q.shape, self.config.landmarks
        within = torch.rand(batch, count, device=q.device) if self.training else 0.5
        stretch = (torch.arange(count, device=q.device) + within) / count
        if key_padding_mask is None:
            return (stretch * length).long().clamp(max=length - 1).expand(batch, -1)
        tokens = (~key_padding_mask).sum(dim=1, keepdim=True)
        real_first = key_padding_mask.to(torch.uint8).argsort(dim=1, stable=True)
        return real_first.gather(1, (stretch * tokens).long().minimum(tokens - 1).clamp(min=0))

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P, by distances taken one by one and the inverse on the eigenvalues of the scaled M."""

        def kappa(x: Tensor, y: Tensor) -> Tensor:
            return torch.exp(-(torch.cdist(x, y) ** 2) / (2 * self.head_dim**0.5))

        positions = self.positions(q, key_padding_mask)
        matrices = []
        for b in range(q.shape[0]):
            s = torch.cat([q[b][:, positions[b]], k[b][:, positions[b]]], dim=1)
            m = kappa(s, s) + self.config.gamma * torch.eye(s.shape[1], dtype=q.dtype, device=q.device)
            root = m.sum(dim=-1).sqrt()
            scaled = m / (root[:, :, None] * root[:, None, :])
            values, vectors = torch.linalg.eigh(scaled)
            z = values / scaled.sum(dim=-1).amax(dim=-1, keepdim=True) ** 2
            for _ in range(self.config.iterations):
                z = z * (13 - values * z * (15 - values * z * (7 - values * z))) / 4
            inverse = (vectors * z[:, None, :]) @ vectors.mT / (root[:, :, None] * root[:, None, :])
            matrices.append(kappa(q[b], s) @ inverse @ kappa(s, k[b]))
        matrix = torch.stack(matrices)
        return matrix if key_padding_mask is None else matrix.masked_fill(key_padding_mask[:, None, None, :], 0.0)


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_i - y_j|² / 2), (..., N, D), (..., M, D) -> (..., N, M)."""
    squares = 0.5 * (x.square().sum(dim=-1, keepdim=True) + y.square().sum(dim=-1).unsqueeze(-2))
    # Rounding may leave a negative square of a distance.
    return (x @ y.mT - squares).clamp(max=0.0).exp()
