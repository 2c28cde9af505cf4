"""fairseq models. fairseq imports every file of this folder when --user-dir names the package."""

from lln_fairseq.models.lln_roberta import LLNRobertaConfig, LLNRobertaModel

__all__ = ["LLNRobertaConfig", "LLNRobertaModel"]
