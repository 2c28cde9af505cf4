"""fairseq tasks; fairseq imports every file of this folder when it is given as part of a user directory.

With the tasks comes the rest of what registers, and what repairs the host.
"""

from lln_fairseq import criterions, models  # noqa: F401  they register on import
from lln_fairseq.host import patches
from lln_fairseq.tasks import _worker
from lln_fairseq.tasks.language_modeling import LLNLanguageModelingTask
from lln_fairseq.tasks.masked_lm import LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionTask

patches.install(_worker.run)

__all__ = ["LLNLanguageModelingTask", "LLNMaskedLMTask", "LLNSentencePredictionTask"]
