"""What fairseq does silently wrong in every task, mended once for all of ours."""

from pathlib import Path
from typing import Any

from lln_fairseq.errors import InputError
from lln_fairseq.training.padding_report import PaddingReport
from lln_fairseq.training.probe import AttentionProbe
from lln_fairseq.training.resume import ExactResume
from lln_fairseq.training.sequence_parallel import SharedSequences
from lln_fairseq.training.tensorboard import TensorBoardScalars


class HostFixes(PaddingReport, AttentionProbe, TensorBoardScalars, ExactResume, SharedSequences):
    """Goes in front of a fairseq task."""

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        # fairseq rounds the size of a batch down to a multiple of 8 and drops the rows that are left at the end of a
        # data set, in training and in validation.
        kwargs["required_batch_size_multiple"] = 1
        batches = super().get_batch_iterator(dataset, *args, **kwargs)
        # Loader processes that live on do not hear of a new epoch: every epoch would mask the tokens of the first.
        batches.persistent_workers = False
        return batches

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().load_dataset(split, *args, **kwargs)
        except (FileNotFoundError, AssertionError, ValueError) as error:
            if isinstance(error, InputError) or not str(error):  # another assertion of fairseq's
                raise
            raise InputError(f"cannot load split '{split}' of {self.cfg.data}: {error}") from error


def require_files(directory: str, *names: str) -> None:
    """Raises InputError that names the first missing file."""
    for name in names:
        path = Path(directory, name)
        if not path.is_file():
            raise InputError(f"{directory} is not a binarised data directory: {path} is missing")
