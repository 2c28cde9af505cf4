"""The tasks that fairseq registers; it imports every file of this folder as part of its user directory.

Importing it registers our models and criterions too, and installs the patches of fairseq.
"""

from collections.abc import Callable
from typing import Any

from lln_fairseq import criterions, models  # noqa: F401  they register on import
from lln_fairseq.fairseq_compat import patches
from lln_fairseq.tasks.language_modeling import LLNLanguageModelingTask
from lln_fairseq.tasks.masked_lm import LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionTask
from lln_fairseq.training import worker


def run_worker(main: Callable, cfg: Any, **kwargs: Any) -> Any:
    """Run fairseq's main in a worker. A spawned process imports this file, and all that registers, to find it."""
    return worker.run_worker(main, cfg, **kwargs)


patches.install(run_worker)

__all__ = ["LLNLanguageModelingTask", "LLNMaskedLMTask", "LLNSentencePredictionTask"]
