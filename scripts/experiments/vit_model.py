"""A vision transformer in plain torch that can use any attention of the registry.

It has pre-norm layers, a class token and learned position embeddings (Dosovitskiy et al. 2021). The paper's model has
12 layers of width 128 (arXiv 2311.13541, A.8.2).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention import Attention, build_attention


@dataclass
class ViTShape:
    """The sizes of a vision transformer. Pictures have `side` x `side` pixels, and patches `patch` x `patch`."""

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
        """The number of patches of a picture, plus one for the class token."""
        return (self.side // self.patch) ** 2 + 1


class ViTLayer(nn.Module):
    """A pre-norm transformer layer: attention and an MLP, each after a layer norm and with a residual connection."""

    def __init__(self, shape: ViTShape, attention: Attention) -> None:
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
        """Return the hidden states after this layer. `x`, the hidden states before it, and the result are (B, N, C)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()  # (B, H, N, D) each
        attended = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(x))


class ViT(nn.Module):
    """A vision transformer that classifies square pictures.

    Args:
        shape: sizes of the model.
        attention: name of an attention in the registry.
        **options: options of the attention.

    Raises:
        ValueError: if the pictures cannot be cut into whole patches, the width is not a multiple of the number of
            heads, or the attention or an option is unknown.
    """

    def __init__(self, shape: ViTShape, attention: str, **options: Any) -> None:
        super().__init__()
        if shape.side % shape.patch:
            raise ValueError(f"pictures of {shape.side} pixels cannot be cut into patches of {shape.patch}")
        if shape.width % shape.heads:
            raise ValueError(f"a width of {shape.width} cannot be divided among {shape.heads} heads")
        self.patch = shape.patch
        self.embed = nn.Linear(shape.channels * shape.patch**2, shape.width)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, shape.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, shape.tokens, shape.width))
        self.layers = nn.Sequential()
        for index in range(shape.layers):
            module = build_attention(
                attention,
                num_heads=shape.heads,
                head_dim=shape.width // shape.heads,
                max_positions=shape.tokens,
                **options,
            )
            module.set_depth(index, shape.layers)
            self.layers.append(ViTLayer(shape, module))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits of the classes.

        Args:
            pictures: (B, channels, side, side), with values in [0, 1].

        Returns:
            Logits, (B, classes).
        """
        patches = F.unfold(2 * pictures - 1, self.patch, stride=self.patch).mT  # (B, patches, channels * patch²)
        class_token = self.start.expand(len(pictures), -1, -1)
        x = torch.cat([class_token, self.embed(patches)], dim=1) + self.positions
        return self.head(self.norm(self.layers(x)[:, 0]))
