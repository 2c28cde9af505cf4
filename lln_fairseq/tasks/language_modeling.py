"""Language modelling, every token from those before it: fairseq's task without its silent failures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import SortDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from lln_fairseq.data.checks import check_lines, same_symbols
from lln_fairseq.errors import InputError, input_errors
from lln_fairseq.training.hooked_task import HookedTask, require_files
from lln_fairseq.training.options import TrainingOptions


@dataclass
class LLNLanguageModelingConfig(TrainingOptions, LanguageModelingConfig):
    """fairseq's options and ours."""


@register_task("lln_language_modeling", dataclass=LLNLanguageModelingConfig)
class LLNLanguageModelingTask(HookedTask, LanguageModelingTask):
    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> "LLNLanguageModelingTask":
        """Raises InputError for data without a sound dictionary, and for the way to cut text that fairseq cannot do."""
        directories = utils.split_paths(cfg.data)
        for directory in directories:
            require_files(directory, "dict.txt")
        same_symbols(*(Path(directory, "dict.txt") for directory in directories))
        if str(cfg.sample_break_mode) == "eos":
            raise InputError("sample_break_mode eos does not work in fairseq's language_modeling: none or complete do")
        with input_errors():
            return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """fairseq draws batches anew in every process, by its first epoch: a run that goes on would have others.

        Raises: InputError where the files of the split are damaged or do not fit the dictionary.
        """
        paths = utils.split_paths(self.cfg.data)
        directory = paths[(epoch - 1) % len(paths)]
        check_lines(f"{directory}/{split}", Path(directory, "dict.txt"), combine)
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        if split.startswith("train"):
            dataset = self.datasets[split]
            with data_utils.numpy_seed(self.cfg.seed):
                order = np.random.permutation(len(dataset))
            self.datasets[split] = SortDataset(dataset, sort_order=[order, dataset.sizes])

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Raises: InputError for a sample that does not fit into the model; fairseq trains and scores without it."""
        longest = int(dataset.sizes.max(initial=0))
        if max_positions is not None and longest > max_positions:
            raise InputError(
                f"a sample has {longest} tokens, but the model and --max-tokens take at most {max_positions}: set "
                f"--tokens-per-sample to {max_positions} with --sample-break-mode none or --shorten-method truncate"
            )
        return super().get_batch_iterator(dataset, max_tokens, max_sentences, max_positions, **kwargs)
