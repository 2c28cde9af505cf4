"""fairseq's transformer_lm with causal LLN attention: --task language_modeling --arch lln_transformer_lm."""

import copy
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from lln_fairseq.errors import input_errors
from lln_fairseq.modules.decoder import LLNDecoder
from lln_fairseq.ops.moment_matching import CONSTANTS


@dataclass
class LLNTransformerLMConfig(TransformerLanguageModelConfig):
    """fairseq's options, and α and β."""

    lln_alpha: Optional[float] = field(
        default=None, metadata={"help": "fixed α; needs β too; default: matched to the tokens up to each one"}
    )
    lln_beta: Optional[float] = field(default=None, metadata={"help": "fixed β; needs α too"})
    lln_constants: ChoiceEnum(list(CONSTANTS)) = field(
        default="calibrated", metadata={"help": "what α and β are matched by"}
    )


@register_model("lln_transformer_lm", dataclass=LLNTransformerLMConfig)
class LLNTransformerLanguageModel(TransformerLanguageModel):
    """Parameters, their names and their initialisation are those of fairseq's model, so checkpoints load both ways."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "LLNTransformerLanguageModel":
        """Raises InputError for options that do not fit together."""
        # fairseq's own without a layer: it knows all kinds of embeddings, and fills in what args leaves open.
        fairseqs = copy.deepcopy(args)
        fairseqs.decoder_layers, fairseqs.decoder_layers_to_keep, fairseqs.base_layers = 0, None, 0
        embed_tokens = super().build_model(fairseqs, task).decoder.embed_tokens
        args.max_target_positions = fairseqs.max_target_positions
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        options = {name: getattr(args, f"lln_{name}", None) for name in ("alpha", "beta")}
        constants = getattr(args, "lln_constants", "calibrated")
        with input_errors():
            decoder = LLNDecoder(args, task.target_dictionary, embed_tokens, options | {"constants": str(constants)})
        return cls(decoder)
