"""Softmax attention to the tokens of the own and of neighboring blocks, or to a band of tokens, at linear cost."""

from dataclasses import dataclass

from lln_fairseq.attention.block_diag import BlockDiagAttention, BlockDiagConfig
from lln_fairseq.attention.registry import option, register_attention


@dataclass
class WindowConfig(BlockDiagConfig):
    neighbors: int = option(1, "blocks on each side that a block attends to besides itself", at_least=1)
    band: int | None = option(
        None, "tokens on each side that a token attends to; if set, it replaces neighbors", at_least=1
    )


@register_attention("window", WindowConfig)
class WindowAttention(BlockDiagAttention):
    """Softmax attention of every block of `block_size` tokens to itself and to `neighbors` blocks on each side.

    Blocks near the ends have fewer neighbors. The output is 0 for queries whose keys are all padding.
    With a band, every token attends to `band` tokens on each side instead, as in Longformer and ModernBERT. Then there
    can be no global tokens.
    """

    def __init__(self, config: WindowConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.neighbors = config.neighbors
        self.band = config.band
        if self.band is not None and self.global_tokens is not None:
            raise ValueError(f"global_tokens must be none with a band, got {config.global_tokens}")
