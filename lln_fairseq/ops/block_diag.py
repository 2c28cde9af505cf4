"""Block-diagonal attention: softmax attention inside blocks of consecutive tokens (paper, section 4.2)."""

from torch import Tensor

from lln_fairseq.ops.autograd import hybrid_attention
from lln_fairseq.ops.backends import HybridSpec, choose_backend
from lln_fairseq.ops.checks import check_block_size, check_dropout, check_inputs, scalar_per_head


def block_diag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    block_size: int | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute softmax(q kᵀ / √D) v inside consecutive blocks of `block_size` tokens; the last block may be shorter.

    Args:
        q, k, v: (B, H, N, D) with any strides. The computation is in float32, or in float64 for float64 inputs.
        key_padding_mask: bool (B, N), True = padded, or None. The result is 0 in a block whose keys are all padding.
        block_size: tokens in a block, at least 1. None means D, as in the code of the paper's authors.
        dropout_p: probability of dropping an attention weight, in [0, 1). torch's global generator decides which.

    Returns: (B, H, N, D) in the dtype of q. It can be differentiated any number of times, with dropout only once.
    Raises: ValueError if a shape, dtype, device, block_size or dropout_p is invalid.
    """
    check_inputs(q, k, v, key_padding_mask)
    block_size = check_block_size(block_size, q.shape[-1])
    check_dropout(dropout_p)
    spec = HybridSpec(lln_weight=0.0, diag_weight=1.0, block_size=block_size, dropout_p=dropout_p)
    # Triton has no kernel for block-diagonal attention without LLN.
    requested = "auto" if q.device.type == "cpu" else "torch"
    backend = choose_backend(requested, q, block_size, k, v, key_padding_mask)
    unused = scalar_per_head(0.0, q, "alpha")  # α and β have no influence where LLN has weight 0
    return hybrid_attention(q, k, v, unused, unused, key_padding_mask, spec, backend)
