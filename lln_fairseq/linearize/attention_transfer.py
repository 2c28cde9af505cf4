"""Attention transfer: train a linear attention to match a trained softmax attention on the same hidden states.

Each head learns a rotation R (D, D) of its D features, a positive scale d (D,), and a shift c (D,) of the keys:

    q -> (q R) ∘ d        k -> (k R) / d + c

This reparameterization changes neither softmax attention nor block-diagonal softmax: it adds the same number to all
scores of a query, and softmax cancels that number. It does change a linear attention: LLN's features e^{αq} and e^{βk}
are computed in another basis and weighted by e^{βc}. The reparameterization is an affine function of q and of k. At the
end it is folded into their projections, so it costs nothing afterwards. The parameters of the linear attention itself
are learned at the same time.

With rotary positions, q and k are rotated between their projections and the attention. Then only what commutes with
that rotation can be folded: R rotates each pair of features f and f + D/2 by an angle of its own, both features of a
pair have the same scale, and there is no shift.

Each layer has its own loss, and its input is always the teacher's hidden states. The loss is ‖W (o - o')‖² / ‖W o'‖²,
summed over the tokens that are not padding. Here o is the output of the student's heads, o' is the output of the
teacher's heads, and W is the output projection.

In shapes, B is the number of texts in a batch, H the number of heads, N the number of tokens per text, D the number of
features per head, and C the size of the hidden states.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.attention import Attention, Context
from lln_fairseq.models.half_precision import bfloat16_on_gpu
from lln_fairseq.models.layer import LLNEncoderLayer
from lln_fairseq.ops.autocast import without_autocast

MIN_TEXT_LENGTH = 64  # tokens; in shorter texts, LLN+Diag is softmax in a single block


class AttentionCall(NamedTuple):
    """The inputs and the output of the attention of one layer."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, N, D)
    v: Tensor  # (B, H, N, D)
    context: Context
    out: Tensor  # (B, H, N, D)


class QKReparameterization(nn.Module):
    """The learned reparameterization of the queries and keys of one layer.

    The layer has H = num_heads heads with D = head_dim features each. Each head has a rotation R = exp(X - Xᵀ), a scale
    d = exp(s) and a shift c of the keys. The parameters X, s and c are `generator`, `log_scale` and `key_shift`. They
    start at 0, so that q and k are unchanged at first.

    If the layer has rotary positions, the parameters are the angles and the logarithmic scales of the D/2 pairs of
    features: `angle` takes the place of `generator`, and `key_shift` is None.
    """

    def __init__(self, num_heads: int, head_dim: int, rotary: bool = False) -> None:
        super().__init__()
        self.rotary = rotary
        if rotary:
            self.angle = nn.Parameter(torch.zeros(num_heads, head_dim // 2))
            self.log_scale = nn.Parameter(torch.zeros(num_heads, 1, head_dim // 2))
            self.key_shift: nn.Parameter | None = None
        else:
            self.generator = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim))
            self.log_scale = nn.Parameter(torch.zeros(num_heads, 1, head_dim))
            self.key_shift = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return what multiplies the queries, R with its columns times d, and the keys, R / d; both (H, D, D)."""
        if self.rotary:
            half = self.angle.shape[-1]
            generator = F.pad(self.angle.diag_embed(), (half, 0, 0, half))  # the angle of f in row f, column f + D/2
            log_scale = self.log_scale.repeat(1, 1, 2)
        else:
            generator = self.generator
            log_scale = self.log_scale
        rotation = torch.matrix_exp(generator - generator.mT)
        return rotation * log_scale.exp(), rotation * (-log_scale).exp()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reparameterized queries and keys, both (B, H, N, D) like q and k."""
        q_factor, k_factor = self.factors()
        q = q @ q_factor
        k = k @ k_factor
        if self.key_shift is not None:
            k = (k + self.key_shift).type_as(q)  # under autocast, the shift is in float32 and q is not
        return q, k

    @torch.no_grad()
    def fold(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Fold the reparameterization into both projections, whose weights and biases change in place."""
        for projection, factor in zip((q_proj, k_proj), self.factors(), strict=True):
            weight = projection.weight.unflatten(0, factor.shape[:2])  # (H, D, C)
            bias = projection.bias.unflatten(0, factor.shape[:2])  # (H, D)
            # In float64, so that the dot products of queries and keys keep their last digits.
            folded_weight = factor.double().mT @ weight.double()
            folded_bias = bias.double()[:, None] @ factor.double()
            projection.weight.copy_(folded_weight.flatten(0, 1))
            projection.bias.copy_(folded_bias.flatten())
        if self.key_shift is not None:
            k_proj.bias.add_(self.key_shift.flatten())


class Student(nn.Module):
    """The linear attention of one layer, applied to reparameterized queries and keys."""

    def __init__(self, attention: Attention, num_heads: int, head_dim: int, rotary: bool = False) -> None:
        super().__init__()
        self.attention = attention
        self.alignment = QKReparameterization(num_heads, head_dim, rotary)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Reparameterize q and k, and compute the output of the linear attention, (B, H, N, D)."""
        return self.attention(*self.alignment(q, k), v, context)

    def with_attention(self, attention: Attention) -> "Student":
        """Return a new student with another attention that shares the reparameterization with this one."""
        shared = copy.copy(self)
        shared._modules = {**self._modules, "attention": attention}
        return shared


@without_autocast
def relative_error(out: Tensor, teacher: AttentionCall, projection: Tensor) -> Tensor:
    """Return ‖W (o - o')‖² / ‖W o'‖² over the tokens that are not padding, a scalar with a gradient for `out`.

    `out` is o, the output of the student's heads, `projection` is W (C, H · D), and `teacher` has o' and the mask.
    """
    teacher_out = teacher.out.float()
    error = _projected_square_sum(out.float() - teacher_out, teacher.context.padding, projection)
    size = _projected_square_sum(teacher_out, teacher.context.padding, projection)
    return error / size


def _projected_square_sum(x: Tensor, padding: Tensor | None, projection: Tensor) -> Tensor:
    """Compute ‖W x‖² over the tokens that are not padding, for x (B, H, N, D) and the projection W (C, H · D)."""
    projected = x.transpose(1, 2).flatten(2) @ projection.mT  # (B, N, C)
    if padding is not None:
        projected = projected.masked_fill(padding[..., None], 0.0)
    return projected.square().sum()


@contextmanager
def recorded(layers: Sequence[LLNEncoderLayer]) -> Iterator[list[AttentionCall]]:
    """Yield a list to which every call of the layers' attentions inside the `with` block is appended."""
    calls: list[AttentionCall] = []

    def record(attention: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        q, k, v, context = inputs
        calls.append(AttentionCall(q, k, v, context, out))

    hooks = [layer.self_attn.attention.register_forward_hook(record) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def swapped_attention(layers: Sequence[LLNEncoderLayer], attentions: Sequence[nn.Module]) -> Iterator[None]:
    """Replace the attention of each layer inside the `with` block, in place, and restore it at its end."""
    originals = [layer.self_attn.attention for layer in layers]
    try:
        for layer, attention in zip(layers, attentions, strict=True):
            layer.self_attn.attention = attention
        yield
    finally:
        for layer, attention in zip(layers, originals, strict=True):
            layer.self_attn.attention = attention


class TokenStream:
    """A sequence of token ids, from which texts are cut at random positions."""

    def __init__(self, tokens: Tensor, bos: int, eos: int) -> None:
        """tokens: the ids (N,) of the stream; bos, eos: the ids to put at the beginning and the end of each text."""
        self.tokens = tokens
        self.bos = bos
        self.eos = eos

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Cut `count` texts at random positions, and return their ids (count, length), bos and eos included.

        Texts may overlap. ValueError is raised if length is less than 3, or if the stream has fewer than length - 2
        tokens.
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
        """Cut a batch of texts of the same length, which is chosen at random, and return their ids (texts, length).

        The length is `longest` or a half, a quarter, ... of it, each with the same probability, but not below
        MIN_TEXT_LENGTH unless `longest` is. The batch has at most `tokens` tokens, or one longer text. For the
        ValueError, see `batch`.
        """
        shortest = min(MIN_TEXT_LENGTH, longest)
        halved = [longest >> halvings for halvings in range(16)]
        lengths = [length for length in halved if length >= shortest]
        length = lengths[int(torch.randint(len(lengths), (), generator=generator))]
        return self.batch(max(1, tokens // length), length, generator)


class LayerwiseTrainer:
    """Base class of trainers with one loss per layer. Training can stop after any step and resume exactly.

    The optimizer is Adam. The learning rate rises linearly to `lr` over the first `warmup` steps, and falls linearly to
    0 over the second half of the steps.
    """

    warmup = 1

    def __init__(self, module: nn.Module, lr: float, steps: int, seed: int) -> None:
        """Create the optimizer for all parameters of `module`; `seed` is for the generator that draws the batches."""
        self.module = module
        self.lr = lr
        self.steps = steps
        self.step = 0
        self.optimizer = torch.optim.Adam(module.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(seed)

    def train_step(self, texts: Any, tokens: int, longest: int) -> list[float]:
        """Draw a random batch, update the parameters once, and return the losses before the update, one for each layer.

        `texts` is a TokenStream or the TaskRows of a split. The batch has at most `tokens` tokens, or one longer text,
        and no text of more than `longest`.
        """
        schedule = min((self.step + 1) / self.warmup, 2 * (1 - self.step / self.steps), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * schedule
        with bfloat16_on_gpu(next(self.module.parameters()).device):
            losses = self.losses(texts, tokens, longest)
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        self.optimizer.step()
        self.step += 1
        return [loss.item() for loss in losses]

    def losses(self, texts: Any, tokens: int, longest: int) -> list[Tensor]:
        """Draw a batch and return its losses, as scalars with gradients. The arguments are as for `train_step`."""
        return self.errors(texts.mixed_batch(tokens, longest, self.generator))

    def errors(self, tokens: Tensor) -> list[Tensor]:
        """Compute the relative squared error of each layer on the ids (B, N), as scalars with gradients."""
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
        """Load what `state` returned, so that training resumes exactly.

        A state without the key "optimizer" leaves the optimizer unchanged. Only the state after the last step may lack
        this key, because training does not continue from there. ValueError is raised for any other step.
        """
        step = state["step"]
        if not 0 <= step <= self.steps or ("optimizer" not in state and step < self.steps):
            raise ValueError(f"step {step} of {self.steps}")
        self.step = step
        self.module.load_state_dict(state["module"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])


def similarity(vectors: Tensor, teacher: Tensor) -> tuple[float, float]:
    """Compare a student's vectors (texts, C) with the teacher's vectors of the same texts.

    Returns: the cosine between both vectors of a text, averaged over the texts, and the fraction of the texts whose
        nearest neighbor, the other text with the largest cosine in the same model, is the same with both models.
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
