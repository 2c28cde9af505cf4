"""Kernel attention with κ = ReLU at quadratic cost, one of the kernels in Figure 2 of arXiv 2311.13541."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, register_attention
from lln_fairseq.ops.autocast import without_autocast
from lln_fairseq.ops.formula import clear_padding, compute_dtype


class ScoreKernelAttention(Attention):
    """Attention with P_ij = κ(q_i·k_j) / Σ_l κ(q_i·k_l), for a non-negative kernel κ of the score.

    A subclass defines κ in `kernel`. P is formed in full (N x N), because this class is for comparison and analysis. P
    is computed in float32, or in float64 for float64 inputs.

    κ must be homogeneous. P then stays the same if all queries or keys are multiplied by a positive number, so scores
    are not divided by √D. If κ is 0 for all keys of a query, the output is the mean of the values without padding. This
    is the limit for ε -> 0 of attention with the kernel κ + ε.
    """

    @without_autocast
    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        dtype = compute_dtype(v.dtype)
        values = v.to(dtype)
        weights = self.kernel(q.to(dtype) @ k.to(dtype).mT)
        num_real: int | Tensor = v.shape[-2]
        if context.padding is not None:
            weights = weights.masked_fill(context.padding[:, None, None, :], 0.0)
            num_real = (~context.padding).sum(dim=1).clamp(min=1)[:, None, None, None]
        total = weights.sum(dim=-1, keepdim=True)
        is_empty = total == 0
        out = F.dropout(weights, self.active_dropout) @ values / total.masked_fill(is_empty, 1.0)
        mean = values.sum(dim=-2, keepdim=True) / num_real
        return torch.where(is_empty, mean, out).to(v.dtype)

    def kernel(self, scores: Tensor) -> Tensor:
        """Compute κ(s) elementwise for all scores s = q_i·k_j, (B, H, N, N). The results must not be negative."""
        raise NotImplementedError


@register_attention("relu")
class ReluAttention(ScoreKernelAttention):
    """Kernel attention with κ(s) = max(s, 0). A query without a positive score attends to all tokens equally."""

    def kernel(self, scores: Tensor) -> Tensor:
        return scores.relu()
