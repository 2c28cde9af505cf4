"""Parts of the experiments that train small models: an attention layer, a training loop, and files of results."""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from lln_fairseq.attention import Attention, build_attention, reject_layer_mechanism
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.terminal import show_update
from scripts.research.summaries import attentions_argument

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The inputs of the model and, last, int64 targets, which have the shape of the predictions.
Batch = Sequence[Tensor]


class AttentionLayer(nn.Module):
    """A layer norm, self-attention with its projections and dropout, and a residual connection."""

    def __init__(self, width: int, attention: Attention, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention = attention
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.attention.num_heads, -1))  # (B, N, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()  # (B, H, N, D) each
        return x + self.dropout(self.out(self.attention(q, k, v).transpose(1, 2).flatten(2)))


def build_layer_attentions(
    spec: str, layers: int, heads: int, head_dim: int, max_positions: int
) -> Iterator[Attention]:
    """Yield the attention of each layer of a model, with its depth set. Wrong options raise UserError."""
    name, options = parse_attention_spec(spec)
    for layer in range(layers):
        try:
            attention = build_attention(
                name, num_heads=heads, head_dim=head_dim, max_positions=max_positions, **options
            )
        except ValueError as error:
            raise UserError(str(error)) from error
        attention.set_depth(layer, layers)
        yield attention


def batches(tensors: Sequence[Tensor], size: int, order: Tensor | None = None) -> Iterator[Batch]:
    """Yield `size` rows of all tensors at a time, on the device. `order` has the indices of the rows; default: all."""
    if order is None:
        order = torch.arange(len(tensors[0]))
    for rows in order.split(size):
        yield [tensor[rows].to(DEVICE) for tensor in tensors]


@torch.no_grad()
def predict_targets(model: nn.Module, parts: Iterable[Batch]) -> Tensor:
    """Return the most probable targets of all batches, on the CPU, and leave the model in evaluation mode."""
    model.eval()
    return torch.cat([model(*inputs).argmax(dim=-1).cpu() for *inputs, _ in parts])


class Trainer:
    """Trains a model with AdamW to predict the targets of batches.

    Args:
        model: on the device; returns logits (..., classes).
        lr: the highest learning rate.
        lr_factor: the learning rate of an update, counted from 0, as a fraction of `lr`.
        max_norm: gradients are clipped to this norm.
        fp16: float16 with a loss scale.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float,
        lr_factor: Callable[[int], float],
        max_norm: float = math.inf,
        fp16: bool = False,
    ) -> None:
        self.model = model
        self.max_norm = max_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_factor)
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=fp16)

    def train_epoch(self, parts: Iterable[Batch], bar: tqdm) -> float:
        """Make an update with each batch, advance the bar, and return the mean loss of the rows in nats."""
        self.model.train()
        total = 0.0
        count = 0
        for *inputs, targets in parts:
            self.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16, enabled=self.scaler.is_enabled()):
                loss = F.cross_entropy(self.model(*inputs).flatten(0, -2), targets.flatten())
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            nats = loss.item()
            total += nats * len(targets)
            count += len(targets)
            show_update(bar, bar.n + 1, f"{nats / math.log(2):.3f}")
        return total / count


def finish_run(file: Path, settings: Any, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `train` and its settings, a dataclass, under "settings".

    If the file exists, they are read from it, otherwise they are written to it. UserError is raised if the file has
    other settings.
    """
    if file.is_file():
        result = json.loads(file.read_text())
        if result.get("settings") != asdict(settings):
            raise UserError(f"{file} was written with other settings, {result.get('settings')}; choose another OUT")
        return result
    result = {"settings": asdict(settings), **train()}
    write_bytes(file, (json.dumps(result, indent=1) + "\n").encode())
    return result


def file_name(text: str) -> str:
    """Return the text with "-" instead of characters that a shell or Hydra could interpret."""
    return re.sub(r"[^\w.]+", "-", text)


def matrix_attentions_argument(text: str) -> list[str]:
    """Convert an argument as `attentions_argument` does. Mechanisms that replace a whole layer are errors."""
    specs = attentions_argument(text)
    for spec in specs:
        try:
            reject_layer_mechanism(parse_attention_spec(spec)[0], "this experiment needs queries and keys")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return specs
