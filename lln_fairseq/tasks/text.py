"""The base class of the tasks that cut running text into samples."""

from pathlib import Path
from typing import Any

import numpy as np
from fairseq import utils

from lln_fairseq.data.checks import check_lines, require_same_symbols
from lln_fairseq.errors import InputError, input_errors
from lln_fairseq.training.hooked_task import HookedTask, require_files


class TextTask(HookedTask):
    """A mixin that checks the data and the samples of a task on running text.

    In the definition of a task, it is the first base class, and fairseq's own task is the second.
    """

    too_long_advice = ""  # end of the error message for a sample that is too long, after "set tokens_per_sample to N"

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> Any:
        """Set up the task.

        Raises: InputError if dict.txt is missing or damaged in a data directory, or differs between directories.
        """
        directories = utils.split_paths(cfg.data)
        for directory in directories:
            require_files(directory, "dict.txt")
        require_same_symbols(*(Path(directory, "dict.txt") for directory in directories))
        with input_errors():
            return super().setup_task(cfg, **kwargs)

    def checked_prefix(self, split: str, epoch: int, combine: bool) -> str:
        """Check the files of a split, and return their path without .bin and .idx. The files may be missing.

        Args:
            split: the name of the split.
            epoch: the epoch, from 1. If there are several data directories, the epochs use them in turn.
            combine: also check split1, split2, ...

        Raises: InputError if the files are damaged or do not fit the dictionary.
        """
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
        """Return fairseq's iterator over the batches of each epoch.

        Args:
            dataset: the data set.
            max_tokens: the maximum number of tokens in a batch, including padding; None means no limit.
            max_sentences: the maximum number of samples in a batch; None means no limit.
            max_positions: the maximum number of tokens in a sample; None means no limit.
            kwargs: passed to fairseq's get_batch_iterator.

        Raises: InputError if a sample has more than max_positions tokens. fairseq would reject it or leave it out.
        """
        longest = int(np.max(dataset.sizes, initial=0))  # a masked data set has its sizes in a list of one array
        if max_positions is not None and longest > max_positions:
            raise InputError(
                f"a sample has {longest} tokens, but the model and --max-tokens allow at most {max_positions}: set "
                f"--tokens-per-sample (task.tokens_per_sample) to {max_positions} {self.too_long_advice}"
            )
        return super().get_batch_iterator(dataset, max_tokens, max_sentences, max_positions, **kwargs)
