"""Language modelling, every token from those before it: fairseq's task without its silent failures."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from fairseq.data import SortDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from lln_fairseq.errors import InputError
from lln_fairseq.tasks.text import TextTask
from lln_fairseq.training.options import TrainingOptions


@dataclass
class LLNLanguageModelingConfig(TrainingOptions, LanguageModelingConfig):
    """fairseq's options and ours."""


@register_task("lln_language_modeling", dataclass=LLNLanguageModelingConfig)
class LLNLanguageModelingTask(TextTask, LanguageModelingTask):
    fitting_advice = "with --sample-break-mode none or --shorten-method truncate"

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> "LLNLanguageModelingTask":
        """Set up the task. Raise InputError for unsound data, and for the way to cut text that fairseq cannot do."""
        if str(cfg.sample_break_mode) == "eos":
            raise InputError("sample_break_mode eos does not work in fairseq's language_modeling: none or complete do")
        return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """fairseq draws batches anew in every process, by its first epoch: a run that goes on would have others.

        Raises: InputError where the files of the split are damaged or do not fit the dictionary.
        """
        self.checked_prefix(split, epoch, combine)
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        if split.startswith("train"):
            dataset = self.datasets[split]
            with data_utils.numpy_seed(self.cfg.seed):
                order = np.random.permutation(len(dataset))
            self.datasets[split] = SortDataset(dataset, sort_order=[order, dataset.sizes])
