"""The tasks that fairseq registers. fairseq imports every file of this folder as part of its user directory.

Importing this package also registers the models and criterions, and installs the patches of fairseq.
"""

from collections.abc import Callable
from typing import Any

from lln_fairseq import criterions, models  # noqa: F401  they register themselves on import
from lln_fairseq.fairseq_compat import patches
from lln_fairseq.tasks.language_modeling import LLNLanguageModelingTask
from lln_fairseq.tasks.masked_lm import LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionTask
from lln_fairseq.training import worker


def run_worker(main: Callable, cfg: Any, **kwargs: Any) -> Any:
    """Run fairseq's main in a worker, see `worker.run_worker`.

    A spawned process imports the module of the function that it runs. It is this module, so that everything is
    registered in that process too.
    """
    return worker.run_worker(main, cfg, **kwargs)


patches.install(run_worker)

__all__ = ["LLNLanguageModelingTask", "LLNMaskedLMTask", "LLNSentencePredictionTask"]
