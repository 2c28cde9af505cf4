"""The self-attention of a decoder: causal LLN attention with fairseq's projections and incremental decoding."""

import math
from typing import Any

from fairseq.modules import MultiheadAttention
from torch import Tensor

from lln_fairseq.ops.causal import CausalState, causal_attention, continue_causal, empty_state, scale_inputs
from lln_fairseq.ops.moment_matching import running_moments

IncrementalState = dict[str, dict[str, Tensor | None]]


class CausalSelfAttention(MultiheadAttention):
    """Causal LLN attention with fairseq's parameter names.

    α and β are fixed, or matched to the queries and keys up to each token, so no output depends on a later token. P is
    never formed, so attention dropout does not apply. Raises ValueError if only one of α and β is given, or if one is
    not positive and finite.

    Args:
        embed_dim: number of features C of a token.
        num_heads: number of heads H.
        alpha, beta: fixed α and β; None for both = moment matching.
        constants: the constants of the moment matching.
        options: further arguments of fairseq's MultiheadAttention.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        alpha: float | None = None,
        beta: float | None = None,
        constants: str = "calibrated",
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, self_attention=True, **options)
        fixed = [x for x in (alpha, beta) if x is not None]
        if len(fixed) == 1 or not all(0 < x < math.inf for x in fixed):
            raise ValueError(
                f"α and β must be positive and finite, and given together or not at all, got {alpha} and {beta}"
            )
        self.alpha = alpha
        self.beta = beta
        self.constants = constants

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Compute causal self-attention.

        Args:
            query: (T, B, C). During incremental decoding, only the tokens that follow those of earlier calls.
            key, value: ignored, since queries, keys and values are projections of the same tokens.
            key_padding_mask: (B, T), True or nonzero = padded, or None.
            incremental_state: fairseq's state of incremental decoding, updated in place, or None. It stores a running
                maximum, sums and moments, whose size does not depend on the number of tokens seen.
            need_weights: must be False, otherwise ValueError is raised.
            attn_mask: any tensor means that later tokens are hidden; its content is ignored. None without an
                incremental state raises ValueError.

        Returns:
            The output (T, B, C), and None in place of attention weights.
        """
        if need_weights:
            raise ValueError("causal LLN attention has no attention weights to return")
        if attn_mask is None and incremental_state is None:
            raise ValueError("causal LLN attention cannot attend to later tokens")
        q = self._split_heads(self.q_proj(query))
        k = self._split_heads(self.k_proj(query))
        v = self._split_heads(self.v_proj(query))
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask.bool()
        stored: dict[str, Any] = {}
        if incremental_state is not None:
            stored = self._get_input_buffer(incremental_state)
        alpha, beta, moments = self._alpha_beta(q, k, mask, stored.get("moments"))
        x, y, v = scale_inputs(q, k, v, alpha, beta, mask)
        if incremental_state is None:
            out = causal_attention(x, y, v)
        else:
            state = CausalState(stored["maximum"], stored["sums"]) if stored else empty_state(x)
            out, state = continue_causal(x, y, v, state)
            self._set_input_buffer(incremental_state, {**state._asdict(), "moments": moments})
        return self.out_proj(out.to(query.dtype).permute(2, 0, 1, 3).flatten(2)), None

    def _alpha_beta(
        self, q: Tensor, k: Tensor, mask: Tensor | None, previous_moments: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return α and β, which broadcast to (B, H, N), and the moments of all tokens up to the last one.

        previous_moments are the moments of the tokens before q and k (B, H, N, D), or None at the start. With a fixed α
        and β the returned moments are None.
        """
        if self.alpha is None or self.beta is None:
            return running_moments(q, k, mask, self.constants, previous_moments)
        return q.new_tensor(self.alpha).float(), q.new_tensor(self.beta).float(), None

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split (T, B, H · D) into heads, (B, H, T, D), contiguous."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3).contiguous()
