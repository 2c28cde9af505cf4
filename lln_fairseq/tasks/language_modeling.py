"""Causal language modeling: fairseq's task, with errors where it would fail silently, and exact resume."""

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
    """Options of the task lln_language_modeling: the options of fairseq's task and of the hooks."""


@register_task("lln_language_modeling", dataclass=LLNLanguageModelingConfig)
class LLNLanguageModelingTask(TextTask, LanguageModelingTask):
    """The task lln_language_modeling: predict every token from the tokens before it."""

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> "LLNLanguageModelingTask":
        """Set up the task.

        Raises: InputError if dict.txt is missing or damaged in a data directory, or differs between directories. Also
            if sample_break_mode is eos, because fairseq's task fails with it.
        """
        if str(cfg.sample_break_mode) == "eos":
            raise InputError(
                "sample_break_mode eos does not work in fairseq's language_modeling: use none or complete instead"
            )
        return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a split into self.datasets. If its name begins with "train", sort it by length.

        Samples of the same length are in a random order, which depends only on the seed. In fairseq this order also
        depends on the epoch in which the process starts, so a resumed run would have different batches.

        Args:
            split: the name of the split.
            epoch: the epoch, from 1, which selects one of several data directories.
            combine: also load split1, split2, ...
            kwargs: passed to fairseq's load_dataset.

        Raises: InputError if the files of the split are damaged or do not fit the dictionary.
        """
        self.checked_prefix(split, epoch, combine)
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        if split.startswith("train"):
            dataset = self.datasets[split]
            with data_utils.numpy_seed(self.cfg.seed):
                random_order = np.random.permutation(len(dataset))
            self.datasets[split] = SortDataset(dataset, sort_order=[random_order, dataset.sizes])

    def too_long_advice(self, limit: int) -> str:
        """Return the options with which no sample has more than `limit` tokens."""
        return (
            f"set --tokens-per-sample (task.tokens_per_sample) to {limit} with --sample-break-mode none or "
            "--shorten-method truncate"
        )
