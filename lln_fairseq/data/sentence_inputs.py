"""Make the data sets of sentence prediction that fairseq's task cannot: two inputs kept apart, or no </s>."""

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
    StripTokenDataset,
    TruncateDataset,
    data_utils,
)
from torch import Tensor

from lln_fairseq.data.split_lines import ResizedDataset


class WithoutLast(ResizedDataset):
    """A data set of lines without the last token of each, which is </s>."""

    def __getitem__(self, index: int) -> Tensor:
        return self.dataset[index][:-1]

    @property
    def sizes(self) -> np.ndarray:
        return np.asarray(self.dataset.sizes) - 1


def read_inputs(task: Any, split: str, folders: Sequence[str], combine: bool) -> list[BaseWrapperDataset]:
    """Return the inputs that a split has, as the model sees them: each row has at most max_positions tokens."""
    cfg = task.cfg
    dictionary = task.source_dictionary
    inputs = []
    for folder in folders:
        lines = data_utils.load_indexed_dataset(str(Path(cfg.data, folder, split)), dictionary, combine=combine)
        if lines is None:
            break
        if cfg.strip_eos:
            lines = WithoutLast(lines)
        if cfg.init_token is not None:
            lines = PrependTokenDataset(lines, cfg.init_token)
        if cfg.shorten_method == "truncate":
            lines = TruncateDataset(lines, cfg.max_positions)
        inputs.append(lines)
    return inputs


def make_samples(task: Any, inputs: Sequence[BaseWrapperDataset], labels: Any) -> NestedDictionaryDataset:
    """Return samples as fairseq's task has them; a second input is `other_tokens`.

    `labels` is None for a split without labels.
    """
    pad = task.source_dictionary.pad()
    first = inputs[0]
    net_input = {
        "src_tokens": RightPadDataset(first, pad_idx=pad),
        "src_lengths": NumelDataset(first, reduce=False),
    }
    if len(inputs) == 2:
        net_input["other_tokens"] = RightPadDataset(inputs[1], pad_idx=pad)
    everything = first if len(inputs) == 1 else ConcatSentencesDataset(*inputs)
    fields = {
        "id": IdDataset(),
        "net_input": net_input,
        "nsentences": NumSamplesDataset(),
        "ntokens": NumelDataset(everything, reduce=True),
    }
    if labels is not None:
        fields["target"] = labels
    sizes = [np.asarray(lines.sizes) for lines in inputs]
    dataset = NestedDictionaryDataset(fields, sizes=[np.maximum.reduce(sizes)])
    dataset.lengths = sizes  # see training/padding_report.py
    return dataset


def read_labels(task: Any, split: str, combine: bool) -> Any:
    """Return the class numbers, or the scores, of a split; None if it has none."""
    prefix = Path(task.cfg.data, "label", split)
    if task.cfg.regression_target:
        path = Path(f"{prefix}.label")
        if not path.is_file():
            return None
        return RawLabelDataset([[*map(float, line.split())] for line in path.open()])
    dictionary = task.label_dictionary
    labels = data_utils.load_indexed_dataset(str(prefix), dictionary, combine=combine)
    if labels is None:
        return None
    return OffsetTokensDataset(StripTokenDataset(labels, id_to_strip=dictionary.eos()), offset=-dictionary.nspecial)
