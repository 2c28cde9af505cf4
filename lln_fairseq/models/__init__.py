"""fairseq models; fairseq imports every file of this folder when it is given as part of a user directory."""

from lln_fairseq.models.lln_roberta import LLNRobertaConfig, LLNRobertaModel

__all__ = ["LLNRobertaConfig", "LLNRobertaModel"]
