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

    α and β are fixed, or matched for every token to the queries and keys of that token and the earlier ones. In both
    cases no output depends on a later token. There is no attention dropout, because the matrix of attention
    probabilities is never formed.

    Args:
        embed_dim: number of features C of a token.
        num_heads: number of heads H.
        alpha, beta: fixed α and β; None for both = moment matching.
        constants: the constants of the moment matching, one of `ops.moment_matching.CONSTANTS`.
        options: further arguments of fairseq's MultiheadAttention.

    Raises:
        ValueError: if only one of α and β is given, or if α or β is not positive and finite.
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
            query: the hidden states (T, B, C) of T tokens. In incremental decoding, these tokens follow the tokens of
                earlier calls.
            key, value: ignored, since queries, keys and values are projections of the same tokens.
            key_padding_mask: (B, T), True or nonzero = padding; None if nothing is padded.
            incremental_state: fairseq's state of incremental decoding, or None. It is updated in place. Its size does
                not grow with the number of tokens.
            need_weights: must be False.
            attn_mask: any tensor, to state that later tokens are hidden; its content is ignored. It may be None only
                with an incremental state.

        Returns:
            The output (T, B, C), and None in place of attention weights.

        Raises:
            ValueError: if need_weights is True, or if attn_mask and incremental_state are both None.
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
        """Return α and β of every token, and the moments that the next call needs.

        Args:
            q, k: (B, H, N, D).
            mask: bool (B, N), True = padding; None if nothing is padded.
            previous_moments: the moments that the call for the earlier tokens returned; None for the first tokens.

        Returns:
            α, β and the moments of all tokens so far. α and β are (B, H, N). If they are fixed, they are scalars and
            the moments are None.
        """
        if self.alpha is None or self.beta is None:
            return running_moments(q, k, mask, self.constants, previous_moments)
        return q.new_tensor(self.alpha).float(), q.new_tensor(self.beta).float(), None

    def _split_heads(self, x: Tensor) -> Tensor:
        """Split x (T, B, H · D) into its heads. The result (B, H, T, D) is contiguous."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3).contiguous()
