"""Masked language modelling: fairseq's task without its silent failures."""

from dataclasses import dataclass
from typing import Any

from fairseq.data import BaseWrapperDataset, PrependTokenDataset, TokenBlockDataset, data_utils
from fairseq.data.shorten_dataset import maybe_shorten_dataset
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from lln_fairseq.data.split_lines import SplitLines
from lln_fairseq.errors import InputError
from lln_fairseq.tasks.text import TextTask
from lln_fairseq.training.options import TrainingOptions


@dataclass
class LLNMaskedLMConfig(TrainingOptions, MaskedLMConfig):
    """fairseq's options and ours."""


@register_task("lln_masked_lm", dataclass=LLNMaskedLMConfig)
class LLNMaskedLMTask(TextTask, MaskedLMTask):
    """No sample is longer than tokens_per_sample and no token is lost, in every sample_break_mode (eos included, which
    fairseq itself cannot do with numpy 2): a longer line continues in the next sample. shorten_method cuts it instead.
    """

    fitting_advice = "or raise --max-positions (model.max_positions)"

    @classmethod
    def setup_task(cls, cfg: LLNMaskedLMConfig, **kwargs: Any) -> "LLNMaskedLMTask":
        """Set up the task. Raise InputError for unsound data and for options that fairseq has but cannot do."""
        if cfg.mask_whole_words:
            raise InputError("mask_whole_words does not work in fairseq's masked_lm: leave it out")
        if cfg.tokens_per_sample < 3:  # <s>, and a line of at least two tokens, see SplitLines
            raise InputError(f"tokens_per_sample is {cfg.tokens_per_sample}, and must be at least 3")
        return super().setup_task(cfg, **kwargs)

    def padding_advice(self) -> str:
        """fairseq's batches are of like lengths already: what is wasted comes from few samples of many lengths."""
        if str(self.cfg.sample_break_mode) == "none":
            return ""
        return (
            "smaller batches (dataset.max_tokens or batch_size; update_freq makes up for it), and with none of it in "
            "task.sample_break_mode=none, which fills every sample and cuts lines and documents"
        )

    def _load_dataset_split(self, split: str, epoch: int, combine: bool) -> BaseWrapperDataset:
        """The samples of a split, each with <s> in front and at most tokens_per_sample long with it."""
        cfg, dictionary, limit = self.cfg, self.source_dictionary, self.cfg.tokens_per_sample - 1
        prefix = self.checked_prefix(split, epoch, combine)
        lines = data_utils.load_indexed_dataset(prefix, dictionary, combine=combine)
        if lines is None:
            raise InputError(f"cannot load split '{split}': {prefix}.idx is missing")
        lines = maybe_shorten_dataset(lines, split, cfg.shorten_data_split_list, cfg.shorten_method, limit, cfg.seed)
        lines = SplitLines(lines, limit)
        mode = str(cfg.sample_break_mode)
        if mode != "eos":  # lines as they are
            pad, eos = dictionary.pad(), dictionary.eos()
            lines = TokenBlockDataset(lines, lines.sizes, limit, pad=pad, eos=eos, break_mode=mode)
        return PrependTokenDataset(lines, dictionary.bos())
