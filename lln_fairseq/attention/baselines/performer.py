"""Performer: softmax attention by positive orthogonal random features (Choromanski et al. 2020, arXiv 2009.14794)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.formula import compute_dtype
from lln_fairseq.ops.random_features import balanced_features, random_feature_attention


@dataclass
class PerformerConfig:
    num_features: int = option(256, "random features of a head", at_least=1)
    redraw_every: int = option(
        1000, "draw new features after this many forward passes in training; 0: keep the first ones", at_least=0
    )


@register_attention("performer", PerformerConfig)
class PerformerAttention(Attention):
    """Linear attention with M random features φ_m(x) = exp(ω_m·x' - |x'|²/2) / √M, where x' = x / D^¼.

    In expectation φ(q)·φ(k) = exp(q·k / √D) (Lemma 1 of the paper). The computation uses the logarithms of the
    features, so nothing overflows and no epsilon is needed. P is never formed, so attention dropout does not apply.

    The random vectors ω_m are saved with the parameters, and new ones are drawn only during training. What is drawn
    depends on the number of training passes so far, and on a seed that the constructor takes from torch's global
    generator. Both are saved, so a resumed run draws the same vectors as an uninterrupted run, and so do all workers.

    In a model in half precision, ω is rounded, which changes the vectors by about one part in a thousand. Queries and
    keys use the same rounded vectors, so the kernel that is approximated remains the same.
    """

    config: PerformerConfig
    projection: Tensor  # ω, (M, D)

    def __init__(
        self, config: PerformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        # Python numbers: reading them from a buffer would synchronize with the GPU in every forward pass.
        self.seed = int(torch.randint(2**31 - 1, ()))
        self.forwards = 0
        self.register_buffer("projection", self._draw_projection())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # Activation checkpointing repeats a pass during the backward pass, which must see the same features.
        is_repeated = torch._C._current_graph_task_id() != -1
        if self.training and torch.is_grad_enabled() and not is_repeated:
            self._count_forward()
        return random_feature_attention(q, k, v, self.omega(q.dtype), context.padding)

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        phi_q, phi_k = self.feature_maps(q, k, context)
        return reference.kernel_matrix(phi_q, phi_k, context.padding)

    def feature_maps(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        """Return features of the queries and of the keys, each (B, H, N, M), that give the same P as φ.

        They are φ times factors that cancel in P: one for each query and one for each feature. These keep the features
        from overflowing.
        """
        return balanced_features(q, k, self.omega(q.dtype), context.padding)

    def omega(self, dtype: torch.dtype) -> Tensor:
        """Return a copy of ω / D^¼ as (D, M), in float64 if `dtype` is float64 and otherwise in float32.

        Because it is a copy, the graph of an earlier forward pass stays valid when new vectors are drawn in place.
        """
        return self.projection.to(compute_dtype(dtype)).mT * self.head_dim**-0.25

    def get_extra_state(self) -> Tensor:
        """Return the seed and the number of training passes, int64 (2,), which state_dict saves."""
        return torch.tensor([self.seed, self.forwards])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the seed and the number of training passes. The buffer `projection` is loaded separately."""
        self.seed, self.forwards = state.tolist()

    def _count_forward(self) -> None:
        """Count a training pass that begins. After every `redraw_every` passes, draw a new projection in place."""
        if self.config.redraw_every and self.forwards and self.forwards % self.config.redraw_every == 0:
            self.projection.copy_(self._draw_projection())
        self.forwards += 1

    def _draw_projection(self) -> Tensor:
        """Draw ω (M, D) in float32 from the seed and the number of training passes.

        Every row is standard normal, which makes the kernel unbiased. The first D rows are orthogonal to each other,
        and so are the next D rows, and so on.
        """
        generator = torch.Generator().manual_seed(self.seed + self.forwards)
        num_features = self.config.num_features
        dim = self.head_dim
        blocks = torch.randn(-(-num_features // dim), dim, dim, generator=generator, dtype=torch.float64)
        directions, r = torch.linalg.qr(blocks)
        # With the signs of R's diagonal the directions are uniformly distributed.
        directions = (directions * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT
        directions = directions.flatten(0, 1)[:num_features]
        lengths = torch.randn(num_features, dim, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
        return (directions * lengths).float()
