"""fairseq's transformer_lm with causal LLN attention: --task language_modeling --arch lln_transformer_lm."""

import copy
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

from lln_fairseq.errors import input_errors
from lln_fairseq.modules.decoder import LLNDecoder
from lln_fairseq.ops.moment_matching import CONSTANTS


@dataclass
class LLNTransformerLMConfig(TransformerLanguageModelConfig):
    """The options of fairseq's transformer_lm, and those of causal LLN attention."""

    lln_alpha: Optional[float] = field(
        default=None, metadata={"help": "fixed α; needs β too; default: matched to each token and the earlier ones"}
    )
    lln_beta: Optional[float] = field(default=None, metadata={"help": "fixed β; needs α too"})
    lln_constants: ChoiceEnum(list(CONSTANTS)) = field(
        default="calibrated", metadata={"help": "constants of the moment matching of α and β"}
    )


@register_model("lln_transformer_lm", dataclass=LLNTransformerLMConfig)
class LLNTransformerLanguageModel(TransformerLanguageModel):
    """fairseq's transformer_lm with causal LLN attention in every layer.

    The parameters, their names and their initial values are the same as in fairseq's model. Each of the two models can
    load checkpoints of the other.
    """

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "LLNTransformerLanguageModel":
        """Build a model. fairseq calls this hook.

        Args:
            args: the options of the model. max_target_positions is set in place. If decoder_layers_to_keep is set,
                decoder_layers is set in place, too.
            task: a fairseq task with a target dictionary.

        Raises:
            InputError: if sizes or options contradict each other.
        """
        embed_tokens = cls._build_embedding(args, task)
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        options = {
            "alpha": getattr(args, "lln_alpha", None),
            "beta": getattr(args, "lln_beta", None),
            "constants": str(getattr(args, "lln_constants", "calibrated")),
        }
        with input_errors():
            decoder = LLNDecoder(args, task.target_dictionary, embed_tokens, options)
        return cls(decoder)

    @classmethod
    def _build_embedding(cls, args: Any, task: Any) -> nn.Module:
        """Build the token embedding that the options ask for, and set args.max_target_positions in place.

        The embedding is taken from a model of fairseq without layers, because fairseq supports all kinds of embeddings
        and fills in the options that are not set.
        """
        stock_args = copy.deepcopy(args)
        stock_args.decoder_layers = 0
        stock_args.decoder_layers_to_keep = None
        stock_args.base_layers = 0
        stock_model = super().build_model(stock_args, task)
        args.max_target_positions = stock_args.max_target_positions
        return stock_model.decoder.embed_tokens
