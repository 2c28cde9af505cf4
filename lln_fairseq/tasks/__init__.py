"""Define the tasks of lln_fairseq. With `--user-dir lln_fairseq`, fairseq imports every file of this directory.

Importing this package also registers the models and criterions, and installs the patches of fairseq.
"""

from collections.abc import Callable
from typing import Any

from lln_fairseq import criterions, models  # noqa: F401  imported to register their classes
from lln_fairseq.fairseq_compat import patches
from lln_fairseq.tasks.masked_lm import LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionTask
from lln_fairseq.training import start


def run_registered_worker(main: Callable, cfg: Any, **kwargs: Any) -> Any:
    """Run fairseq's `main` in a worker process and return its result, see `start.run_worker`.

    A spawned process first imports the module of the function that it runs. This function is defined in this module so
    that importing it registers the tasks, models and criterions in that process, too.
    """
    return start.run_worker(main, cfg, **kwargs)


patches.install(run_registered_worker)

__all__ = ["LLNMaskedLMTask", "LLNSentencePredictionTask"]
