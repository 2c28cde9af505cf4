"""Block-diagonal attention: ordinary softmax attention inside blocks of tokens (paper, section 4.2)."""

from torch import Tensor

from lln_fairseq.ops.autograd import hybrid_attention
from lln_fairseq.ops.backends import HybridSpec, choose_backend
from lln_fairseq.ops.checks import check_block_size, check_dropout, check_inputs, per_head


def block_diag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    block_size: int | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / √D) v inside consecutive blocks of `block_size` tokens; the last block may be shorter.

    Args:
        q, k, v: (B, H, N, D), any strides; computed in float32 (float64 for float64 inputs).
        key_padding_mask: bool (B, N), True = padded. A block without a real key gives 0.
        block_size: tokens in a block; None = D, as the authors of the paper do.
        dropout_p: probability of dropping an attention weight, drawn from torch's global generator.

    Returns: (B, H, N, D) in the dtype of q.
    Raises: ValueError for what does not fit. Differentiable any number of times; with dropout once.
    """
    check_inputs(q, k, v, key_padding_mask)
    block_size = check_block_size(block_size, q.shape[-1])
    mix = HybridSpec(0.0, 1.0, block_size, check_dropout(dropout_p))
    # Triton has no kernel for the blocks alone.
    wanted = "auto" if q.device.type == "cpu" else "torch"
    backend = choose_backend(wanted, q, block_size, k, v, key_padding_mask)
    unused = per_head(0.0, q, "alpha")
    return hybrid_attention(q, k, v, unused, unused, key_padding_mask, mix, backend)
