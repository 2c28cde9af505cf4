"""fairseq models; fairseq imports every file of this folder when it is given as part of a user directory."""

from lln_fairseq import host_patches
from lln_fairseq.models.lln_roberta import LLNRobertaConfig, LLNRobertaModel

host_patches.apply()

__all__ = ["LLNRobertaConfig", "LLNRobertaModel"]
