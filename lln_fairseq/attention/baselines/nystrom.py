"""Nyströmformer: softmax attention through the softmax of a few landmarks (Xiong et al. 2021, arXiv 2102.03902)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.autocast import autocast_disabled
from lln_fairseq.ops.formula import clear_padding, compute_dtype, softmax_attention
from lln_fairseq.ops.landmarks import Landmarks, iterative_pinv


@dataclass
class NystromConfig:
    landmarks: int = option(
        64, "segment means of queries and keys; sequences of at most this length get exact softmax", at_least=1
    )
    iterations: int = option(6, "steps of the iterative pseudo-inverse", at_least=1)
    conv_kernel: int = option(
        0, "odd width of the depthwise convolution of the values, 33 in the paper; 0: no convolution", at_least=0
    )


@register_attention("nystrom", NystromConfig)
class NystromAttention(Attention):
    """Attention with P = softmax(q k̃ᵀ / √D) Z softmax(q̃ kᵀ / √D), where Z ≈ softmax(q̃ k̃ᵀ / √D)⁺ (Algorithm 1).

    The non-padding tokens of each sequence are divided into `landmarks` segments. The landmarks q̃ and k̃ are the means
    of the queries and of the keys of each segment. A sequence of at most `landmarks` tokens gets exact softmax
    attention: every token is a landmark, so that P would be S S⁺ S, which equals the softmax S.

    If conv_kernel is not 0, a convolution of v over the tokens is added to P v. Each head has its own kernel, and
    padded values count as 0. P is never formed, so attention dropout does not apply, as in the published code.

    Raises:
        ValueError: if conv_kernel is even and not 0.
    """

    config: NystromConfig
    rows_sum_to_one = False  # the damped pseudo-inverse preserves neither the signs nor the sums of rows

    def __init__(
        self, config: NystromConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        width = config.conv_kernel
        if width and width % 2 == 0:
            raise ValueError(f"conv_kernel must be odd, or 0 for no convolution, got {width}")
        self.conv = None
        if width:
            self.conv = nn.Conv2d(num_heads, num_heads, (width, 1), groups=num_heads, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        if q.shape[2] <= self.config.landmarks:
            out = softmax_attention(q, k, v, context.padding)
        else:
            out = self._landmark_attention(q, k, v, context.padding)
        if self.conv is None:
            return out
        return out + self._convolve(v, self.conv.weight)

    def _landmark_attention(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        """Compute P v without the convolution, for tensors with more tokens than landmarks.

        A sequence with at most `landmarks` non-padding tokens still gets exact softmax attention.
        """
        landmarks = Landmarks(q.shape[2], self.config.landmarks, padding, q.device)
        q_mean = landmarks.means(q)
        k_mean = landmarks.means(k)
        # The inverse amplifies rounding errors, so it and its product are computed in float32 in half precision, too.
        dtype = compute_dtype(q.dtype)
        with autocast_disabled(q):
            scores = (q_mean.to(dtype) * self.head_dim**-0.5) @ k_mean.to(dtype).mT
            inverse = iterative_pinv(scores.softmax(dim=-1), self.config.iterations)
            values = inverse @ softmax_attention(q_mean, k, v, padding).to(dtype)
        values = values.to(v.dtype)
        if landmarks.padding is not None:
            # The landmarks of a short sequence are its tokens. With their values, P is the exact softmax.
            values = torch.where(landmarks.is_short[:, None, None, None], landmarks.means(v), values)
        return softmax_attention(q, k_mean, values, landmarks.padding)

    def _convolve(self, v: Tensor, weight: Tensor) -> Tensor:
        """Compute Σ_t w_t v_{i + t - width // 2} with each head's kernel w, with zeros beyond both ends of v."""
        return F.conv2d(v, weight.to(v.dtype), padding=(self.config.conv_kernel // 2, 0), groups=self.num_heads)
