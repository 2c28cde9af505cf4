"""Masked language modelling: fairseq's task with its silent failures mended."""

from typing import Any

from fairseq import utils
from fairseq.data import BaseWrapperDataset, PrependTokenDataset, TruncateDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from lln_fairseq.errors import InputError
from lln_fairseq.tasks._host_fixes import HostFixes, require_files


@register_task("lln_masked_lm", dataclass=MaskedLMConfig)
class LLNMaskedLMTask(HostFixes, MaskedLMTask):
    """`sample_break_mode` eos, one line of text a sample, works here; fairseq's own fails with numpy 2."""

    @classmethod
    def setup_task(cls, cfg: MaskedLMConfig, **kwargs: Any) -> "LLNMaskedLMTask":
        for directory in utils.split_paths(cfg.data):
            require_files(directory, "dict.txt")
        return super().setup_task(cfg, **kwargs)

    def _load_dataset_split(self, split: str, epoch: int, combine: bool) -> BaseWrapperDataset:
        if str(self.cfg.sample_break_mode) != "eos":
            return super()._load_dataset_split(split, epoch, combine)
        paths = utils.split_paths(self.cfg.data)
        prefix = f"{paths[(epoch - 1) % len(paths)]}/{split}"
        lines = data_utils.load_indexed_dataset(prefix, self.source_dictionary, combine=combine)
        if lines is None:
            raise InputError(f"cannot load split '{split}': {prefix}.idx is missing")
        # The data set already has one line an item, with its end-of-sentence symbol; a longer one loses its end.
        return PrependTokenDataset(TruncateDataset(lines, self.cfg.tokens_per_sample - 1), self.source_dictionary.bos())
