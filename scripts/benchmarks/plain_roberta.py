"""fairseq's RoBERTa for masked language modelling in plain torch, for machines without fairseq.

Layers, names and shapes of the parameters and the order of the operations are fairseq's, so that a state dict of the
one loads into the other and gives the same logits; initialisation, padding and what only users of fairseq need is not
here. Scripts use it to measure.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention import Attention

PADDING = 1  # fairseq's index of the padding token; positions start after it


class PlainAttention(nn.Module):
    def __init__(self, dim: int, heads: int, attention: nn.Module) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(T, B, C) -> (T, B, C)"""
        heads = (proj(x).unflatten(-1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = self.attention(*(y.permute(1, 2, 0, 3) for y in heads))
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2))


class PlainLayer(nn.Module):
    def __init__(self, dim: int, inner: int, heads: int, attention: nn.Module, dropout: float) -> None:
        super().__init__()
        self.self_attn = PlainAttention(dim, heads, attention)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x)))
        return self.final_layer_norm(x + self.dropout(self.fc2(gelu(self.fc1(x)))))


class PlainEncoder(nn.Module):
    def __init__(self, sizes: tuple[int, int, int, int], vocabulary: int, positions: int, attention: nn.Module,
                 dropout: float) -> None:  # fmt: skip
        super().__init__()
        layers, dim, inner, heads = sizes
        self.embed_tokens = nn.Embedding(vocabulary, dim, PADDING)
        self.embed_positions = nn.Embedding(positions + PADDING + 1, dim, PADDING)
        self.layernorm_embedding, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)
        self.layers = nn.ModuleList(PlainLayer(dim, inner, heads, attention, dropout) for _ in range(layers))
        for layer, module in enumerate(m for m in self.modules() if isinstance(m, Attention)):
            module.place(layer, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) without padding -> (B, T, C)"""
        positions = self.embed_positions.weight[PADDING + 1 :][: tokens.shape[1]]
        x = self.dropout(self.layernorm_embedding(self.embed_tokens(tokens) + positions)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x.transpose(0, 1)


class PlainHead(nn.Module):
    def __init__(self, dim: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.dense, self.layer_norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.weight, self.bias = weight, nn.Parameter(weight.new_zeros(len(weight)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer_norm(gelu(self.dense(x))), self.weight) + self.bias


class PlainRoberta(nn.Module):
    """`sizes`: layers, embedding, feed-forward, heads. `attention` is put into every layer as it is."""

    def __init__(self, sizes: tuple[int, int, int, int], vocabulary: int, positions: int, attention: nn.Module,
                 dropout: float = 0.0) -> None:  # fmt: skip
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.sentence_encoder = PlainEncoder(sizes, vocabulary, positions, attention, dropout)
        self.encoder.lm_head = PlainHead(sizes[1], self.encoder.sentence_encoder.embed_tokens.weight)

    def forward(self, src_tokens: Tensor, masked_tokens: Tensor) -> tuple[Tensor, None]:
        """Logits (masked tokens, V) of the masked tokens of (B, T) without padding."""
        return self.encoder.lm_head(self.encoder.sentence_encoder(src_tokens)[masked_tokens]), None


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x.float()).type_as(x)
