"""Block-diagonal attention: softmax attention inside blocks of consecutive tokens (paper, section 4.2)."""

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
    """Compute softmax(q kᵀ / √D) v inside consecutive blocks of `block_size` tokens; the last block may be shorter.

    Args:
        q, k, v: (B, H, N, D), any strides; computed in float32 (float64 for float64 inputs).
        key_padding_mask: bool (B, N), True = padded. The result is 0 in a block without a real key.
        block_size: tokens in a block; None = D, as in the code of the paper's authors.
        dropout_p: probability of dropping an attention weight, drawn from torch's global generator.

    Returns: (B, H, N, D) in the dtype of q. It can be differentiated any number of times, with dropout once.
    Raises: ValueError for invalid arguments.
    """
    check_inputs(q, k, v, key_padding_mask)
    block_size = check_block_size(block_size, q.shape[-1])
    check_dropout(dropout_p)
    spec = HybridSpec(lln_weight=0.0, diag_weight=1.0, block_size=block_size, dropout_p=dropout_p)
    # Triton has no kernel for block-diagonal attention without LLN.
    requested = "auto" if q.device.type == "cpu" else "torch"
    backend = choose_backend(requested, q, block_size, k, v, key_padding_mask)
    unused = per_head(0.0, q, "alpha")  # α and β have no influence where LLN has weight 0
    return hybrid_attention(q, k, v, unused, unused, key_padding_mask, spec, backend)
