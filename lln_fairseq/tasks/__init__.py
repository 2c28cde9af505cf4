"""fairseq tasks; fairseq imports every file of this folder when it is given as part of a user directory."""

from lln_fairseq import criterions, host_patches  # noqa: F401  criterions register on import
from lln_fairseq.tasks.masked_lm import LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionTask

host_patches.apply()

__all__ = ["LLNMaskedLMTask", "LLNSentencePredictionTask"]
