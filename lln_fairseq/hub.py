"""Make transformers know this package's models and its attention in windows: `import lln_fairseq.hub`.

After the import, AutoConfig, AutoModel, AutoModelForMaskedLM and AutoModelForSequenceClassification open directories
that `lln-fairseq export` wrote without trust_remote_code, and so do `pipeline` and sentence-transformers. With
transformers 5, encoders that have sliding windows in some layers, such as ModernBERT, compute them at linear cost:

    model = AutoModel.from_pretrained("answerdotai/ModernBERT-base", attn_implementation="lln_window")

Of other packages, only torch and transformers are needed.
"""

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from lln_fairseq.conversion.modeling_lln_roberta import (
    LLNRobertaConfig,
    LLNRobertaForMaskedLM,
    LLNRobertaForSequenceClassification,
    LLNRobertaModel,
)
from lln_fairseq.ops.block_diag import block_diag_attention

LLN_WINDOW = "lln_window"  # the value of attn_implementation
BLOCK_SIZE = 64  # tokens of a tile; the result does not depend on it
# Arguments of transformers' attention functions that change the result, apart from those of `window_attention`.
UNSUPPORTED = ("softcap", "position_bias", "s_aux", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions")

logger = logging.getLogger(__name__)


def padding_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None,
    allow_is_bidirectional_skip: bool = False,
    **unused: Any,
) -> Tensor | None:
    """Return the mask that transformers passes to `window_attention`: bool (B, N), False at padding, or None without.

    Windows are no part of it: `window_attention` gets their size. Raises ValueError for a mask of another kind.
    """
    # False for masks that are not the same for all queries but for a window, and for those that are changed afterwards.
    if not allow_is_bidirectional_skip or q_length != kv_length:
        raise ValueError(f"{LLN_WINDOW} supports only padding and windows: use attn_implementation='sdpa'")
    if attention_mask is None:
        return None
    if not torch.compiler.is_compiling() and attention_mask.all():
        return None
    return attention_mask


def window_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer of transformers, in its window if it has one.

    Args:
        module: the layer's attention.
        query: (B, H, N, D).
        key, value: (B, H, N, D), or fewer heads, each of which belongs to several heads of the queries.
        attention_mask: the result of `padding_mask`.
        dropout: probability of dropping an attention weight.
        scaling: the factor of query · key; None means 1 / √D.
        sliding_window: one more than the number of tokens that a query sees on each side; None for all tokens.
        is_causal: whether queries see only earlier tokens, by default what the module says.
        **options: further arguments, of which those in UNSUPPORTED must be None or False.

    Returns: the output (B, N, H, D), and None in place of the weights. Outputs at padding have no meaning.
    Raises: ValueError for what this attention does not support.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None and options[name] is not False]
    if is_causal:
        unsupported.append("is_causal")
    if unsupported:
        raise ValueError(f"{LLN_WINDOW} does not support {', '.join(unsupported)}: use attn_implementation='sdpa'")
    batch, heads, length, dim = query.shape
    if key.shape[2] != length or value.shape[3] != dim:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"{LLN_WINDOW} needs queries, keys and values of the same length and size, got {shapes}")
    if attention_mask is not None and attention_mask.shape != (batch, length):
        raise ValueError(
            f"{LLN_WINDOW} needs a padding mask (B, N) = ({batch}, {length}), got {tuple(attention_mask.shape)}"
        )
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
    if scaling is None:
        scaling = dim**-0.5
    band = None
    if sliding_window is not None:
        band = band_of_layer(module, sliding_window)
    if band is None or length <= 2 * band + BLOCK_SIZE:
        out = attend_with_mask(query, key, value, attention_mask, band, dropout, scaling)
    else:
        if not math.isclose(scaling, dim**-0.5):
            query = query * (scaling * dim**0.5)
        padding = None
        if attention_mask is not None:
            padding = ~attention_mask
        out = block_diag_attention(query, key, value, padding, BLOCK_SIZE, dropout, band=band)
    return out.transpose(1, 2).contiguous(), None


def band_of_layer(module: nn.Module, sliding_window: int) -> int:
    """Return how many tokens a query sees on each side.

    Models pass the number of their configuration plus 1, as flash attention wants it. Raises ValueError otherwise,
    because the number could mean something else.
    """
    band = sliding_window - 1
    stated = getattr(getattr(module, "config", None), "sliding_window", None)
    if stated != band:
        raise ValueError(
            f"{LLN_WINDOW} does not know the window of {type(module).__name__}: its configuration has "
            f"sliding_window={stated}, the layer {sliding_window}; use attn_implementation='sdpa'"
        )
    return band


def attend_with_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    band: int | None,
    dropout: float,
    scaling: float,
) -> Tensor:
    """Compute the attention (B, H, N, D) with torch's fused attention, which gets no mask if all tokens are visible."""
    length = query.shape[2]
    visible = None
    if attention_mask is not None:
        visible = attention_mask[:, None, None]
    if band is not None and length > band + 1:
        token = torch.arange(length, device=query.device)
        visible_in_band = (token[:, None] - token).abs() <= band
        if visible is None:
            visible = visible_in_band
        else:
            # A padding token also sees itself: all keys in its band can be padding, and its output would be NaN.
            visible = (visible & visible_in_band) | torch.eye(length, dtype=torch.bool, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, visible, dropout, scale=scaling)


def register_with_transformers() -> None:
    """Register the classes and, with transformers 5, the attention `lln_window`."""
    AutoConfig.register(LLNRobertaConfig.model_type, LLNRobertaConfig, exist_ok=True)
    AutoModel.register(LLNRobertaConfig, LLNRobertaModel, exist_ok=True)
    AutoModelForMaskedLM.register(LLNRobertaConfig, LLNRobertaForMaskedLM, exist_ok=True)
    AutoModelForSequenceClassification.register(LLNRobertaConfig, LLNRobertaForSequenceClassification, exist_ok=True)
    if int(transformers.__version__.split(".")[0]) < 5:
        # Its ModernBERT makes masks of N x N before any layer, so that the cost would not be linear.
        version = transformers.__version__
        logger.warning("attn_implementation='%s' needs transformers 5, got %s", LLN_WINDOW, version)
        return
    transformers.AttentionInterface.register(LLN_WINDOW, window_attention)
    # Without a mask function, transformers would pass no mask, and padding would be attended to.
    transformers.AttentionMaskInterface.register(LLN_WINDOW, padding_mask)


register_with_transformers()
