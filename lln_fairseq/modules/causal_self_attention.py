"""The self-attention of a decoder: fairseq's projections around causal LLN attention, token by token too."""

import math
from typing import Any

from fairseq.modules import MultiheadAttention
from torch import Tensor

from lln_fairseq.ops.causal import CausalState, causal_attention, continue_causal, empty_state, scale_inputs
from lln_fairseq.ops.moment_matching import running_moments

State = dict[str, dict[str, Tensor | None]]


class CausalSelfAttention(MultiheadAttention):
    """Causal LLN attention with fairseq's parameter names.

    α and β are fixed, or matched to the queries and keys up to each token: nothing that a row is made of looks ahead.
    There are no attention weights, so there is no dropout of them.
    """

    def __init__(self, embed_dim: int, num_heads: int, alpha: float | None = None, beta: float | None = None,
                 constants: str = "calibrated", **options: Any) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, self_attention=True, **options)
        given = [x for x in (alpha, beta) if x is not None]
        if len(given) == 1 or not all(0 < x < math.inf for x in given):
            raise ValueError(f"α and β must be positive and given together or not at all, got {alpha} and {beta}")
        self.alpha, self.beta, self.constants = alpha, beta, constants

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, key_padding_mask: Tensor | None = None,
        incremental_state: State | None = None, need_weights: bool = False, attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query (T, B, C), mask (B, T) with True = padded -> (T, B, C) and no weights.

        With an incremental state the tokens come after those that it has seen; it keeps the running maximum, the sums
        and the moments, whose size does not depend on how many there were. Any mask of pairs stands for the causal one.

        Raises: ValueError for weights and for a decoder that wants to look ahead.
        """
        if need_weights or (attn_mask is None and incremental_state is None):
            raise ValueError("causal LLN attention has no weights to return and sees no later token")
        q, k, v = (self._split_heads(proj(query)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if key_padding_mask is None else key_padding_mask.bool()
        seen = self._get_input_buffer(incremental_state) if incremental_state is not None else {}
        alpha, beta, moments = self._alpha_beta(q, k, mask, seen.get("moments"))
        x, y, v = scale_inputs(q, k, v, alpha, beta, mask)
        if incremental_state is None:
            out = causal_attention(x, y, v)
        else:
            state = CausalState(seen["maximum"], seen["sums"]) if seen else empty_state(x)
            out, state = continue_causal(x, y, v, state)
            self._set_input_buffer(incremental_state, state._asdict() | {"moments": moments})
        return self.out_proj(out.to(query.dtype).permute(2, 0, 1, 3).flatten(2)), None

    def _alpha_beta(
        self, q: Tensor, k: Tensor, mask: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """α and β that broadcast to (B, H, N), and what the next tokens need to match theirs."""
        if self.alpha is None or self.beta is None:
            return running_moments(q, k, mask, self.constants, before)
        return q.new_tensor(self.alpha).float(), q.new_tensor(self.beta).float(), None

    def _split_heads(self, x: Tensor) -> Tensor:
        """(T, B, H · D) -> (B, H, T, D)"""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3).contiguous()
