"""Skyformer: a Gaussian kernel in place of softmax, with the Nyström method (Chen et al. 2021, arXiv 2111.00035)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.autocast import autocast_disabled
from lln_fairseq.ops.formula import clear_padding, compute_dtype
from lln_fairseq.ops.landmarks import iterative_pinv


@dataclass
class SkyformerConfig:
    landmarks: int = option(64, "tokens whose queries and keys are the landmarks", at_least=1)
    gamma: float = option(0.1, "γ, added to the diagonal of the landmarks' kernel matrix")
    iterations: int = option(6, "steps of the iterative inverse", at_least=1)


@register_attention("skyformer", SkyformerConfig)
class SkyformerAttention(Attention):
    """Attention with P = κ(q, s) M⁻¹ κ(s, k), where M = κ(s, s) + γ I and κ(x, y) = exp(-|x - y|² / 2√D) (section 4).

    The landmarks s are the queries and the keys at certain positions of the same sequence. To choose the positions, the
    non-padding tokens are divided into `landmarks` equal segments. Training takes a random token of each segment,
    evaluation its middle token. As in the authors' code, the rows and columns of M are first divided by the square
    roots of their sums, and then M is inverted by matrix products.

    P has no normalizer: a key far from all landmarks gets no weight. There are no probabilities, so attention dropout
    does not apply. Everything is computed in float32 (float64 for float64 values), because half precision would round
    away the small differences of squares.

    Raises:
        ValueError: if gamma is not positive.
    """

    config: SkyformerConfig
    rows_sum_to_one = False

    def __init__(
        self, config: SkyformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        if config.gamma <= 0:
            raise ValueError(f"gamma must be positive, got {config.gamma}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        out_dtype = v.dtype
        dtype = compute_dtype(out_dtype)
        scale = self.head_dim**-0.25
        with autocast_disabled(q):
            q = q.to(dtype) * scale
            k = k.to(dtype) * scale
            v = v.to(dtype)
            q, k, v = clear_padding(q, k, v, context.padding)
            index = self.landmark_positions(q, context.padding)[:, None, :, None]
            index = index.expand(-1, self.num_heads, -1, self.head_dim)
            landmarks = torch.cat([q.gather(2, index), k.gather(2, index)], dim=2)
            kernel = gaussian_kernel(landmarks, landmarks)
            kernel = kernel + self.config.gamma * torch.eye(kernel.shape[-1], dtype=dtype, device=q.device)
            inverse_root = kernel.sum(dim=-1, keepdim=True).rsqrt()
            inverse = iterative_pinv(inverse_root * kernel * inverse_root.mT, self.config.iterations)
            weighted = inverse_root * (inverse @ (inverse_root * (gaussian_kernel(landmarks, k) @ v)))
            return (gaussian_kernel(q, landmarks) @ weighted).to(out_dtype)

    def landmark_positions(self, q: Tensor, padding: Tensor | None = None) -> Tensor:
        """Choose one position in each segment of the sequence, int64 (B, landmarks) in ascending order.

        During training each is random within its segment, otherwise it is the middle. If a sequence has fewer
        non-padding tokens than landmarks, positions repeat. A sequence that contains only padding gets 0. Of q, only
        the shape and device matter.
        """
        batch, _, length, _ = q.shape
        num_landmarks = self.config.landmarks
        offset: float | Tensor = 0.5
        if self.training:
            offset = torch.rand(batch, num_landmarks, device=q.device)
        fraction = (torch.arange(num_landmarks, device=q.device) + offset) / num_landmarks
        if padding is None:
            return (fraction * length).long().clamp(max=length - 1).expand(batch, -1)
        num_real = (~padding).sum(dim=1, keepdim=True)
        real_first = padding.to(torch.uint8).argsort(dim=1, stable=True)
        return real_first.gather(1, (fraction * num_real).long().minimum(num_real - 1).clamp(min=0))


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """Compute exp(-|x_i - y_j|² / 2) for x (..., N, D) and y (..., M, D). The result (..., N, M) is at most 1."""
    squares = 0.5 * (x.square().sum(dim=-1, keepdim=True) + y.square().sum(dim=-1).unsqueeze(-2))
    # Rounding can make a squared distance negative.
    return (x @ y.mT - squares).clamp(max=0.0).exp()
