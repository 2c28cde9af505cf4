"""The base of the tasks that cut running text into samples."""

from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils

from lln_fairseq.data.checks import check_lines, require_same_symbols
from lln_fairseq.errors import InputError, input_errors
from lln_fairseq.training.hooked_task import HookedTask, require_files


class TextTask(HookedTask):
    """The first base of a task on running text, in front of one of fairseq's."""

    fitting_advice = ""  # what helps besides a smaller tokens_per_sample where a sample is too long

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> Any:
        """Set up the task. Raise InputError for data without a sound dictionary."""
        directories = utils.split_paths(cfg.data)
        for directory in directories:
            require_files(directory, "dict.txt")
        require_same_symbols(*(Path(directory, "dict.txt") for directory in directories))
        with input_errors():
            return super().setup_task(cfg, **kwargs)

    def checked_prefix(self, split: str, epoch: int, combine: bool) -> str:
        """Return the path of a split's files in an epoch, without suffix. Raise InputError if they are damaged."""
        directories = utils.split_paths(self.cfg.data)
        directory = directories[(epoch - 1) % len(directories)]
        prefix = f"{directory}/{split}"
        check_lines(prefix, Path(directory, "dict.txt"), combine)
        return prefix

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the batches of an epoch.

        Raises: InputError for a sample that does not fit into the model; fairseq trains without it.
        """
        longest = int(np.max(dataset.sizes, initial=0))  # a list of one array where the samples are masked
        if max_positions is not None and longest > max_positions:
            raise InputError(
                f"a sample has {longest} tokens, but the model and --max-tokens take at most {max_positions}: set "
                f"--tokens-per-sample (task.tokens_per_sample) to {max_positions} {self.fitting_advice}"
            )
        return super().get_batch_iterator(dataset, max_tokens, max_sentences, max_positions, **kwargs)
