"""Build the data sets of sentence prediction.

Unlike in fairseq's own task, the two inputs of a pair can stay separate, and </s> can be removed. In these functions,
`task` is the task of `lln_fairseq.tasks.sentence_prediction`. Its options determine what is done.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import (
    BaseWrapperDataset,
    ConcatSentencesDataset,
    IdDataset,
    NestedDictionaryDataset,
    NumelDataset,
    NumSamplesDataset,
    OffsetTokensDataset,
    PrependTokenDataset,
    RawLabelDataset,
    RightPadDataset,
    SortDataset,
    StripTokenDataset,
    TruncateDataset,
    data_utils,
)
from torch import Tensor

from lln_fairseq.text.long_lines import ResizedDataset
from lln_fairseq.text.samples import cut_sample


class WithoutLast(ResizedDataset):
    """Wraps a data set of lines and removes the last token of each line, which is </s>."""

    def __getitem__(self, index: int) -> Tensor:
        return self.dataset[index][:-1]

    @property
    def sizes(self) -> np.ndarray:
        """The number of tokens of each line, (lines,)."""
        return np.asarray(self.dataset.sizes) - 1


class CutSamples(TruncateDataset):
    """Wraps a data set of samples and cuts them with `cut_sample`. fairseq's TruncateDataset would cut </s> off."""

    def __getitem__(self, index: int) -> Tensor:
        return cut_sample(self.dataset[index], self.truncation_length)


def read_inputs(task: Any, split: str, directories: Sequence[str], combine: bool) -> list[BaseWrapperDataset]:
    """Return the input data sets of a split, one for each directory, prepared for the model.

    Three options of the task apply in this order: strip_eos removes the last token, </s>. init_token, if it is set, is
    inserted before each row. shorten_method=truncate cuts rows to max_positions tokens; otherwise longer rows are kept.
    The first directory without the split, and all directories after it, are left out. With `combine`, the data of
    split1, split2, ... are appended.
    """
    cfg = task.cfg
    dictionary = task.source_dictionary
    inputs = []
    for directory in directories:
        lines = data_utils.load_indexed_dataset(str(Path(cfg.data, directory, split)), dictionary, combine=combine)
        if lines is None:
            break
        if cfg.strip_eos:
            lines = WithoutLast(lines)
        if cfg.init_token is not None:
            lines = PrependTokenDataset(lines, cfg.init_token)
        if cfg.shorten_method == "truncate":
            lines = CutSamples(lines, cfg.max_positions)
        inputs.append(lines)
    return inputs


def make_samples(task: Any, inputs: Sequence[BaseWrapperDataset], labels: Any) -> NestedDictionaryDataset:
    """Combine inputs and targets into one data set with the sample layout of fairseq's sentence_prediction task.

    The size of a sample is the number of tokens of its longer input. A second input becomes net_input.other_tokens.
    `labels` is None for a split without labels.
    """
    pad = task.source_dictionary.pad()
    first = inputs[0]
    all_tokens = first
    net_input = {
        "src_tokens": RightPadDataset(first, pad_idx=pad),
        "src_lengths": NumelDataset(first, reduce=False),
    }
    if len(inputs) == 2:
        net_input["other_tokens"] = RightPadDataset(inputs[1], pad_idx=pad)
        all_tokens = ConcatSentencesDataset(*inputs)
    fields = {
        "id": IdDataset(),
        "net_input": net_input,
        "nsentences": NumSamplesDataset(),
        "ntokens": NumelDataset(all_tokens, reduce=True),
    }
    if labels is not None:
        fields["target"] = labels
    sizes = [np.asarray(lines.sizes) for lines in inputs]
    dataset = NestedDictionaryDataset(fields, sizes=[np.maximum.reduce(sizes)])
    dataset.lengths = sizes  # training/padding_report.py reads them
    return dataset


def count_cut_rows(dataset: Any) -> int:
    """Return the number of rows of a split in which the task's shorten_method cuts an input.

    `dataset` is that of this package's or fairseq's task, as `load_dataset` returns it.
    """
    samples = _without_order(dataset)
    is_cut = np.zeros(len(samples), dtype=bool)
    for name in ("net_input.src_tokens", "net_input.other_tokens"):
        lines = getattr(samples.defn.get(name), "dataset", None)
        if isinstance(lines, TruncateDataset):  # or fairseq's RandomCropDataset, which is derived from it
            is_cut |= np.asarray(lines.dataset.sizes) > lines.truncation_length
    return int(is_cut.sum())


def keep_ends_of_cut_samples(dataset: Any) -> None:
    """Replace fairseq's TruncateDataset in the data set of a split by CutSamples, in place.

    `dataset` is as for `count_cut_rows`. The lengths of its samples do not change.
    """
    padded = _without_order(dataset).defn["net_input.src_tokens"]
    if type(padded.dataset) is TruncateDataset:  # not fairseq's RandomCropDataset
        padded.dataset = CutSamples(padded.dataset.dataset, padded.dataset.truncation_length)


def has_targets(dataset: Any) -> bool:
    return "target" in _without_order(dataset).defn


def _without_order(dataset: Any) -> NestedDictionaryDataset:
    """Return the samples of a split in the order of its files."""
    if isinstance(dataset, SortDataset):
        return dataset.dataset
    return dataset


def read_labels(task: Any, split: str, combine: bool) -> Any:
    """Return the data set of the targets of a split, or None if the split has no targets.

    The targets of a classification are class numbers from 0. With `combine`, the targets of split1, split2, ... are
    appended. The targets of a regression are lists of floats, read from label/SPLIT.label; `combine` has no effect.
    """
    prefix = Path(task.cfg.data, "label", split)
    if task.cfg.regression_target:
        path = Path(f"{prefix}.label")
        if not path.is_file():
            return None
        targets = []
        with path.open() as file:
            for line in file:
                targets.append([float(value) for value in line.split()])
        return RawLabelDataset(targets)
    dictionary = task.label_dictionary
    labels = data_utils.load_indexed_dataset(str(prefix), dictionary, combine=combine)
    if labels is None:
        return None
    return OffsetTokensDataset(StripTokenDataset(labels, id_to_strip=dictionary.eos()), offset=-dictionary.nspecial)
