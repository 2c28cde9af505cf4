"""Attention transfer: train a linear attention to match a trained softmax attention on the same hidden states.

For each head, a rotation R is learned, and for each of its features a positive scale d and a shift c of the keys:

    q -> (q R) ∘ d        k -> (k R) / d + c

This reparameterization does not change softmax attention, nor block-diagonal softmax: it adds the same number to all
scores of a query, which softmax cancels. It does change a linear attention: LLN's features e^{αq} and e^{βk} are
computed in another basis and weighted by e^{βc}. Because it is an affine function of q and k, it is folded into their
projections at the end and costs nothing. Parameters of the linear attention itself are learned together with it.

Each layer has its own loss and gets the teacher's hidden states as its input: ‖W (o - o')‖² / ‖W o'‖² over the tokens
that are not padded, where o is the output of the student's heads, o' that of the teacher's, and W the output
projection.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lln_fairseq.attention import Attention
from lln_fairseq.modules.encoder import LLNEncoderLayer

MIN_TEXT_LENGTH = 64  # tokens; in shorter texts, LLN+Diag is softmax in a single block


class AttentionCall(NamedTuple):
    """The inputs and the output of the attention of one layer."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, N, D)
    v: Tensor  # (B, H, N, D)
    mask: Tensor | None  # bool (B, N), True = padded
    out: Tensor  # (B, H, N, D)


class QKReparameterization(nn.Module):
    """A learned change of the queries and keys of H = num_heads heads with D = head_dim features each.

    Each head has a rotation R = exp(X - Xᵀ), a scale d = exp(s) and a shift c of the keys. The parameters X, s
    and c start at 0, where q and k are unchanged.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.generator = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim))
        self.log_scale = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
        self.key_shift = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return R scaled by d, which multiplies the queries, and R scaled by 1 / d for the keys; both (H, D, D)."""
        rotation = torch.matrix_exp(self.generator - self.generator.mT)
        return rotation * self.log_scale.exp(), rotation * (-self.log_scale).exp()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reparameterized q and k, both (B, H, N, D)."""
        q_factor, k_factor = self.factors()
        return q @ q_factor, k @ k_factor + self.key_shift

    @torch.no_grad()
    def fold(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Change the weights and biases of both projections in place so that they compute reparameterized q and k."""
        for projection, factor in zip((q_proj, k_proj), self.factors(), strict=True):
            weight = projection.weight.unflatten(0, factor.shape[:2])  # (H, D, C)
            bias = projection.bias.unflatten(0, factor.shape[:2])  # (H, D)
            # In float64, so that the dot products of queries and keys keep their last digits.
            folded_weight = factor.double().mT @ weight.double()
            folded_bias = bias.double()[:, None] @ factor.double()
            projection.weight.copy_(folded_weight.flatten(0, 1))
            projection.bias.copy_(folded_bias.flatten())
        k_proj.bias.add_(self.key_shift.flatten())


class Student(nn.Module):
    """The linear attention of one layer, applied to queries and keys that a QKReparameterization has changed."""

    needs_segments = False  # the encoder finds `attention` itself, and gives it the lengths of the segments

    def __init__(self, attention: Attention, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self.alignment = QKReparameterization(num_heads, head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute the attention's output (B, H, N, D) for q, k and v (B, H, N, D); mask: bool (B, N), True = padded."""
        return self.attention(*self.alignment(q, k), v, key_padding_mask)

    def with_attention(self, attention: Attention) -> "Student":
        """Return a student with another attention that shares this one's reparameterization."""
        shared = copy.copy(self)
        shared._modules = {**self._modules, "attention": attention}
        return shared


def relative_error(out: Tensor, teacher: AttentionCall, projection: Tensor) -> Tensor:
    """Compute the relative squared error ‖W (o - o')‖² / ‖W o'‖² over the tokens that are not padded.

    Args:
        out: o, the student's output (B, H, N, D)
        teacher: the teacher's call, with o' and the mask
        projection: W (C, H · D)

    Returns: a scalar tensor
    """
    error = _projected_square_sum(out - teacher.out, teacher.mask, projection)
    size = _projected_square_sum(teacher.out, teacher.mask, projection)
    return error / size


def _projected_square_sum(x: Tensor, mask: Tensor | None, projection: Tensor) -> Tensor:
    """Compute ‖W x‖² over the tokens that are not padded, for x (B, H, N, D) and W (C, H · D)."""
    projected = x.transpose(1, 2).flatten(2) @ projection.mT  # (B, N, C)
    if mask is not None:
        projected = projected.masked_fill(mask[..., None], 0.0)
    return projected.square().sum()


@contextmanager
def recorded(layers: Sequence[LLNEncoderLayer]) -> Iterator[list[AttentionCall]]:
    """Record every call of the layers' attentions inside the context, in order."""
    calls: list[AttentionCall] = []

    def record(attention: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        q, k, v, mask = inputs
        calls.append(AttentionCall(q, k, v, mask, out))

    hooks = [layer.self_attn.attention.register_forward_hook(record) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def swapped_attention(layers: Sequence[LLNEncoderLayer], attentions: Sequence[nn.Module]) -> Iterator[None]:
    """Use `attentions`, one module per layer, in place of the layers' own attentions inside the context."""
    originals = [layer.self_attn.attention for layer in layers]
    try:
        for layer, attention in zip(layers, attentions, strict=True):
            layer.self_attn.attention = attention
        yield
    finally:
        for layer, attention in zip(layers, originals, strict=True):
            layer.self_attn.attention = attention


class TokenStream:
    """A stream of token ids, from which texts are cut at random positions."""

    def __init__(self, tokens: Tensor, bos: int, eos: int) -> None:
        """tokens: ids (N,); bos, eos: the ids that begin and end each text."""
        self.tokens = tokens
        self.bos = bos
        self.eos = eos

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Cut `count` texts at random positions.

        Args:
            length: tokens per text, including bos and eos

        Returns: ids (count, length)
        Raises: ValueError if length is less than 3, or if the stream is shorter than one text.
        """
        num_words = length - 2
        if len(self.tokens) < num_words or num_words < 1:
            raise ValueError(f"{len(self.tokens)} tokens are too few for a text of {length}")
        starts = torch.randint(len(self.tokens) - num_words + 1, (count, 1), generator=generator)
        words = self.tokens[starts + torch.arange(num_words)]
        bos = torch.full((count, 1), self.bos)
        eos = torch.full((count, 1), self.eos)
        return torch.cat([bos, words, eos], dim=1)

    def mixed_batch(self, tokens: int, longest: int, generator: torch.Generator) -> Tensor:
        """Cut texts of one random length, with about `tokens` tokens in total, but at least one text.

        The length is `longest` or a half, a quarter, ... of it, each equally likely. It is at least MIN_TEXT_LENGTH,
        unless `longest` is shorter.

        Returns: ids (texts, length)
        Raises: ValueError as `batch`.
        """
        shortest = min(MIN_TEXT_LENGTH, longest)
        halved = [longest >> halvings for halvings in range(16)]
        lengths = [length for length in halved if length >= shortest]
        length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
        return self.batch(max(1, tokens // length), length, generator)


class LayerwiseTrainer:
    """Base class of trainers with one loss per layer, which can stop at any step and resume exactly.

    Subclasses implement `errors`. A trainer with other losses overrides `losses` and `scalars`. The optimizer is Adam.
    Its learning rate rises linearly for `warmup` steps, and falls linearly to 0 in the second half of the steps.
    """

    warmup = 1

    def __init__(self, module: nn.Module, lr: float, steps: int, seed: int) -> None:
        """module: what is trained; steps: the number of updates; seed: the seed of the random texts."""
        self.module = module
        self.lr = lr
        self.steps = steps
        self.step = 0
        self.optimizer = torch.optim.Adam(module.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(seed)

    def train_step(self, texts: Any, tokens: int, longest: int) -> list[float]:
        """Update the parameters once on a random batch.

        Args:
            texts: a TokenStream, or the TaskRows of a split
            tokens: tokens per update, approximately
            longest: tokens of the longest texts

        Returns: the losses before the update: the relative squared error of each layer
        """
        schedule = min((self.step + 1) / self.warmup, 2 * (1 - self.step / self.steps), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * schedule
        losses = self.losses(texts, tokens, longest)
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        self.optimizer.step()
        self.step += 1
        return [loss.item() for loss in losses]

    def losses(self, texts: Any, tokens: int, longest: int) -> list[Tensor]:
        """Draw a batch and compute the losses, whose mean is minimized. Arguments are those of `train_step`."""
        return self.errors(texts.mixed_batch(tokens, longest, self.generator))

    def scalars(self, means: list[float]) -> dict[str, float]:
        """Return what TensorBoard shows, by name, given the mean of each loss over the last steps.

        This is the relative error of each layer, the root of its squared error.
        """
        return {f"error/layer_{layer:02d}": math.sqrt(mean) for layer, mean in enumerate(means)}

    def errors(self, tokens: Tensor) -> list[Tensor]:
        """Compute the relative squared error of each layer on tokens (B, N), as scalars with gradients."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to resume exactly. Its tensors are not copies: further steps change them."""
        return {
            "step": self.step,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `state` returned. A state without its optimizer must be that of the last step."""
        self.step = state["step"]
        self.module.load_state_dict(state["module"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


def similarity(vectors: Tensor, teacher: Tensor) -> tuple[float, float]:
    """Compare a student's vectors with the teacher's vectors of the same texts.

    Args:
        vectors, teacher: (texts, C)

    Returns: the mean cosine between both vectors of a text, and the fraction of the texts for which both models have
        the same nearest neighbor by cosine among the other texts
    """
    vectors = nn.functional.normalize(vectors.double(), dim=-1)
    teacher = nn.functional.normalize(teacher.double(), dim=-1)
    # A cosine is at most 1: subtracting 2 keeps a text from being its own neighbor.
    exclude_self = 2 * torch.eye(len(vectors), dtype=vectors.dtype, device=vectors.device)
    neighbors = (vectors @ vectors.mT - exclude_self).argmax(dim=-1)
    teacher_neighbors = (teacher @ teacher.mT - exclude_self).argmax(dim=-1)
    cosine = (vectors * teacher).sum(dim=-1).mean().item()
    same_neighbor = (neighbors == teacher_neighbors).double().mean().item()
    return cosine, same_neighbor
