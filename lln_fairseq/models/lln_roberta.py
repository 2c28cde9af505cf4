"""RoBERTa with a pluggable attention: --arch lln_roberta_base --attention lln_diag --lln-diag-block-size 64 ..."""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta.model import RobertaModel, base_architecture
from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP
from fairseq.modules import SinusoidalPositionalEmbedding
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.errors import user_errors
from lln_fairseq.models.adapt import adapt_state_dict
from lln_fairseq.models.encoder import LLNRobertaEncoder
from lln_fairseq.models.options import attention_fields
from lln_fairseq.models.presets import PRESETS, SIZE_FIELDS
from lln_fairseq.ops.rotary import BASE
from lln_fairseq.text.pairs import PAIR_FORMS, ROBERTA_PAIRS

ACTIVATIONS = ChoiceEnum(utils.get_available_activation_fns())
DEFAULT_PRESET = "base"
POSITION_DEVIATION = 0.02  # the standard deviation of BERT's initial position embeddings


# fairseq's dataclass tools understand Optional[X], but neither X | None nor a bool with the default True. Sizes are
# None until a preset or the user sets them: with numbers as defaults, Hydra would silently ignore the preset.
@dataclass
class RobertaConfig(FairseqDataclass):
    """The options of fairseq's RoBERTa with their defaults, and options that fairseq's model does not have.

    Among the latter are the ε of layer norms, pooling, the dimension of the classification head and initial values.
    """

    encoder_layers: Optional[int] = field(default=None, metadata={"help": "number of encoder layers"})
    encoder_embed_dim: Optional[int] = field(default=None, metadata={"help": "embedding dimension"})
    encoder_ffn_embed_dim: Optional[int] = field(default=None, metadata={"help": "dimension of the feed-forward part"})
    encoder_attention_heads: Optional[int] = field(default=None, metadata={"help": "number of attention heads"})
    activation_fn: ACTIVATIONS = field(default="gelu", metadata={"help": "activation of the feed-forward part"})
    pooler_activation_fn: ACTIVATIONS = field(default="tanh", metadata={"help": "activation of the pooler"})
    encoder_normalize_before: bool = field(default=False, metadata={"help": "layer norm before each block"})
    layernorm_embedding: Optional[bool] = field(
        default=None,
        metadata={"help": "layer norm after the embeddings; default: not with --encoder-normalize-before"},
    )
    layer_norm_eps: float = field(default=1e-5, metadata={"help": "ε of every layer norm; BERT uses 1e-12"})
    dropout: float = field(default=0.1, metadata={"help": "dropout probability"})
    attention_dropout: float = field(default=0.1, metadata={"help": "dropout probability of attention weights"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout after the activation"})
    pooler_dropout: float = field(default=0.0, metadata={"help": "dropout in the classification head"})
    pooling: ChoiceEnum(["first", "mean"]) = field(
        default="first",
        metadata={"help": "input of the classification head: the first token, or the mean of all"},
    )
    pooler_dim: Optional[int] = field(
        default=None, metadata={"help": "dimension within the classification head; default: the embedding dimension"}
    )
    two_towers: bool = field(default=False, metadata={"help": "set by the task, which has an option of this name"})
    pair_form: ChoiceEnum(PAIR_FORMS) = field(
        default=ROBERTA_PAIRS,
        metadata={
            "help": "tokens of a pair: roberta: <s> a </s></s> b </s>; distilbert: one </s> between the texts; bert: "
            "one </s>, and an embedding of their own for the tokens of b"
        },
    )
    linear_init: ChoiceEnum(["bert", "torch"]) = field(
        default="bert", metadata={"help": "initial values of linear layers: N(0, 0.02), or PyTorch's defaults"}
    )
    position_init: ChoiceEnum(["random", "sinusoidal"]) = field(
        default="random",
        metadata={"help": "initial values of the position embeddings: N(0, 0.02), or sinusoids of that deviation"},
    )
    rotary: bool = field(
        default=False,
        metadata={"help": "rotary position embedding of queries and keys, besides the embeddings added to the input"},
    )
    rotary_base: float = field(
        default=BASE, metadata={"help": "base of the frequencies of rotary positions; larger for longer texts"}
    )
    max_positions: Optional[int] = field(
        default=None, metadata={"help": "number of position embeddings; default: tokens per sample of the task"}
    )
    load_checkpoint_heads: bool = field(default=False, metadata={"help": "load classification heads of checkpoints"})
    untie_weights_roberta: bool = field(default=False, metadata={"help": "untie embedding and output weights"})
    encoder_layerdrop: float = field(default=0.0, metadata={"help": "LayerDrop probability"})
    quant_noise_pq: float = field(default=0.0, metadata={"help": "iterative PQ quantization noise"})
    quant_noise_pq_block_size: int = field(default=8, metadata={"help": "block size of quantization noise"})
    checkpoint_activations: bool = field(
        default=False,
        metadata={"help": "recompute each layer in the backward pass: less memory, more time"},
    )
    offload_activations: bool = field(default=False, metadata={"help": "keep checkpointed activations on the CPU"})
    feed_forward_tokens: int = field(
        default=0,
        metadata={
            "help": "compute the feed-forward part for this many tokens at a time, and again in the backward pass, to "
            "save memory on long sequences; 0 = all at once"
        },
    )
    min_params_to_wrap: int = field(
        default=DEFAULT_MIN_PARAMS_TO_WRAP,
        metadata={"help": "number of parameters from which FSDP wraps a layer"},
    )
    attention: ChoiceEnum(sorted(MECHANISMS)) = field(
        default="lln_diag", metadata={"help": "mechanism in every layer but those of --softmax-layers"}
    )
    softmax_layers: Optional[str] = field(
        default=None,
        metadata={
            "help": "layers with softmax attention: numbers from 0, separated by commas, or every:4 for 3, 7, 11, ...; "
            "default: none"
        },
    )


LLNRobertaConfig = dataclasses.make_dataclass(
    "LLNRobertaConfig", attention_fields(), bases=(RobertaConfig,), namespace={"__module__": __name__}
)
LLNRobertaConfig.__doc__ = "The options of RoBERTa, and the options of every registered mechanism."


@register_model("lln_roberta", dataclass=LLNRobertaConfig)
class LLNRobertaModel(RobertaModel):
    """fairseq's RoBERTa with a pluggable mechanism, in every layer but those of `softmax_layers`.

    Parameters, their names and their initial values are those of the stock model, apart from parameters that belong to
    the mechanism.
    """

    @staticmethod
    def add_args(parser: Any) -> None:
        """Add the options of the model to the parser of fairseq's command line. fairseq calls this hook."""
        gen_parser_from_dataclass(parser, LLNRobertaConfig())
        for action in parser._actions:
            if action.dest == "max_positions":
                # Tasks have an option of this name, too. Without a default here, both keep their own default.
                action.default = argparse.SUPPRESS

    @classmethod
    def build_model(cls, cfg: DictConfig, task: Any) -> "LLNRobertaModel":
        """Build a model. fairseq calls this hook.

        Args:
            cfg: the options of the model; missing ones are filled in by `complete_config`. It is not changed.
            task: a fairseq task with a dictionary. Its max_positions() is used if `cfg.max_positions` is None.

        Raises:
            UserError: if sizes or options contradict each other.
        """
        with user_errors():
            cfg = complete_config(cfg)
            if cfg.max_positions is None:
                cfg.max_positions = task.max_positions()
            encoder = LLNRobertaEncoder(cfg, task.source_dictionary)
        model = cls(cfg, encoder)
        if cfg.linear_init == "torch":
            # fairseq's __init__ has set BERT's initial values.
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        positions = encoder.sentence_encoder.embed_positions
        if cfg.position_init == "sinusoidal" and positions is not None:
            _init_sinusoidal(positions)
        return model

    def register_classification_head(
        self, name: str, num_classes: int | None = None, inner_dim: int | None = None, **kwargs: Any
    ) -> None:
        """Add a classification head, or replace the one with this name. With `two_towers`, its input has 4 C features.

        Args:
            name: the name that `forward` selects the head by.
            num_classes: number of outputs, which must be given in spite of fairseq's default.
            inner_dim: dimension within the head; None: `pooler_dim`, or the embedding dimension if that is also None.
            kwargs: ignored by fairseq.
        """
        super().register_classification_head(name, num_classes, inner_dim or self.args.pooler_dim, **kwargs)
        if self.args.two_towers:
            head = self.classification_heads[name]
            head.dense = nn.Linear(4 * head.dense.in_features, head.dense.out_features)

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        other_tokens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute vocabulary logits, features or class scores.

        Args:
            src_tokens: token ids (B, N).
            features_only: return features in place of vocabulary logits.
            return_all_hiddens: also return the input of the first layer and the outputs of all layers, as
                `inner_states`.
            classification_head_name: the head to apply to the pooled features. None: no classification.
            other_tokens: token ids (B, M) of the second text, which the encoder processes separately. Required for a
                classification with `two_towers` and ignored otherwise.
            kwargs: further arguments of the encoder, such as `masked_tokens` and the `first_lengths` of src_tokens.

        Returns:
            Logits (B, N, vocabulary), or (masked tokens, vocabulary) with `masked_tokens`; features (B, N, C); or class
            scores (B, classes). Second, fairseq's dictionary of further outputs. With two towers the head's input is
            [a, b, a ∘ b, a - b] for the pooled features a of src_tokens and b of other_tokens.
        """
        if classification_head_name is None:
            return super().forward(src_tokens, features_only, return_all_hiddens, **kwargs)
        x, extra = self.encoder(src_tokens, True, return_all_hiddens, **kwargs)
        pooled = self._pool(x, src_tokens)
        if self.args.two_towers:
            other_features, _ = self.encoder(other_tokens, True)
            other = self._pool(other_features, other_tokens)
            pooled = torch.cat([pooled, other, pooled * other, pooled - other], dim=-1)
        return self.classification_heads[classification_head_name](pooled[:, None]), extra

    def _pool(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Reduce the features (B, N, C) of tokens (B, N) to one vector per sequence, (B, C).

        By the option `pooling`, this is the vector of the first token, or the mean over the tokens that are not padded.
        """
        if self.args.pooling == "first":
            return features[:, 0]
        is_real = tokens.ne(self.encoder.dictionary.pad())
        weight = is_real.to(features.dtype) / is_real.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.bmm(weight[:, None], features)[:, 0]

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Adapt the parameters of a checkpoint, in place, before they are loaded. fairseq calls this hook.

        This way, checkpoints of stock RoBERTa, of another length or with another attention can also be loaded.
        """
        super().upgrade_state_dict_named(state_dict, name)
        adapt_state_dict(state_dict, self)


@torch.no_grad()
def _init_sinusoidal(positions: nn.Embedding) -> None:
    """Set a positional table to sinusoids, scaled to the root mean square of the random initialization, in place."""
    sinusoids = SinusoidalPositionalEmbedding.get_embedding(*positions.weight.shape, positions.padding_idx)
    positions.weight.copy_(POSITION_DEVIATION * math.sqrt(2) * sinusoids)


def complete_config(cfg: DictConfig) -> DictConfig:
    """Return a copy of a model's configuration that has every option of the model.

    Missing options get their defaults. Sizes that are missing or None are those of the preset "base". If
    `layernorm_embedding` is None, it becomes the opposite of `encoder_normalize_before`. Other options may stay None,
    such as `max_positions` and `pooler_dim`, whose defaults depend on the data or the sizes. Unknown keys are dropped,
    because the configuration in a checkpoint can be from another version; fairseq has already rejected unknown options
    of a command line.
    """
    known = {field.name for field in dataclasses.fields(LLNRobertaConfig)}
    known_options = {key: value for key, value in cfg.items() if key in known}
    cfg = OmegaConf.merge(OmegaConf.structured(LLNRobertaConfig), known_options)
    # A plain DictConfig, because fairseq adds keys of its own.
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, enum_to_str=True))
    apply_preset(cfg, DEFAULT_PRESET)
    if cfg.layernorm_embedding is None:
        cfg.layernorm_embedding = not cfg.encoder_normalize_before
    base_architecture(cfg)
    return cfg


def apply_preset(cfg: Any, name: str) -> None:
    """Set the sizes that are missing or None to those of a preset, in place."""
    for key, value in zip(SIZE_FIELDS, PRESETS[name], strict=True):
        if getattr(cfg, key, None) is None:
            setattr(cfg, key, value)


def _register_preset(name: str) -> None:
    """Register the architecture lln_roberta_NAME, which sets the sizes of a preset."""

    @register_model_architecture("lln_roberta", f"lln_roberta_{name}")
    def preset(cfg: Any) -> None:
        apply_preset(cfg, name)


for _name in PRESETS:
    _register_preset(_name)
