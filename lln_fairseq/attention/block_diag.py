"""Block-diagonal softmax attention: short-range interactions only (arXiv 2311.13541, section 4.2)."""

from dataclasses import dataclass

from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.global_tokens import NO_GLOBAL_TOKENS, VALUES, parse_global_tokens, select_global_tokens
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops import reference
from lln_fairseq.ops.block_diag import block_diag_attention
from lln_fairseq.ops.dispatch import check_block_size


@dataclass
class BlockDiagConfig:
    block_size: int | None = option(None, "tokens in a block; default: the head dimension", at_least=1)
    global_tokens: str = option(
        NO_GLOBAL_TOKENS, f"the first tokens that attend to all tokens, and that all tokens attend to: {VALUES}"
    )


@register_attention("block_diag", BlockDiagConfig)
class BlockDiagAttention(Attention):
    """Softmax attention within blocks of `block_size` consecutive tokens. The last block may be shorter.

    The output is 0 in a block that contains only padding, if no token is global.
    """

    learns_transfer = False  # softmax in blocks stays the same when q and k are reparameterized
    neighbors = 0
    band: int | None = None

    def __init__(
        self, config: BlockDiagConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.block_size = check_block_size(config.block_size, head_dim)
        self.global_tokens = parse_global_tokens(config.global_tokens)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        counts, bound = select_global_tokens(self.global_tokens, context)
        return block_diag_attention(
            q, k, v, context.padding, self.block_size, self.active_dropout, counts, bound, self.neighbors, self.band
        )

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        counts, _ = select_global_tokens(self.global_tokens, context)
        return reference.block_diag_matrix(q, k, self.block_size, context.padding, counts, self.neighbors, self.band)
