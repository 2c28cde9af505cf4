"""fairseq tasks; fairseq imports every file of this folder when it is given as part of a user directory."""

from lln_fairseq.tasks.masked_lm import LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionTask

__all__ = ["LLNMaskedLMTask", "LLNSentencePredictionTask"]
