"""The base class of the tasks that cut running text into samples."""

from pathlib import Path
from typing import Any

from fairseq import utils

from lln_fairseq.data.checks import check_lines, require_same_symbols
from lln_fairseq.errors import input_errors
from lln_fairseq.training.hooked_task import HookedTask, require_files


class TextTask(HookedTask):
    """A mixin that checks the data of a task on running text.

    In the definition of a task, it is the first base class, and fairseq's own task is the second.
    """

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
