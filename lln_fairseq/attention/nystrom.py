"""Nyströmformer: softmax attention through the softmax of a few landmarks (Xiong et al. 2021, arXiv 2102.03902)."""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.landmarks import Landmarks, iterative_pinv
from lln_fairseq.ops.padding import clear_padding, explicit_mask
from lln_fairseq.ops.softmax import softmax_attention


@dataclass
class NystromConfig:
    landmarks: int = option(
        64, "segment means of queries and keys; shorter sentences get exact softmax attention", at_least=1
    )
    iterations: int = option(6, "steps of the iterative pseudo-inverse", at_least=1)
    conv_kernel: int = option(
        0, "odd width of the depthwise convolution of the values, 33 in the paper; 0: none", at_least=0
    )


@register_attention("nystrom", NystromConfig)
class NystromAttention(Attention):
    """P = softmax(q k̃ᵀ / √D) Z softmax(q̃ kᵀ / √D), Z ≈ softmax(q̃ k̃ᵀ / √D)⁺ (Algorithm 1), q̃ and k̃ segment means.

    Segments are of the real tokens of each sentence. A sentence of at most `landmarks` tokens is its own landmarks; its
    P would be S S⁺ S = S, and is computed as S, the softmax. The convolution adds a band of weights to P, one for each
    head, and sees padded values as 0.

    The product of three matrices is never formed, so attention dropout does not apply, as in the published code.
    """

    config: NystromConfig
    stochastic_rows = False  # the pseudo-inverse keeps neither signs nor, damped as it is, sums

    def __init__(
        self, config: NystromConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        width = config.conv_kernel
        if width and width % 2 == 0:
            raise ValueError(f"conv_kernel must be odd, or 0 for none, got {width}")
        self.conv = nn.Conv2d(num_heads, num_heads, (width, 1), groups=num_heads, bias=False) if width else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        if q.shape[2] <= self.config.landmarks:
            out = softmax_attention(q, k, v, key_padding_mask)
        else:
            out = self._through_landmarks(q, k, v, key_padding_mask)
        return out if self.conv is None else out + self._convolve(v, self.conv.weight)

    def _through_landmarks(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        landmarks = Landmarks(q.shape[2], self.config.landmarks, key_padding_mask, q.device)
        q_mean, k_mean = landmarks.means(q), landmarks.means(k)
        # The inverse amplifies rounding: it and its product are float32 in half precision too.
        dtype = compute_dtype(q.dtype)
        with torch.autocast(q.device.type, enabled=False):
            scores = (q_mean.to(dtype) * self.head_dim**-0.5) @ k_mean.to(dtype).mT
            inverse = iterative_pinv(scores.softmax(dim=-1), self.config.iterations)
            values = inverse @ softmax_attention(q_mean, k, v, key_padding_mask).to(dtype)
        values = values.to(v.dtype)
        if landmarks.padding is not None:
            values = torch.where(landmarks.is_short[:, None, None, None], landmarks.means(v), values)
        return softmax_attention(q, k_mean, values, landmarks.padding)

    def _convolve(self, v: Tensor, weight: Tensor) -> Tensor:
        """Σ_t w_t v_{i + t - width // 2} for each head; zeros beyond the ends, as in padding."""
        return F.conv2d(v, weight.to(v.dtype), padding=(self.config.conv_kernel // 2, 0), groups=self.num_heads)

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P, by segments cut out one by one and the iteration on the singular values."""
        batch, heads, length, _ = q.shape
        matrix = q.new_zeros(batch, heads, length, length)
        padding = explicit_mask(key_padding_mask, q)
        for b in range(batch):
            if (tokens := (~padding[b]).nonzero()[:, 0]).numel():
                matrix[b, :, :, tokens] = self._sentence_matrix(q[b], k[b], tokens)
        if self.conv is not None:
            band = reference.band_matrix(self.conv.weight.detach()[:, 0, :, 0].to(q.dtype), length)
            matrix = matrix + band * ~padding[:, None, None, :]
        return matrix

    def _sentence_matrix(self, q: Tensor, k: Tensor, tokens: Tensor) -> Tensor:
        """The columns (H, N, n) of the n real tokens, for one sentence q, k (H, N, D)."""

        def softmax(x: Tensor, y: Tensor) -> Tensor:
            return (x @ y.mT / self.head_dim**0.5).softmax(dim=-1)

        count, real = self.config.landmarks, len(tokens)
        if real <= count:
            return softmax(q, k[:, tokens])
        ends = [-(-j * real // count) for j in range(count + 1)]
        pieces = [tokens[start:end] for start, end in itertools.pairwise(ends)]
        q_mean, k_mean = (torch.stack([x[:, piece].mean(dim=1) for piece in pieces], dim=1) for x in (q, k))
        a = softmax(q_mean, k_mean)
        u, sigma, vh = torch.linalg.svd(a)
        z = sigma / a.sum(dim=1).amax(dim=-1, keepdim=True)
        for _ in range(self.config.iterations):
            z = z * (13 - sigma * z * (15 - sigma * z * (7 - sigma * z))) / 4
        return softmax(q, k_mean) @ (vh.mT * z[:, None, :]) @ u.mT @ softmax(q_mean, k[:, tokens])
