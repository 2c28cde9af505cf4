"""Data sets are written completely or not at all, byte for byte as fairseq writes them, and are verified."""

import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset

from lln_fairseq.errors import UserError
from lln_fairseq.text.binary_format import binarize, dataset_files, label_blocks

SAMPLES = [[4, 5, 2], [5, 3, 4, 2], [2], [4, 2]]
SIZE = 6


def make_block(samples):
    return np.concatenate(samples).astype(np.int32), np.array([len(sample) for sample in samples], dtype=np.int64)


def binarize_samples(prefix, size=SIZE):
    """Binarize SAMPLES in two blocks."""
    return binarize([make_block(SAMPLES[:2]), make_block(SAMPLES[2:])], size, prefix, len(SAMPLES))


@pytest.mark.parametrize("size", [SIZE, 70_000])
def test_files_are_those_of_fairseqs_builder(tmp_path, size):
    binarize_samples(tmp_path / "ours", size)
    builder = indexed_dataset.make_builder(str(tmp_path / "fairseq.bin"), impl="mmap", vocab_size=size)
    for sample in SAMPLES:
        builder.add_item(torch.tensor(sample))
    builder.finalize(str(tmp_path / "fairseq.idx"))

    for ours, expected in zip(dataset_files(tmp_path / "ours"), dataset_files(tmp_path / "fairseq"), strict=True):
        assert ours.read_bytes() == expected.read_bytes()


def test_counts(tmp_path):
    counts = binarize_samples(tmp_path / "new" / "train")

    assert counts.record() == {"samples": 4, "tokens": 10, "unknown": 1, "longest": 4}
    assert counts.by_id.tolist() == [0, 0, 4, 1, 3, 2]


def test_wrong_number_of_samples_raises(tmp_path):
    with pytest.raises(UserError, match="4 samples and 10 tokens, not 5 samples"):
        binarize([make_block(SAMPLES)], SIZE, tmp_path / "train", 5)
    with pytest.raises(UserError, match="no lines"):
        binarize([], SIZE, tmp_path / "empty", 0)


@pytest.mark.parametrize("samples", [[[4, 6, 2]], [[4], [4, 2]], [[4, 2], [4, 5]]])
def test_id_beyond_the_dictionary_or_missing_end_raises(tmp_path, samples):
    with pytest.raises(UserError, match="samples must end with </s>"):
        binarize([make_block(samples)], SIZE, tmp_path / "train", len(samples))


def test_interrupted_encoding_leaves_no_files(tmp_path):
    def interrupted_blocks():
        yield make_block(SAMPLES)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        binarize(interrupted_blocks(), SIZE, tmp_path / "data" / "train", 4)
    assert list((tmp_path / "data").iterdir()) == []


def test_class_k_has_id_4_plus_k():
    [(ids, lengths)] = label_blocks(["b", "a", "b"], ["a", "b"])

    assert ids.tolist() == [5, 2, 4, 2, 5, 2]
    assert lengths.tolist() == [2, 2, 2]
