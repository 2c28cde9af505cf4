"""Masked language modeling: fairseq's task, with errors where it would fail silently or lose text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fairseq import utils
from fairseq.data import BaseWrapperDataset, PrependTokenDataset, TokenBlockDataset, data_utils
from fairseq.data.shorten_dataset import maybe_shorten_dataset
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from torch import Tensor

from lln_fairseq.errors import UserError, user_errors
from lln_fairseq.text.checks import check_lines, require_binarized, require_same_symbols
from lln_fairseq.text.long_lines import SplitLines
from lln_fairseq.training.hooked_task import HookedTask
from lln_fairseq.training.options import TrainingOptions
from lln_fairseq.training.worker import is_first_worker


@dataclass
class LLNMaskedLMConfig(TrainingOptions, MaskedLMConfig):
    """Options of the task lln_masked_lm: the options of fairseq's task and of the hooks."""


def mask_one_token(batch: dict[str, Any], candidates: Tensor, mask: int, seed: Sequence[int]) -> None:
    """Replace a random token of a batch by <mask>, whose id is `mask`, and make the token a target, in place.

    `candidates` (B, N) is True where a token can be chosen.
    """
    tokens = batch["net_input"]["src_tokens"]
    row, column = np.random.default_rng(seed).choice(candidates.nonzero().numpy())
    batch["target"][row, column] = tokens[row, column]
    tokens[row, column] = mask


class OneMaskedToken(BaseWrapperDataset):
    """Wraps the samples of a split in which nothing is masked: one random token of a random sample is masked."""

    def __init__(self, dataset: Any, pad: int, mask: int, seed: int) -> None:
        super().__init__(dataset)
        self.pad = pad
        self.mask = mask
        self.seed = seed
        self.row = np.random.default_rng(seed).integers(len(dataset))

    def collater(self, samples: Sequence[Any]) -> Any:
        batch = self.dataset.collater(samples)
        if batch and (batch["id"] == self.row).any():
            is_token = batch["net_input"]["src_tokens"] != self.pad
            is_in_row = (batch["id"] == self.row)[:, None]
            mask_one_token(batch, is_token & is_in_row, self.mask, [self.seed])
        return batch


@register_task("lln_masked_lm", dataclass=LLNMaskedLMConfig)
class LLNMaskedLMTask(HookedTask, MaskedLMTask):
    """The task lln_masked_lm: predict masked tokens.

    No sample has more than tokens_per_sample tokens. In every sample_break_mode, a line that is too long continues in
    the next sample. So no text is lost, unless shorten_method truncates the line.
    """

    @classmethod
    def setup_task(cls, cfg: LLNMaskedLMConfig, **kwargs: Any) -> "LLNMaskedLMTask":
        """Set up the task. All data directories must have the same dict.txt."""
        if cfg.mask_whole_words:
            raise UserError("mask_whole_words does not work in fairseq's masked_lm: leave it out")
        if cfg.tokens_per_sample < 3:  # <s>, and the two tokens that SplitLines needs for a piece of a line
            raise UserError(f"tokens_per_sample must be at least 3, got {cfg.tokens_per_sample}")
        directories = utils.split_paths(cfg.data)
        for directory in directories:
            require_binarized(directory, "dict.txt")
        require_same_symbols(*(Path(directory, "dict.txt") for directory in directories))
        with user_errors():
            return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> None:
        """Load a split into self.datasets.

        If the masks of a validation split, which are the same in every epoch, mask nothing in it, its loss would be
        NaN. One token is masked then.
        """
        super().load_dataset(split, *args, **kwargs)
        dataset = self.dataset(split)
        if split.startswith("train") or not len(dataset):
            return
        pad = self.source_dictionary.pad()
        dataset.set_epoch(1)  # as fairseq does before it validates
        if not any((dataset[row]["target"] != pad).any() for row in range(len(dataset))):
            self.datasets[split] = OneMaskedToken(dataset, pad, self.mask_idx, self.cfg.seed)

    def before_update(self, samples: Sequence[Any], updates: int, device: torch.device) -> None:
        """Mask one token in the first worker if nothing is masked in an update: its loss would be NaN."""
        pad = self.source_dictionary.pad()
        batches = [batch for batch in samples if batch]  # a worker without samples left gets an empty batch
        has_mask = torch.tensor(any((batch["target"] != pad).any() for batch in batches), dtype=torch.uint8)
        if dist.is_initialized():
            has_mask = has_mask.to(device)
            dist.all_reduce(has_mask, op=dist.ReduceOp.MAX)
        if not has_mask and is_first_worker():
            is_token = batches[0]["net_input"]["src_tokens"] != pad
            mask_one_token(batches[0], is_token, self.mask_idx, [self.cfg.seed, updates])

    def too_long_advice(self, limit: int) -> str:
        return (
            f"set --tokens-per-sample (task.tokens_per_sample) to {limit}, or raise --max-tokens (dataset.max_tokens) "
            "and --max-positions (model.max_positions)"
        )

    def padding_advice(self) -> str:
        """Return options that reduce padding, or "" for sample_break_mode none, which has almost no padding.

        In the other modes, fairseq already groups samples of similar lengths, but padding remains if there are few
        samples and their lengths vary.
        """
        if str(self.cfg.sample_break_mode) == "none":
            return ""
        return (
            "smaller batches (dataset.max_tokens or dataset.batch_size, with a larger optimization.update_freq), or "
            "task.sample_break_mode=none, which fills every sample but cuts lines and documents"
        )

    def _load_dataset_split(self, split: str, epoch: int, combine: bool) -> BaseWrapperDataset:
        """Return the samples of a split before masking, each with <s> in front. fairseq's load_dataset calls this.

        With several data directories, the epochs, from 1, use them in turn. `combine` appends split1, split2, ...
        """
        cfg = self.cfg
        dictionary = self.source_dictionary
        limit = cfg.tokens_per_sample - 1  # leaves room for <s>
        directories = utils.split_paths(cfg.data)
        directory = directories[(epoch - 1) % len(directories)]
        prefix = f"{directory}/{split}"
        check_lines(prefix, Path(directory, "dict.txt"), combine)
        lines = data_utils.load_indexed_dataset(prefix, dictionary, combine=combine)
        if lines is None:
            raise UserError(f"cannot load split '{split}': {prefix}.idx is missing")
        lines = maybe_shorten_dataset(lines, split, cfg.shorten_data_split_list, cfg.shorten_method, limit, cfg.seed)
        samples: BaseWrapperDataset = SplitLines(lines, limit)
        mode = str(cfg.sample_break_mode)
        if mode != "eos":  # in the mode eos, every line is a sample
            samples = TokenBlockDataset(
                samples,
                samples.sizes,
                limit,
                pad=dictionary.pad(),
                eos=dictionary.eos(),
                break_mode=mode,
            )
        return PrependTokenDataset(samples, dictionary.bos())
