"""RoBERTa for transformers with Linear Log-Normal attention (arXiv 2311.13541), with or without block-diagonal softmax.

This file is shipped with every exported model. It needs only torch and transformers, and uses the kernels of
lln_fairseq if that package is installed.

Shapes: B sequences, H heads, N tokens, D features of a head, C = H D features of a token. The argument `padded` is a
bool tensor (B, N) that is True at padding, or None without padding.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification, RobertaModel
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention

try:
    from lln_fairseq.ops.lln import lln_attention, lln_diag_attention

    HAS_KERNELS = True
except ImportError:
    HAS_KERNELS = False

DENOMINATOR_FLOOR = 1 / 16
FIRST_SEGMENT = "first_segment"
MAX_GLOBAL_TOKENS = 128  # the largest number of global tokens of a first segment
# The paper's moment matching, with the constants of the authors' code: sigma_lln^2 = PAPER_A sigma_tilde^2 + PAPER_B.
PAPER_A = 0.14855178144710912
PAPER_B = -0.35487039130661086
MIN_SIGMA = 1e-6
MAX_LOG_SIGMA2 = 24.0


class LLNRobertaConfig(RobertaConfig):
    """The options of RoBERTa and of Linear Log-Normal attention.

    Args:
        attention: "lln" or "lln_diag".
        mix: the formula that combines LLN with block-diagonal softmax in lln_diag: "average" or "joint_offset".
        block_size: tokens of a block of lln_diag; None means the features of a head.
        global_tokens: the first tokens that attend to all tokens by softmax, and that all tokens attend to, with the
            mix "joint_offset": "none", "first_segment" (of a pair, at most MAX_GLOBAL_TOKENS), or their number as text.
        alpha: fixed factor of the queries; None matches it to softmax's variance.
        beta: fixed factor of the keys; moment matching is used unless both alpha and beta are given.
        scope: "head" measures the standard deviations in each sequence and head, "batch" over the whole batch.
        constants: the constants of moment matching: "calibrated", those of `moment_table`, or "paper".
        gain: "learned" multiplies alpha and beta by learned factors for each head, "none" does not.
        moment_table: two lists, log s in increasing order and log sigma_tilde^2, for the constants "calibrated".
        softmax_layers: the layers, counted from 0, that have softmax attention instead; None means no layer.
        **options: the options of RobertaConfig.
    """

    model_type = "lln_roberta"

    def __init__(
        self,
        attention: str = "lln_diag",
        mix: str = "average",
        block_size: int | None = None,
        global_tokens: str = "none",
        alpha: float | None = None,
        beta: float | None = None,
        scope: str = "head",
        constants: str = "calibrated",
        gain: str = "none",
        moment_table: list[list[float]] | None = None,
        softmax_layers: list[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.attention = attention
        self.mix = mix
        self.block_size = block_size
        self.global_tokens = global_tokens
        self.alpha = alpha
        self.beta = beta
        self.scope = scope
        self.constants = constants
        self.gain = gain
        self.moment_table = moment_table
        self.softmax_layers = softmax_layers or []


class LLNSelfAttention(RobertaSelfAttention):
    """RoBERTa's self-attention module with LLN, LLN+Diag or PyTorch's fused softmax between the projections.

    Each parameter below exists only if the options in `config` use it.

    Args:
        config: the options of the model.
        layer: the number of the layer, which has softmax attention if `config.softmax_layers` contains it.
    """

    log_gain: nn.Parameter  # (2, H), logarithms of the factors of alpha and beta
    offset: nn.Parameter  # (H,)

    def __init__(self, config: LLNRobertaConfig, layer: int) -> None:
        super().__init__(config)
        self.config = config
        self.is_softmax = layer in config.softmax_layers
        if self.is_softmax:
            return
        heads = config.num_attention_heads
        if config.gain == "learned":
            self.log_gain = nn.Parameter(torch.zeros(2, heads))
        self.is_joint = config.attention == "lln_diag" and config.mix == "joint_offset"
        if self.is_joint:
            self.offset = nn.Parameter(torch.zeros(heads))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *unused: Any, **unused_too: Any
    ) -> tuple[Tensor, None]:
        """Return the attention's output (B, N, C) for hidden_states (B, N, C), and None in place of the weights.

        `attention_mask` is the one that `LLNRobertaModel.visible_tokens` returns. Further arguments of
        RobertaSelfAttention are ignored.
        """
        global_tokens = self.count_global_tokens(hidden_states, attention_mask)
        padded = None
        if attention_mask is not None:
            padded = ~attention_mask[:, 0, 0]
        q = self.split_heads(self.query(hidden_states))
        k = self.split_heads(self.key(hidden_states))
        v = self.split_heads(self.value(hidden_states))
        out = self.attend(q, k, v, padded, global_tokens)
        return out.transpose(1, 2).flatten(2), None

    def count_global_tokens(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Return the number of global tokens of every sequence, int64 (B,), or None if there are none.

        Args:
            hidden_states: (B, N, C).
            attention_mask: bool (B, 1, 2, N) with global_tokens="first_segment", whose second row marks the segment.
        """
        if self.is_softmax or self.config.global_tokens == "none":
            return None
        if self.config.global_tokens != FIRST_SEGMENT:
            return hidden_states.new_full(hidden_states.shape[:1], self.largest_prefix(), dtype=torch.int64)
        if attention_mask is None or attention_mask.shape[2] != 2:
            raise ValueError("global_tokens=first_segment needs the mask that LLNRobertaModel makes from input_ids")
        return attention_mask[:, 0, 1].sum(dim=-1).clamp(max=MAX_GLOBAL_TOKENS)

    def largest_prefix(self) -> int:
        """Return the largest number of global tokens of a sequence."""
        if self.config.global_tokens == FIRST_SEGMENT:
            return MAX_GLOBAL_TOKENS
        return int(self.config.global_tokens)

    def split_heads(self, x: Tensor) -> Tensor:
        """Return x (B, N, C) as a contiguous tensor (B, H, N, D)."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2).contiguous()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None, global_tokens: Tensor | None = None
    ) -> Tensor:
        """Compute the attention of q, k, v (B, H, N, D), in their shape and dtype, with lln_fairseq if installed.

        global_tokens is the result of `count_global_tokens`.
        """
        dropout = 0.0
        if self.training:
            dropout = self.dropout.p
        if self.is_softmax:
            return softmax_attention(q, k, v, padded, dropout)
        block_size = self.config.block_size or q.shape[-1]
        if HAS_KERNELS:
            return self.attend_with_kernels(q, k, v, padded, block_size, dropout, global_tokens)
        out = self.attend_without_kernels(q.float(), k.float(), v.float(), padded, block_size, dropout, global_tokens)
        return out.to(q.dtype)

    def attend_with_kernels(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padded: Tensor | None,
        block_size: int,
        dropout: float,
        global_tokens: Tensor | None,
    ) -> Tensor:
        """Compute `attend` with the operations of lln_fairseq."""
        config = self.config
        options: dict[str, Any] = {}
        if config.gain == "learned":
            options["alpha"], options["beta"] = self.alpha_beta(q, k, padded)
        else:
            options["alpha"] = config.alpha
            options["beta"] = config.beta
            options["scope"] = config.scope
            options["constants"] = config.constants
        if config.global_tokens == FIRST_SEGMENT:
            options["global_tokens"] = global_tokens
        elif global_tokens is not None:
            options["global_tokens"] = self.largest_prefix()  # a number, so that the GPU is not waited for
        if config.attention == "lln":
            return lln_attention(q, k, v, key_padding_mask=padded, **options)
        if self.is_joint:
            options["mix_parameter"] = self.offset
        return lln_diag_attention(
            q,
            k,
            v,
            key_padding_mask=padded,
            block_size=block_size,
            dropout_p=dropout,
            mix=config.mix,
            **options,
        )

    def attend_without_kernels(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padded: Tensor | None,
        block_size: int,
        dropout: float,
        global_tokens: Tensor | None,
    ) -> Tensor:
        """Compute `attend` for float32 inputs with plain operations of PyTorch."""
        alpha, beta = self.alpha_beta(q, k, padded)
        a, w = plain_features(q, k, alpha, beta, padded)
        if self.config.attention == "lln":
            return plain_lln(a, w, v, padded)
        if not self.is_joint:
            return (plain_lln(a, w, v, padded) + plain_block_diag(q, k, v, padded, block_size, dropout)) / 2
        if global_tokens is None:
            return plain_joint(q, k, v, a, w, padded, block_size, dropout, self.offset)
        prefix = self.largest_prefix()
        out = plain_joint(q, k, v, a, w, padded, block_size, dropout, self.offset, global_tokens, prefix)
        return with_global_queries(out, q, k, v, padded, dropout, global_tokens, prefix)

    def alpha_beta(self, q: Tensor, k: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return alpha and beta, float32 (B, H), including the learned factors of the heads if there are any."""
        alpha, beta = match_moments(q.float(), k.float(), padded, self.config)
        if self.config.gain == "none":
            return alpha, beta
        gain = self.log_gain.float().exp()
        return alpha * gain[0], beta * gain[1]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None, dropout: float) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v, (B, H, n, D), with dropout on the weights.

    q (B, H, n, D) are the queries of the first n tokens, and k, v are (B, H, N, D). Padded rows of them are ignored. If
    all tokens of a sequence are padded, its output is 0.
    """
    visible = None
    if padded is not None:
        hidden = padded[:, None, :, None]
        q = q.masked_fill(hidden[:, :, : q.shape[2]], 0.0)
        k = k.masked_fill(hidden, 0.0)
        v = v.masked_fill(hidden, 0.0)
        # Without a visible key the weights would be NaN. Such a sequence sees all keys, whose values are 0.
        visible = ~padded | padded.all(dim=1, keepdim=True)
        visible = visible[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout)


def plain_features(q: Tensor, k: Tensor, alpha: Tensor, beta: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the normalized features A and W of LLN, whose output is A (W^T v) (equation 8), without overflow.

    For query i, key j and feature d: L_d = logsumexp_j(beta k_jd), A_id = softmax_d(alpha q_id + L_d) and
    W_jd = exp(beta k_jd - L_d).

    Args:
        q, k: (B, H, N, D).
        alpha, beta: (B, H).
        padded: (B, N) or None. Padded keys get W = 0.

    Returns:
        A and W, (B, H, N, D) each. If all tokens of a sequence are padded, W is 0 and A is meaningless.
    """
    y = beta[..., None, None] * k
    if padded is not None:
        y = y.masked_fill(padded[:, None, :, None], -math.inf)
    total = y.logsumexp(dim=-2, keepdim=True)
    total = total.masked_fill(total == -math.inf, 0.0)  # all tokens are padded
    return (alpha[..., None, None] * q + total).softmax(dim=-1), (y - total).exp()


def plain_lln(a: Tensor, w: Tensor, v: Tensor, padded: Tensor | None) -> Tensor:
    """Compute LLN's output a (w^T v), (B, H, N, D), from the normalized features a, w of `plain_features`.

    Padded rows of v (B, H, N, D) are ignored.
    """
    w_transposed = w.mT
    if padded is not None:
        v = v.masked_fill(padded[:, None, :, None], 0.0)
    return a @ (w_transposed @ v)


class Blocks:
    """Cuts tensors (B, H, N, D) into blocks of `size` tokens, (B, H, blocks, size, D), and joins them again.

    `q` is one of these tensors, for its shape and device; `padded` is (B, N) or None.

    Attributes:
        hidden: (B, 1, blocks, 1, size) bool, True for keys that are padding or that fill up the last block.
    """

    def __init__(self, q: Tensor, padded: Tensor | None, size: int) -> None:
        self.length = q.shape[2]
        self.size = size
        self.count = (self.length + size - 1) // size  # not -(-N // size): ONNX has no floor division of negatives
        if padded is None:
            padded = q.new_zeros(q.shape[0], self.length, dtype=torch.bool)
        hidden = F.pad(padded, (0, self.count * size - self.length), value=True).unflatten(1, (self.count, size))
        self.hidden = hidden[:, None, :, None]

    def cut(self, x: Tensor) -> Tensor:
        """Return x (B, H, N, D) as blocks; zeros fill up the last one."""
        missing = self.count * self.size - self.length
        return F.pad(x, (0, 0, 0, missing)).unflatten(2, (self.count, self.size))

    def join(self, x: Tensor) -> Tensor:
        """Return blocks (B, H, blocks, size, D) as (B, H, N, D), without the rows that filled up the last one."""
        return x.flatten(2, 3).narrow(2, 0, self.length)

    def with_prefix(self, x_blocks: Tensor, x: Tensor, prefix: int) -> Tensor:
        """Return the blocks of x, (B, H, blocks, size, D), with the first `prefix` rows of x appended to each."""
        rows = x[:, :, None, :prefix].expand(-1, -1, self.count, -1, -1)
        return torch.cat([x_blocks, rows], dim=3)

    def hidden_prefix(self, padded: Tensor | None, global_tokens: Tensor, prefix: int) -> Tensor:
        """Return which of the first tokens are no additional key of a block, bool (B, 1, blocks, 1, n).

        These are padded tokens, tokens that are not global, and tokens in or after the block. n is `prefix`, or the
        length if that is smaller, and global_tokens is (B,).
        """
        token = torch.arange(self.length, device=global_tokens.device)[:prefix]
        start = self.size * torch.arange(self.count, device=global_tokens.device)
        hidden = token >= global_tokens[:, None]
        if padded is not None:
            hidden = hidden | padded[:, :prefix]
        hidden = hidden[:, None] | (token >= start[:, None])
        return hidden[:, None, :, None]


def plain_block_diag(q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None, block_size: int, dropout: float) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v, (B, H, N, D), inside blocks of tokens, with dropout on the weights.

    The output is 0 in a block whose tokens are all padded.
    """
    blocks = Blocks(q, padded, block_size)
    return blocks.join(attend_inside(blocks.cut(q), blocks.cut(k), blocks.cut(v), blocks.hidden, dropout))


def attend_inside(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, dropout: float) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v of every block, (B, H, blocks, size, D), with dropout on the weights.

    Args:
        q: (B, H, blocks, size, D).
        k, v: the keys and values of every block, (B, H, blocks, keys, D).
        hidden: (B, 1, blocks, 1, keys) bool, True for keys that are ignored. Without others, the output is 0.
        dropout: dropout probability.
    """
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, torch.finfo(q.dtype).min)
    weights = F.dropout(scores.softmax(dim=-1).masked_fill(hidden, 0.0), dropout)
    return weights @ v.masked_fill(hidden.mT, 0.0)


def plain_joint(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    w: Tensor,
    padded: Tensor | None,
    block_size: int,
    dropout: float,
    offset: Tensor,
    global_tokens: Tensor | None = None,
    prefix: int = 0,
) -> Tensor:
    """Compute the mix joint_offset, softmax inside the query's block and LLN outside: (1 - c u) Diag + c (LLN outside).

    u is the weight that LLN gives to tokens outside the query's block, and c is 1 / (u + (1 - u) exp(-offset)), where
    the denominator is at least DENOMINATOR_FLOOR. If all tokens of a sequence that are not padding are in one block,
    the output (B, H, N, D) is that of softmax. Global tokens belong to every block as keys; `with_global_queries`
    computes what they attend to.

    Args:
        q, k, v: (B, H, N, D).
        a, w: LLN's features from `plain_features`, (B, H, N, D).
        padded: (B, N) or None.
        block_size: tokens of a block.
        dropout: dropout probability of the softmax weights.
        offset: (H,).
        global_tokens: the number of global tokens of every sequence, (B,), or None.
        prefix: the first tokens that can be global; a sequence has at most so many global tokens.
    """
    blocks = Blocks(q, padded, block_size)
    lln = plain_lln(a, w, v, padded)
    q_blocks = blocks.cut(q)
    a_blocks = blocks.cut(a)
    lln_blocks = blocks.cut(lln)
    k_inside = blocks.cut(k)
    v_inside = blocks.cut(v)
    w_inside = blocks.cut(w)
    hidden = blocks.hidden
    all_real = (~hidden).sum(dim=-1, keepdim=True).sum(dim=2, keepdim=True)  # real tokens of each sequence
    if global_tokens is not None:
        k_inside = blocks.with_prefix(k_inside, k, prefix)
        v_inside = blocks.with_prefix(v_inside, v, prefix)
        w_inside = blocks.with_prefix(w_inside, w, prefix)
        hidden = torch.cat([hidden, blocks.hidden_prefix(padded, global_tokens, prefix)], dim=-1)
    diag = attend_inside(q_blocks, k_inside, v_inside, hidden, dropout)
    weights_inside = (a_blocks @ w_inside.mT).masked_fill(hidden, 0.0)
    u = (1 - weights_inside.sum(dim=-1, keepdim=True)).clamp(0, 1)
    real = (~hidden).sum(dim=-1, keepdim=True)  # real tokens inside each block
    denominator = u + (1 - u) * (-offset.float()[:, None, None, None]).exp()
    c = 1 / denominator.clamp_min(DENOMINATOR_FLOOR)
    c = c.masked_fill(real == 0, 1.0)
    c = c.masked_fill((real == all_real) & (real > 0), 0.0)  # all real tokens are inside this block
    lln_outside = lln_blocks - weights_inside @ v_inside.masked_fill(hidden.mT, 0.0)
    return blocks.join((1 - c * u) * diag + c * lln_outside)


def with_global_queries(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padded: Tensor | None,
    dropout: float,
    global_tokens: Tensor,
    prefix: int,
) -> Tensor:
    """Return `out` with softmax over all tokens as the output of the global tokens. All tensors are (B, H, N, D).

    `global_tokens` (B,) and `prefix` are those of `plain_joint`.
    """
    first = q[:, :, :prefix]
    exact = softmax_attention(first, k, v, padded, dropout)
    is_global = torch.arange(first.shape[2], device=q.device) < global_tokens[:, None]
    first = torch.where(is_global[:, None, :, None], exact, out[:, :, :prefix])
    return torch.cat([first, out[:, :, prefix:]], dim=2)


@torch.no_grad()
def match_moments(q: Tensor, k: Tensor, padded: Tensor | None, config: LLNRobertaConfig) -> tuple[Tensor, Tensor]:
    """Return the alpha and beta (B, H) that match LLN's attention weights to softmax's (section 4.1 of the paper).

    If the configuration states both, those are returned. Neither has a gradient.

    Args:
        q, k: float32 (B, H, N, D).
        padded: (B, N) or None.
        config: the constants, scope and fixed values.
    """
    if config.alpha is not None and config.beta is not None:
        ones = torch.ones(q.shape[:2], device=q.device)
        return config.alpha * ones, config.beta * ones
    sigma_q = standard_deviation(q, padded, config.scope)
    sigma_k = standard_deviation(k, padded, config.scope)
    log_s = 2 * (sigma_q.log() + sigma_k.log())
    if config.constants == "paper":
        log_sigma2 = ((log_s.exp() - PAPER_B) / PAPER_A).log()
    else:  # linear interpolation in the table; beyond its ends, the first and the last segment are continued
        xs, ys = torch.tensor(config.moment_table, device=q.device)
        right = torch.bucketize(log_s, xs).clamp(1, len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        log_sigma2 = ys[right - 1] + slope * (log_s - xs[right - 1])
    sigma_tilde = (log_sigma2.clamp_max(MAX_LOG_SIGMA2) / 2).exp() / math.sqrt(2)
    return sigma_tilde / sigma_q, sigma_tilde / sigma_k


def standard_deviation(x: Tensor, padded: Tensor | None, scope: str) -> Tensor:
    """Return the standard deviation of x (B, H, N, D) over features and unpadded tokens, (B, H), at least MIN_SIGMA.

    The scope "head" measures every sequence and head by itself. The scope "batch" measures all of them together and
    returns the same number for each.
    """
    real = torch.ones(x.shape[0], 1, x.shape[2], 1, device=x.device)
    if padded is not None:
        real = (~padded[:, None, :, None]).float()
    dims: tuple[int, ...] = (2, 3)
    if scope == "batch":
        dims = (0, 1, 2, 3)
    count = (real * torch.ones_like(x)).sum(dims, keepdim=True).clamp_min(1.0)
    mean = torch.where(real > 0, x, 0.0).sum(dims, keepdim=True) / count
    variance = torch.where(real > 0, x - mean, 0.0).square().sum(dims, keepdim=True) / count
    return variance.clamp_min(MIN_SIGMA**2).sqrt()[..., 0, 0].expand(x.shape[:2])


class LLNRobertaModel(RobertaModel):
    """RoBERTa's encoder with LLN attention, and softmax in the layers that the configuration names.

    By default it has no pooler, because none was trained.
    """

    config_class = LLNRobertaConfig
    _supports_sdpa = False  # PyTorch's scaled_dot_product_attention computes softmax

    def __init__(self, config: LLNRobertaConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        for number, layer in enumerate(self.encoder.layer):
            layer.attention.self = LLNSelfAttention(config, number)  # type: ignore[union-attr]
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *others: Any, **options: Any
    ) -> Any:
        """Compute RobertaModel's output.

        Args:
            input_ids: (B, N). With global_tokens="first_segment" they are required.
            attention_mask: (B, N), 0 at padding, which must be at the right for attention="lln_diag". None means that
                there is no padding.
            *others: further arguments of RobertaModel.
            **options: further arguments of RobertaModel, such as inputs_embeds.

        Raises:
            ValueError: if the mask has another number of dimensions, or padding at the left.
        """
        if attention_mask is None and input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        visible = self.visible_tokens(input_ids, attention_mask, options.get("inputs_embeds"))
        return super().forward(input_ids, visible, *others, **options)

    def visible_tokens(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, inputs_embeds: Tensor | None
    ) -> Tensor | None:
        """Return the mask for the layers, bool (B, 1, rows, N), True for tokens that are not padding.

        It has one row for all queries. With global_tokens="first_segment" it has a second one, which marks the first
        segment: as a part of the mask, it reaches every layer, also if gradient checkpointing computes a layer again in
        the backward pass.

        transformers 5 passes a mask with four dimensions on to the layers. It would expand another one, and None, to
        (B, 1, N, N), which needs more memory than the attention itself.
        """
        if attention_mask is None:
            if input_ids is not None:
                attention_mask = torch.ones_like(input_ids)
            elif inputs_embeds is not None:
                attention_mask = torch.ones_like(inputs_embeds[:, :, 0])
            else:
                return None  # RobertaModel reports the missing input
        if attention_mask.dim() != 2:
            shape = tuple(attention_mask.shape)
            raise ValueError(f"this attention supports only padding masks (B, N), got a mask of shape {shape}")
        if self.config.attention == "lln_diag":
            require_right_padding(attention_mask)
        rows = attention_mask[:, None]
        if self.config.global_tokens == FIRST_SEGMENT:
            eos = self.config.eos_token_id
            rows = mark_first_segments(input_ids, attention_mask, eos)  # type: ignore[arg-type]
        return rows[:, None].bool()

    def get_extended_attention_mask(self, attention_mask: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the mask of `visible_tokens` as it is. RobertaModel calls this in transformers before 5."""
        return attention_mask


def require_right_padding(attention_mask: Tensor) -> None:
    """Raise ValueError if a sequence of the mask (B, N) begins with padding, which would shift its blocks.

    Nothing is checked while the model is compiled or exported, because the values are not known then.
    """
    if torch.compiler.is_compiling():
        return
    is_shifted = (attention_mask[:, :1] == 0).any(dim=1) & attention_mask.any(dim=1)
    if is_shifted.any():
        raise ValueError("this attention needs padding at the right: set tokenizer.padding_side = 'right'")


def mark_first_segments(input_ids: Tensor | None, attention_mask: Tensor, eos: int) -> Tensor:
    """Return the attention mask with a second row, which is 1 in the first segment of a sequence: int64 (B, 2, N).

    In a pair, `<s> A </s></s> B </s>`, the first segment ends with the first of the two adjacent </s>. Without two
    adjacent </s> it is the first token.

    Args:
        input_ids: (B, N).
        attention_mask: (B, N), 0 at padding.
        eos: the id of </s>.

    Raises:
        ValueError: if there are no input_ids.
    """
    if input_ids is None:
        raise ValueError("global_tokens=first_segment needs input_ids, got only inputs_embeds")
    is_end = input_ids == eos
    is_doubled = is_end[:, :-1] & is_end[:, 1:]
    tokens_before = (is_doubled.cumsum(dim=1) == 0).sum(dim=1)  # all of them if no </s> is doubled
    lengths = torch.where(is_doubled.any(dim=1), tokens_before + 1, 1)
    token = torch.arange(input_ids.shape[1], device=input_ids.device)
    return torch.stack([attention_mask.long(), (token < lengths[:, None]).long()], dim=1)


class LLNRobertaForMaskedLM(RobertaForMaskedLM):
    """RoBERTa with LLN attention and a masked-language-model head."""

    config_class = LLNRobertaConfig
    _supports_sdpa = False

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = LLNRobertaModel(config)
        self.post_init()


class LLNRobertaForSequenceClassification(RobertaForSequenceClassification):
    """RoBERTa with LLN attention and a classification head."""

    config_class = LLNRobertaConfig
    _supports_sdpa = False

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = LLNRobertaModel(config)
        self.post_init()
