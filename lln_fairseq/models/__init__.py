"""fairseq models; fairseq imports every file of this folder when it is given as part of a user directory."""

from lln_fairseq.models.lln_roberta import LLNRobertaConfig, LLNRobertaModel
from lln_fairseq.models.lln_transformer_lm import LLNTransformerLanguageModel, LLNTransformerLMConfig

__all__ = ["LLNRobertaConfig", "LLNRobertaModel", "LLNTransformerLMConfig", "LLNTransformerLanguageModel"]
