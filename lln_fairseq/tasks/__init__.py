"""fairseq tasks; fairseq imports every file of this folder when it is given as part of a user directory.

With the tasks comes the rest of what registers, and what repairs the host.
"""

from lln_fairseq import criterions, models  # noqa: F401  they register on import
from lln_fairseq.fairseq_compat import patches
from lln_fairseq.tasks.language_modeling import LLNLanguageModelingTask
from lln_fairseq.tasks.masked_lm import LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionTask
from lln_fairseq.training import worker

patches.install(worker.run)

__all__ = ["LLNLanguageModelingTask", "LLNMaskedLMTask", "LLNSentencePredictionTask"]
