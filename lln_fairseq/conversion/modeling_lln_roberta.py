"""RoBERTa for transformers with Linear Log-Normal attention (arXiv 2311.13541), with or without block-diagonal softmax.

This file is shipped with every exported model that is no stock RoBERTa, beside formula.py, rotary.py and pairs.py, from
which it then imports. They need only torch and transformers, and use the kernels of lln_fairseq if that package is
installed.

Shapes: B sequences, H heads, N tokens, D features of a head, C = H D features of a token. The argument `padded` is a
bool tensor (B, N) that is True at padding, or None without padding.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForSequenceClassification, RobertaModel
from transformers.activations import ACT2FN
from transformers.models.roberta.modeling_roberta import RobertaClassificationHead, RobertaLMHead, RobertaSelfAttention
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import (
    RobertaPreLayerNormAttention,
    RobertaPreLayerNormIntermediate,
    RobertaPreLayerNormOutput,
)

from lln_fairseq.ops.formula import (
    AVERAGE,
    DIAG,
    JOINT,
    LLN,
    MAX_FIRST_SEGMENT,
    Inputs,
    Spec,
    alpha_beta,
    attend_to_all_keys,
    compute_dtype,
    hybrid_formula,
    neighbors_of_band,
    standard_deviations,
)
from lln_fairseq.ops.rotary import rotary_factors, rotate
from lln_fairseq.text.pairs import first_segment_lengths

try:
    from lln_fairseq.ops.block_diag import block_diag_attention
    from lln_fairseq.ops.lln import lln_attention, lln_diag_attention

    HAS_KERNELS = True
    HAS_BAND = "band" in inspect.signature(block_diag_attention).parameters  # an old package has none
except ImportError:
    HAS_KERNELS = False

# The names of RobertaModel.forward's arguments after attention_mask.
ARGUMENTS = list(inspect.signature(RobertaModel.forward).parameters)[3:]
FIRST_SEGMENT = "first_segment"
WITHOUT_LLN = ("block_diag", "window")  # softmax inside blocks, and with the blocks beside them
WITH_BLOCKS = ("lln_diag", *WITHOUT_LLN)


class LLNRobertaConfig(RobertaConfig):
    """The options of RoBERTa and of Linear Log-Normal attention.

    Args:
        attention: "lln", "lln_diag", "block_diag", "window" or "softmax".
        mix: the formula that combines LLN with block-diagonal softmax in lln_diag: "average" or "joint_offset".
        block_size: tokens of a block of lln_diag, block_diag and window; None means the features of a head.
        neighbors: the blocks on each side that a block of window attends to.
        band: the tokens on each side that a token of window attends to; if it is not None, it replaces neighbors.
        global_tokens: the first tokens that attend to all tokens by softmax, and that all tokens attend to, with
            block_diag, window or the mix "joint_offset": "none", "first_segment" (of a pair, at most
            MAX_FIRST_SEGMENT), or their number as text.
        alpha: fixed factor of the queries; None matches it to softmax's variance.
        beta: fixed factor of the keys; moment matching is used unless both alpha and beta are given.
        scope: "head" measures the standard deviations in each sequence and head, "batch" over the whole batch.
        constants: the constants of moment matching: "calibrated", those of `moment_table`, or "paper".
        gain: "learned" multiplies alpha and beta by learned factors for each head, "none" does not.
        moment_table: two lists, log s in increasing order and log sigma_tilde^2, for the constants "calibrated".
        softmax_layers: the layers, counted from 0, that have softmax attention instead; None means no layer.
        rotary_base: the base of the frequencies of rotary positions, which the queries and keys of all layers then have
            besides the position embeddings; None means no rotary positions.
        normalize_before: apply layer norm before the attention and the feed-forward part of a layer, and after the last
            layer, instead of after both.
        normalize_embedding: apply layer norm after the embeddings.
        pair_form: "roberta" for pairs `<s> A </s></s> B </s>`, "bert" or "distilbert" for one </s> between the texts.
        classifier_activation: the activation of the classification head, "tanh" or "relu".
        **options: the options of RobertaConfig.
    """

    model_type = "lln_roberta"

    def __init__(
        self,
        attention: str = "lln_diag",
        mix: str = "average",
        block_size: int | None = None,
        neighbors: int = 1,
        band: int | None = None,
        global_tokens: str = "none",
        alpha: float | None = None,
        beta: float | None = None,
        scope: str = "head",
        constants: str = "calibrated",
        gain: str = "none",
        moment_table: list[list[float]] | None = None,
        softmax_layers: list[int] | None = None,
        rotary_base: float | None = None,
        normalize_before: bool = False,
        normalize_embedding: bool = True,
        pair_form: str = "roberta",
        classifier_activation: str = "tanh",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.attention = attention
        self.mix = mix
        self.block_size = block_size
        self.neighbors = neighbors
        self.band = band
        self.global_tokens = global_tokens
        self.alpha = alpha
        self.beta = beta
        self.scope = scope
        self.constants = constants
        self.gain = gain
        self.moment_table = moment_table
        self.softmax_layers = softmax_layers or []
        self.rotary_base = rotary_base
        self.normalize_before = normalize_before
        self.normalize_embedding = normalize_embedding
        self.pair_form = pair_form
        self.classifier_activation = classifier_activation


class LLNSelfAttention(RobertaSelfAttention):
    """RoBERTa's self-attention module with LLN, LLN+Diag, blocks or PyTorch's fused softmax between the projections.

    Each parameter below exists only if the options in `config` use it.

    Args:
        config: the options of the model.
        layer: the number of the layer, which also has softmax attention if `config.softmax_layers` contains it.
    """

    log_gain: nn.Parameter  # (2, H), logarithms of the factors of alpha and beta
    offset: nn.Parameter  # (H,)

    def __init__(self, config: LLNRobertaConfig, layer: int) -> None:
        super().__init__(config)
        self.config = config
        self.is_softmax = config.attention == "softmax" or layer in config.softmax_layers
        if self.is_softmax:
            return
        heads = config.num_attention_heads
        if config.gain == "learned":
            self.log_gain = nn.Parameter(torch.zeros(2, heads))
        self.neighbors = config.neighbors if config.attention == "window" else 0
        self.band = config.band if config.attention == "window" else None
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
        if self.config.rotary_base is not None:
            positions = torch.arange(q.shape[2], device=q.device)[None]
            if padded is not None:
                positions = (~padded).cumsum(dim=1) - 1
            dtype = compute_dtype(q.dtype)
            factors = rotary_factors(positions[:, None], q.shape[3], dtype, self.config.rotary_base)
            q = rotate(q, factors)
            k = rotate(k, factors)
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
        return attention_mask[:, 0, 1].sum(dim=-1).clamp(max=MAX_FIRST_SEGMENT)

    def largest_prefix(self) -> int:
        """Return the largest number of global tokens of a sequence."""
        if self.config.global_tokens == FIRST_SEGMENT:
            return MAX_FIRST_SEGMENT
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
            return attend_to_all_keys(q, k, v, padded, dropout)
        is_traced = torch.compiler.is_exporting() or torch.jit.is_tracing()
        has_kernels = HAS_KERNELS and (self.band is None or HAS_BAND)
        if has_kernels and not is_traced:
            return self.attend_with_kernels(q, k, v, padded, dropout, global_tokens)
        return self.attend_without_kernels(q, k, v, padded, dropout, global_tokens)

    def attend_with_kernels(
        self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None, dropout: float, global_tokens: Tensor | None
    ) -> Tensor:
        """Compute `attend` with the operations of lln_fairseq."""
        config = self.config
        options: dict[str, Any] = {"key_padding_mask": padded}
        if config.global_tokens == FIRST_SEGMENT:
            options["global_tokens"] = global_tokens
            if torch.compiler.is_compiling():  # the numbers cannot be read
                options["max_global_tokens"] = self.largest_prefix()
        elif global_tokens is not None:
            options["global_tokens"] = self.largest_prefix()  # a number, so that the GPU is not waited for
        if config.attention in WITHOUT_LLN:
            options["neighbors"] = self.neighbors
            if self.band is not None:
                options["band"] = self.band
            return block_diag_attention(q, k, v, block_size=config.block_size, dropout_p=dropout, **options)
        if config.gain == "learned":
            options["alpha"], options["beta"] = self.alpha_beta(q, k, padded)
        else:  # the kernels compute both while they read q and k
            options["alpha"] = config.alpha
            options["beta"] = config.beta
            options["scope"] = config.scope
            options["constants"] = config.constants
        if config.attention == "lln":
            return lln_attention(q, k, v, **options)
        if self.is_joint:
            options["mix_parameter"] = self.offset
        return lln_diag_attention(q, k, v, block_size=config.block_size, dropout_p=dropout, mix=config.mix, **options)

    def attend_without_kernels(
        self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None, dropout: float, global_tokens: Tensor | None
    ) -> Tensor:
        """Compute `attend` with formula.py."""
        form = DIAG
        alpha = None
        beta = None
        offset = None
        if self.config.attention not in WITHOUT_LLN:
            alpha, beta = self.alpha_beta(q, k, padded)
            form = LLN
            if self.is_joint:
                form = JOINT
                offset = self.offset.expand_as(alpha)
            elif self.config.attention == "lln_diag":
                form = AVERAGE
        max_global = 0
        if global_tokens is not None:
            max_global = self.largest_prefix()
        size = self.config.block_size or q.shape[-1]
        neighbors = self.neighbors
        if self.band is not None:
            neighbors = neighbors_of_band(self.band, size)
        spec = Spec(form, size, dropout, max_global, neighbors, self.band)
        return hybrid_formula(spec, Inputs(q, k, v, alpha, beta, offset, padded, global_tokens))

    def alpha_beta(self, q: Tensor, k: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return alpha and beta, (B, H), including the learned factors of the heads if there are any."""
        config = self.config
        if config.alpha is not None and config.beta is not None:
            ones = q.new_ones(q.shape[:2], dtype=torch.float32)
            alpha = config.alpha * ones
            beta = config.beta * ones
        else:
            table = None
            if config.constants == "calibrated":
                assert config.moment_table is not None
                table = [torch.tensor(row, device=q.device) for row in config.moment_table]
            sigma_q = standard_deviations(q, padded, config.scope)
            sigma_k = standard_deviations(k, padded, config.scope)
            alpha, beta = alpha_beta(sigma_q, sigma_k, table)
        if config.gain == "none":
            return alpha, beta
        gain = self.log_gain.float().exp()
        return alpha * gain[0], beta * gain[1]


class LLNRobertaModel(RobertaModel):
    """RoBERTa's encoder with LLN attention, and softmax in the layers that the configuration names.

    By default it has no pooler, because none was trained.
    """

    config_class = LLNRobertaConfig
    _supports_sdpa = False  # PyTorch's scaled_dot_product_attention computes softmax
    _supports_attention_backend = False  # vLLM would put all texts of a batch into one sequence

    def __init__(self, config: LLNRobertaConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        if not config.normalize_embedding:
            self.embeddings.LayerNorm = nn.Identity()  # type: ignore[assignment]
        for number, layer in enumerate(self.encoder.layer):
            if config.normalize_before:
                layer.attention = RobertaPreLayerNormAttention(config)
                layer.intermediate = RobertaPreLayerNormIntermediate(config)
                if number < config.num_hidden_layers - 1:  # RoBERTa's own output ends with the norm of the encoder
                    layer.output = RobertaPreLayerNormOutput(config)
            layer.attention.self = LLNSelfAttention(config, number)  # type: ignore[union-attr]
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *others: Any, **options: Any
    ) -> Any:
        """Compute RobertaModel's output.

        Args:
            input_ids: (B, N). With global_tokens="first_segment" they are required.
            attention_mask: (B, N), 0 at padding, which must be at the right for an attention with blocks. None means
                that there is no padding.
            *others: further arguments of RobertaModel.
            **options: further arguments of RobertaModel, such as inputs_embeds.

        Raises:
            ValueError: if the mask has another number of dimensions, or padding at the left, or for output_attentions
                or a head_mask.
        """
        given = dict(zip(ARGUMENTS, others, strict=False)) | options
        if given.get("output_attentions") or self.config.output_attentions:
            raise ValueError("this attention computes no matrix of weights: output_attentions is not supported")
        if given.get("head_mask") is not None:
            raise ValueError("this attention does not support head_mask")
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
        if input_ids is not None:
            tokens = input_ids
        elif inputs_embeds is not None:
            tokens = inputs_embeds[:, :, 0]
        else:
            return None  # RobertaModel reports the missing input
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens)
        if attention_mask.shape != tokens.shape:
            raise ValueError(
                f"this attention supports only padding masks (B, N), got a mask of shape {tuple(attention_mask.shape)} "
                f"for {tuple(tokens.shape)} tokens"
            )
        if self.config.attention in WITH_BLOCKS:
            require_right_padding(attention_mask)
        rows = attention_mask[:, None]
        if self.config.global_tokens == FIRST_SEGMENT:
            if input_ids is None:
                raise ValueError("global_tokens=first_segment needs input_ids, got only inputs_embeds")
            pad: int = self.config.pad_token_id  # type: ignore[assignment]
            eos: int = self.config.eos_token_id  # type: ignore[assignment]
            tokens = input_ids.masked_fill(attention_mask == 0, pad)
            lengths = first_segment_lengths(tokens, eos, self.config.pair_form, pad)
            token = torch.arange(tokens.shape[1], device=tokens.device)
            rows = torch.stack([attention_mask.long(), (token < lengths[:, None]).long()], dim=1)
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


class LLNRobertaForMaskedLM(RobertaForMaskedLM):
    """RoBERTa with LLN attention and a masked-language-model head."""

    config_class = LLNRobertaConfig
    _supports_sdpa = False
    _supports_attention_backend = False

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = LLNRobertaModel(config)
        self.lm_head = LLNRobertaLMHead(config)
        self.post_init()


class LLNRobertaLMHead(RobertaLMHead):
    """RoBERTa's masked-language-model head with the activation of the layers, as in fairseq; RoBERTa's has GELU."""

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, features: Tensor, **unused: Any) -> Tensor:
        """Return the logits (B, N, V) of features (B, N, C)."""
        return self.decoder(self.layer_norm(self.activation(self.dense(features))))


class LLNRobertaClassificationHead(RobertaClassificationHead):
    """RoBERTa's classification head with DistilBERT's activation."""

    def forward(self, features: Tensor, **unused: Any) -> Tensor:
        """Return the logits (B, classes) of features (B, N, C), which depend on those of the first token."""
        x = self.dropout(features[:, 0])
        x = torch.relu(self.dense(x))
        return self.out_proj(self.dropout(x))


class LLNRobertaForSequenceClassification(RobertaForSequenceClassification):
    """RoBERTa with LLN attention and a classification head."""

    config_class = LLNRobertaConfig
    _supports_sdpa = False
    _supports_attention_backend = False

    def __init__(self, config: LLNRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = LLNRobertaModel(config)
        if config.classifier_activation == "relu":
            self.classifier = LLNRobertaClassificationHead(config)
        self.post_init()
