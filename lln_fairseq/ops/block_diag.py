"""Softmax attention inside blocks of consecutive tokens (paper, section 4.2), or also to the blocks beside them."""

from torch import Tensor

from lln_fairseq.ops.dispatch import attend, check_block_size, check_inputs, choose_backend, count_global_tokens
from lln_fairseq.ops.formula import DIAG, Inputs, Spec, neighbors_of_band


def block_diag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    block_size: int | None = None,
    dropout_p: float = 0.0,
    global_tokens: int | Tensor | None = None,
    max_global_tokens: int | None = None,
    neighbors: int = 0,
    band: int | None = None,
) -> Tensor:
    """Compute softmax(q kᵀ / √D) v inside consecutive blocks of `block_size` tokens; the last block may be shorter.

    With neighbors, queries attend to the blocks beside their own, too. With a band, they attend to a number of tokens.

    Args:
        q, k, v: (B, H, N, D) with any strides. The computation is in float32, or in float64 for float64 inputs.
        key_padding_mask: bool (B, N), True = padded, or None. The result is 0 for queries whose keys are all padding.
        block_size: tokens in a block, at least 1. None means D, as in the code of the paper's authors.
        dropout_p: probability of dropping an attention weight, in [0, 1). torch's global generator decides which.
        global_tokens: the number of tokens at the start of every sequence that attend to all tokens, and that all
            tokens attend to. It and max_global_tokens are the arguments of `lln_diag_attention`.
        neighbors: the number of blocks on each side whose tokens are keys of a block's queries too. With 1, a query
            sees the tokens of three blocks, or of two in the first and the last block.
        band: if it is not None, the keys of query i are the tokens i - band to i + band. Blocks then only decide the
            speed, `neighbors` is not used, and there can be no global tokens.

    Returns: (B, H, N, D) in the dtype of q. It can be differentiated any number of times, with dropout only once.
    Raises: ValueError if a shape, dtype, device, block_size, dropout_p, global_tokens, neighbors or band is
        invalid.
    """
    check_inputs(q, k, v, key_padding_mask)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if neighbors < 0:
        raise ValueError(f"neighbors must be at least 0, got {neighbors}")
    check_band(band, global_tokens)
    counts, max_global = count_global_tokens(global_tokens, max_global_tokens, q, k, v)
    size = check_block_size(block_size, q.shape[-1])
    if band is not None:
        neighbors = neighbors_of_band(band, size)
    length = q.shape[2]
    if isinstance(length, int):  # not a symbol, as while a model is exported
        neighbors = min(neighbors, max(length - 1, 0) // size)  # the blocks that there are, besides the own one
    spec = Spec(DIAG, size, dropout_p, max_global, neighbors, band)
    tensors = Inputs(q, k, v, padding=key_padding_mask, global_counts=counts)
    return attend(spec, tensors, choose_backend("auto", spec, tensors))


def check_band(band: int | None, global_tokens: object | None) -> None:
    """Raise ValueError if there cannot be such a band, or not together with these global tokens."""
    if band is None:
        return
    if band < 0:
        raise ValueError(f"band must be at least 0, got {band}")
    if global_tokens is not None:
        raise ValueError("a window with a band cannot have global tokens: set neighbors instead of band")
