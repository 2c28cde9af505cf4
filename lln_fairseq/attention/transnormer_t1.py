"""TransNormer T1: ReLU attention in blocks in early layers, normalised linear attention with φ = elu in later ones.

Qin et al. 2022, "The Devil in Linear Transformer", arXiv 2210.10340; details as in the authors' code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.padding import clear_padding
from lln_fairseq.ops.transnormer import block_relu_attention, norm_attention


@dataclass
class TransNormerConfig:
    block_size: int = option(64, "tokens in a block of the local layers", at_least=1)
    local_layers: int | None = option(
        None, "layers with local attention, the first ones; default: half of them", at_least=0
    )


class TransNormerAttention(Attention):
    """DiagAttention in the first half of the layers, NormAttention, φ(q) (φ(k)ᵀ v) / RMS, in the others.

    The RMS is taken over all heads of a token, so NormAttention has no attention matrix and no dropout of weights. It
    has no gain: the output projection that follows can hold any. An attention that no encoder has placed is a later
    layer.
    """

    config: TransNormerConfig
    features: Callable[[Tensor], Tensor]  # φ of NormAttention
    local_has_matrix = False

    def __init__(
        self, config: TransNormerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.place(0, 1)

    def place(self, layer: int, layers: int) -> None:
        local_layers = layers // 2 if self.config.local_layers is None else self.config.local_layers
        self.is_local = layer < local_layers
        self.has_matrix = self.stochastic_rows = self.is_local and self.local_has_matrix

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        if self.is_local:
            return self.local_attention(q, k, v, key_padding_mask)
        return norm_attention(q, k, v, self.features, key_padding_mask)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """DiagAttention: attention inside blocks of tokens."""
        raise NotImplementedError

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P where there is one; otherwise ValueError."""
        raise ValueError("an output that is normalised over the heads has no single attention matrix")


@register_attention("transnormer_t1", TransNormerConfig)
class TransNormerT1Attention(TransNormerAttention):
    """ReLU(q·k/√D) in blocks without a denominator (ReLA), normalised like the linear layers; φ = elu."""

    features = staticmethod(F.elu)

    def local_attention(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return block_relu_attention(q, k, v, self.config.block_size, key_padding_mask, self.active_dropout)
