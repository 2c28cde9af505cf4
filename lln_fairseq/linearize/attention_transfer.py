"""Attention transfer: a linear attention learns to give what a trained softmax attention gives on the same tokens.

What is learned, for each head: a rotation R, and for each feature a positive scale d and a shift c of the keys,

    q -> (q R) ∘ d        k -> (k R) / d + c

Softmax attention, inside a block too, stays exactly as it is: q·k grows by the same q·c for every key. A linear
attention notices all three: LLN's features e^{αq}, e^{βk} are taken in another basis and weighed by e^{βc}. They are
affine functions of q and k, so in the end they are folded into the projections, and nothing of them remains. Parameters
of the attention itself (the share of the blocks, say) are learned beside them.

The loss is that of each layer alone, with the teacher's hidden states as the input of every layer:
‖W (o - o')‖² / ‖W o'‖² with o the output of the heads, o' the teacher's and W the output projection, over the tokens
that are not padded.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lln_fairseq.attention import Attention
from lln_fairseq.modules.encoder import LLNEncoderLayer

SHORTEST = 64  # tokens of a text: LLN+Diag is softmax in a block anyway


class Heads(NamedTuple):
    """What the attention of one layer got and gave: q, k, v, out (B, H, N, D), mask bool (B, N), True = padded."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor


class QKReparameterization(nn.Module):
    """A rotation R = exp(X - Xᵀ), a scale d = exp(s) and a shift c for each of H heads of D features; at first none."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.generator = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim))
        self.log_scale = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
        self.key_shift = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def factors(self) -> tuple[Tensor, Tensor]:
        """R d for the queries and R / d for the keys, (H, D, D)."""
        rotation = torch.matrix_exp(self.generator - self.generator.mT)
        return rotation * self.log_scale.exp(), rotation * (-self.log_scale).exp()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q, k (B, H, N, D) -> the same shapes."""
        of_q, of_k = self.factors()
        return q @ of_q, k @ of_k + self.key_shift

    @torch.no_grad()
    def fold(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Change the projections so that they compute the aligned queries and keys."""
        for projection, factor in zip((q_proj, k_proj), self.factors(), strict=True):
            heads = projection.weight.unflatten(0, factor.shape[:2])  # (H, D, C)
            bias = projection.bias.unflatten(0, factor.shape[:2])  # (H, D)
            # in float64: the dot products of queries and keys then keep their last digits
            weight = factor.double().mT @ heads.double()
            projection.weight.copy_(weight.flatten(0, 1))
            projection.bias.copy_((bias.double()[:, None] @ factor.double()).flatten())
        k_proj.bias.add_(self.key_shift.flatten())


class Student(nn.Module):
    """The attention of one layer with its alignment."""

    def __init__(self, attention: Attention, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self.alignment = QKReparameterization(num_heads, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.attention(*self.alignment(q, k), v, key_padding_mask)

    def with_attention(self, attention: Attention) -> "Student":
        """Return a student with another attention and the same alignment."""
        shared = copy.copy(self)
        shared._modules = {**self._modules, "attention": attention}
        return shared


def relative_error(out: Tensor, teacher: Heads, projection: Tensor) -> Tensor:
    """‖W (o - o')‖² / ‖W o'‖² over the real tokens; out (B, H, N, D), projection W (C, H · D)."""
    error, size = (_projected_size(x, teacher.mask, projection) for x in (out - teacher.out, teacher.out))
    return error / size


def _projected_size(x: Tensor, mask: Tensor | None, projection: Tensor) -> Tensor:
    tokens = x.transpose(1, 2).flatten(2) @ projection.mT  # (B, N, C)
    if mask is not None:
        tokens = tokens.masked_fill(mask[..., None], 0.0)
    return tokens.square().sum()


@contextmanager
def recorded(layers: Sequence[LLNEncoderLayer]) -> Iterator[list[Heads]]:
    """Record the inputs and the output of every call of the layers' attentions in this context, in their order."""
    calls: list[Heads] = []

    def record(attention: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        q, k, v, mask = inputs
        calls.append(Heads(q, k, v, mask, out))

    hooks = [layer.self_attn.attention.register_forward_hook(record) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def swapped_attention(layers: Sequence[LLNEncoderLayer], attentions: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the layers' attentions by the given ones in this context."""
    originals = [layer.self_attn.attention for layer in layers]
    try:
        for layer, attention in zip(layers, attentions, strict=True):
            layer.self_attn.attention = attention
        yield
    finally:
        for layer, attention in zip(layers, originals, strict=True):
            layer.self_attn.attention = attention


class TokenStream:
    """A stream of tokens, cut into texts at random places."""

    def __init__(self, tokens: Tensor, bos: int, eos: int) -> None:
        """tokens (N,), ids; `bos` and `eos` begin and end a text."""
        self.tokens, self.bos, self.eos = tokens, bos, eos

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """(count, length) ids. Raises: ValueError where the stream is shorter than one text."""
        inner = length - 2
        if len(self.tokens) < inner or inner < 1:
            raise ValueError(f"{len(self.tokens)} tokens are too few for a text of {length}")
        starts = torch.randint(len(self.tokens) - inner + 1, (count, 1), generator=generator)
        words = self.tokens[starts + torch.arange(inner)]
        ends = [torch.full((count, 1), end) for end in (self.bos, self.eos)]
        return torch.cat([ends[0], words, ends[1]], dim=1)

    def mixed_batch(self, tokens: int, longest: int, generator: torch.Generator) -> Tensor:
        """About so many tokens in texts of one length: `longest`, its half, its quarter, ..., each as likely."""
        lengths = [length for length in (longest >> k for k in range(16)) if length >= min(SHORTEST, longest)]
        length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
        return self.batch(max(1, tokens // length), length, generator)


class LayerwiseTrainer:
    """Training that goes on exactly from where it stopped: Adam on a module, the second half of the steps down to a
    learning rate of 0."""

    warmup = 1  # updates in which the learning rate rises

    def __init__(self, module: nn.Module, lr: float, steps: int, seed: int) -> None:
        self.module, self.lr, self.steps, self.step = module, lr, steps, 0
        self.optimizer = torch.optim.Adam(module.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(seed)

    def train_step(self, texts: TokenStream, tokens: int, longest: int) -> list[float]:
        """One update with so many tokens in texts of mixed lengths. The relative squared error of each layer."""
        share = min((self.step + 1) / self.warmup, 2 * (1 - self.step / self.steps), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * share
        errors = self.errors(texts.mixed_batch(tokens, longest, self.generator))
        self.optimizer.zero_grad()
        torch.stack(errors).mean().backward()
        self.optimizer.step()
        self.step += 1
        return [error.item() for error in errors]

    def errors(self, tokens: Tensor) -> list[Tensor]:
        """The relative squared error of each layer on tokens (B, N)."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step, "module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `state()` returned."""
        self.step = state["step"]
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


def similarity(vectors: Tensor, teacher: Tensor) -> tuple[float, float]:
    """The mean cosine between a student's and the teacher's vectors of the same texts (n, C), and for which share of
    the texts both have the same nearest other text."""
    ours, theirs = (nn.functional.normalize(x.double(), dim=-1) for x in (vectors, teacher))
    others = 2 * torch.eye(len(ours), dtype=ours.dtype, device=ours.device)  # no text is its own neighbour
    neighbours = [(x @ x.mT - others).argmax(dim=-1) for x in (ours, theirs)]
    return (ours * theirs).sum(dim=-1).mean().item(), (neighbours[0] == neighbours[1]).double().mean().item()
