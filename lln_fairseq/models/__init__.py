"""fairseq models. fairseq imports every file of this folder when --user-dir names the package."""

from lln_fairseq.models.lln_roberta import LLNRobertaConfig, LLNRobertaModel
from lln_fairseq.models.lln_transformer_lm import LLNTransformerLanguageModel, LLNTransformerLMConfig

__all__ = ["LLNRobertaConfig", "LLNRobertaModel", "LLNTransformerLMConfig", "LLNTransformerLanguageModel"]
