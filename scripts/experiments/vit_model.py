"""A vision transformer with an attention of the registry, in plain torch: the paper's A.8.2 has 12 layers of 128.

Pre-norm layers, a class token, learned positions, as Dosovitskiy et al. (2021) have it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention import Attention, build_attention


@dataclass
class Shape:
    """What a ViT is built from; lengths in pixels."""

    classes: int
    channels: int
    side: int
    patch: int
    layers: int = 12
    width: int = 128
    heads: int = 8
    dropout: float = 0.1

    @property
    def tokens(self) -> int:
        return (self.side // self.patch) ** 2 + 1  # and the class token


class Layer(nn.Module):
    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)"""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()
        x = x + self.dropout(self.out(self.attention(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(x))


class ViT(nn.Module):
    """Pictures (B, channels, side, side) in [0, 1] -> logits (B, classes)."""

    def __init__(self, shape: Shape, attention: str, **options: Any) -> None:
        super().__init__()
        if shape.side % shape.patch:
            raise ValueError(f"pictures of {shape.side} pixels cannot be cut into patches of {shape.patch}")
        if shape.width % shape.heads:
            raise ValueError(f"a width of {shape.width} cannot be shared by {shape.heads} heads")
        self.patch = shape.patch
        self.embed = nn.Linear(shape.channels * shape.patch**2, shape.width)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, shape.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, shape.tokens, shape.width))
        self.layers = nn.Sequential()
        sizes = dict(num_heads=shape.heads, head_dim=shape.width // shape.heads, max_positions=shape.tokens)
        for index in range(shape.layers):
            module = build_attention(attention, **sizes, **options)
            module.place(index, shape.layers)
            self.layers.append(Layer(shape, module))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = F.unfold(2 * pictures - 1, self.patch, stride=self.patch).mT
        x = torch.cat([self.start.expand(len(pictures), -1, -1), self.embed(patches)], dim=1) + self.positions
        return self.head(self.norm(self.layers(x)[:, 0]))
