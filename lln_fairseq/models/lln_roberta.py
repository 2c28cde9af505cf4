"""RoBERTa with a choice of attention: --arch lln_roberta_base --attention lln_diag --lln-diag-block-size 64 ..."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta.hub_interface import RobertaHubInterface
from fairseq.models.roberta.model import RobertaModel, base_architecture
from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.errors import input_errors
from lln_fairseq.models.adapt import adapt
from lln_fairseq.models.options import attention_fields, attention_options
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.modules.encoder import LLNRobertaEncoder
from lln_fairseq.modules.token_shards import Shard

ACTIVATIONS = ChoiceEnum(utils.get_available_activation_fns())
SIZE_FIELDS = ("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads")
DEFAULT_PRESET = "base"


# fairseq's dataclass tools know Optional[X] and not X | None. A size is None until a preset or the user sets it: with
# a number as default Hydra would ignore the preset without a word. No field may be a bool with default True.
@dataclass
class RobertaConfig(FairseqDataclass):
    """The options of fairseq's RoBERTa, with its defaults, and of what is fixed in fairseq: ε, how a sentence becomes
    one vector, the classification head, initial values."""

    encoder_layers: Optional[int] = field(default=None, metadata={"help": "number of encoder layers"})
    encoder_embed_dim: Optional[int] = field(default=None, metadata={"help": "embedding dimension"})
    encoder_ffn_embed_dim: Optional[int] = field(default=None, metadata={"help": "dimension of the feed-forward part"})
    encoder_attention_heads: Optional[int] = field(default=None, metadata={"help": "number of attention heads"})
    activation_fn: ACTIVATIONS = field(default="gelu", metadata={"help": "activation of the feed-forward part"})
    pooler_activation_fn: ACTIVATIONS = field(default="tanh", metadata={"help": "activation of the pooler"})
    encoder_normalize_before: bool = field(default=False, metadata={"help": "layer norm before each block"})
    layernorm_embedding: Optional[bool] = field(
        default=None, metadata={"help": "layer norm after the embedding; default: unless --encoder-normalize-before"}
    )
    layer_norm_eps: float = field(default=1e-5, metadata={"help": "ε of every layer norm; BERT has 1e-12"})
    dropout: float = field(default=0.1, metadata={"help": "dropout probability"})
    attention_dropout: float = field(default=0.1, metadata={"help": "dropout probability of attention weights"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout after the activation"})
    pooler_dropout: float = field(default=0.0, metadata={"help": "dropout in the classification head"})
    pooling: ChoiceEnum(["first", "mean"]) = field(
        default="first", metadata={"help": "what the classification head sees: the first token, or the mean of all"}
    )
    pooler_dim: Optional[int] = field(
        default=None, metadata={"help": "dimension inside the classification head; default: the embedding's"}
    )
    two_towers: bool = field(default=False, metadata={"help": "set by the task, which has an option of this name"})
    linear_init: ChoiceEnum(["bert", "torch"]) = field(
        default="bert", metadata={"help": "initial values of linear layers: N(0, 0.02), or torch's own"}
    )
    max_positions: Optional[int] = field(
        default=None, metadata={"help": "number of positional embeddings; default: tokens per sample of the task"}
    )
    load_checkpoint_heads: bool = field(default=False, metadata={"help": "load classification heads of checkpoints"})
    untie_weights_roberta: bool = field(default=False, metadata={"help": "untie embedding and output weights"})
    encoder_layerdrop: float = field(default=0.0, metadata={"help": "LayerDrop probability"})
    encoder_layers_to_keep: Optional[str] = field(default=None, metadata={"help": "comma-separated layers to keep"})
    quant_noise_pq: float = field(default=0.0, metadata={"help": "iterative PQ quantization noise"})
    quant_noise_pq_block_size: int = field(default=8, metadata={"help": "block size of quantization noise"})
    quant_noise_scalar: float = field(default=0.0, metadata={"help": "scalar quantization noise"})
    spectral_norm_classification_head: bool = field(default=False, metadata={"help": "spectral norm on the head"})
    checkpoint_activations: bool = field(
        default=False, metadata={"help": "recompute each layer in the backward pass: less memory, more time"}
    )
    offload_activations: bool = field(default=False, metadata={"help": "keep checkpointed activations on the CPU"})
    feed_forward_tokens: int = field(
        default=0,
        metadata={
            "help": "tokens whose feed-forward part is computed at a time, and again in the backward pass: less memory "
            "for long sequences; 0 = all"
        },
    )
    min_params_to_wrap: int = field(
        default=DEFAULT_MIN_PARAMS_TO_WRAP, metadata={"help": "parameters from which FSDP wraps a layer"}
    )
    attention: ChoiceEnum(sorted(MECHANISMS)) = field(
        default="lln_diag", metadata={"help": "attention mechanism of every layer"}
    )


LLNRobertaConfig = dataclasses.make_dataclass(
    "LLNRobertaConfig", attention_fields(), bases=(RobertaConfig,), namespace={"__module__": __name__}
)
LLNRobertaConfig.__doc__ = "RoBERTa's options, the attention, and the options of every registered attention."


@register_model("lln_roberta", dataclass=LLNRobertaConfig)
class LLNRobertaModel(RobertaModel):
    """fairseq's RoBERTa; parameters, their names and their initialisation are those of the stock model."""

    @classmethod
    def from_pretrained(cls, *args: Any, bpe: str | None = None, **kwargs: Any) -> RobertaHubInterface:
        """fairseq's, which without `bpe` downloads that of GPT-2, even where everything that it needs is local."""
        return super().from_pretrained(*args, bpe=bpe, **kwargs)

    @staticmethod
    def add_args(parser: Any) -> None:
        gen_parser_from_dataclass(parser, LLNRobertaConfig())
        for action in parser._actions:
            if action.dest == "max_positions":  # a task has one too: not given, each has its own default
                action.default = argparse.SUPPRESS

    @classmethod
    def build_model(cls, cfg: DictConfig, task: Any) -> "LLNRobertaModel":
        """Raises InputError for sizes and options that do not fit together."""
        with input_errors():
            cfg = complete_config(cfg)
            if cfg.max_positions is None:
                cfg.max_positions = task.max_positions()
            encoder = LLNRobertaEncoder(
                cfg, task.source_dictionary, cfg.attention, attention_options(cfg.attention, cfg)
            )
        model = cls(cfg, encoder)
        if cfg.linear_init == "torch":  # fairseq's __init__ has made them BERT's
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        return model

    def register_classification_head(
        self, name: str, num_classes: int | None = None, inner_dim: int | None = None, **kwargs: Any
    ) -> None:
        """fairseq's, of the dimensions that `pooler_dim` and `two_towers` ask for."""
        args = self.args
        super().register_classification_head(name, num_classes, inner_dim or args.pooler_dim, **kwargs)
        if args.two_towers:
            head = self.classification_heads[name]
            head.dense = nn.Linear(4 * head.dense.in_features, head.dense.out_features)

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        other_tokens: Tensor | None = None,
        shard: Shard | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """fairseq's, and for a classification the pooling; `other_tokens` (B, M) go through the encoder by themselves.

        With two towers the head sees [a, b, a ∘ b, a - b] of the vectors of both. With a shard, the tokens are a part
        of their sequences, and so is what comes out; a classification has rows where the first token is.
        """
        if shard is not None:
            kwargs["shard"] = shard
        if classification_head_name is None:
            return super().forward(src_tokens, features_only, return_all_hiddens, **kwargs)
        x, extra = self.encoder(src_tokens, True, return_all_hiddens, **kwargs)
        if shard is not None and not shard.has_first:
            x = x.flatten(0, 1)[:0, None]  # no rows, but still a function of x
        pooled = self._pooled(x, src_tokens)
        if self.args.two_towers:
            other = self._pooled(self.encoder(other_tokens, True)[0], other_tokens)
            pooled = torch.cat([pooled, other, pooled * other, pooled - other], dim=-1)
        return self.classification_heads[classification_head_name](pooled[:, None]), extra

    def _pooled(self, features: Tensor, tokens: Tensor) -> Tensor:
        """(B, N, C) -> (B, C). The mean leaves padding out."""
        if self.args.pooling == "first":
            return features[:, 0]
        real = tokens.ne(self.encoder.dictionary.pad())
        weight = real.to(features.dtype) / real.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.bmm(weight[:, None], features)[:, 0]

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Lets checkpoints of stock RoBERTa, of other lengths and of other attentions load."""
        super().upgrade_state_dict_named(state_dict, name)
        adapt(state_dict, self)


def complete_config(cfg: DictConfig) -> DictConfig:
    """A copy with every option of the dataclass and every size filled in.

    fairseq has checked the options of both command lines by now; a checkpoint may be older than some of them.
    """
    known = {field.name for field in dataclasses.fields(LLNRobertaConfig)}
    given = {key: value for key, value in cfg.items() if key in known}
    cfg = OmegaConf.merge(OmegaConf.structured(LLNRobertaConfig), given)
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, enum_to_str=True))  # plain: fairseq adds keys of its own
    apply_preset(cfg, DEFAULT_PRESET)
    if cfg.layernorm_embedding is None:
        cfg.layernorm_embedding = not cfg.encoder_normalize_before
    base_architecture(cfg)
    return cfg


def apply_preset(cfg: Any, name: str) -> None:
    """Sets the sizes that are still None."""
    for key, value in zip(SIZE_FIELDS, PRESETS[name], strict=True):
        if getattr(cfg, key, None) is None:
            setattr(cfg, key, value)


def _register_preset(name: str) -> None:
    @register_model_architecture("lln_roberta", f"lln_roberta_{name}")
    def preset(cfg: Any) -> None:
        apply_preset(cfg, name)


for _name in PRESETS:
    _register_preset(_name)
