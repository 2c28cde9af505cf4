"""fairseq's datasets are written whole, are what fairseq itself would write, and are read back."""

from functools import partial

import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset

from lln_fairseq.data.binary_format import binarize, dataset_files, label_blocks
from lln_fairseq.data.reporting import DataError

SAMPLES = [[4, 5, 2], [5, 3, 4, 2], [2], [4, 2]]
SIZE = 6


def block(samples):
    return np.concatenate(samples).astype(np.int32), np.array([len(s) for s in samples], dtype=np.int64)


def write(prefix, samples=SAMPLES, size=SIZE):
    return binarize(lambda: [block(samples[:2]), block(samples[2:])], size, prefix, len(samples))


@pytest.mark.parametrize("size", [SIZE, 70_000])
def test_the_bytes_are_those_of_fairseqs_own_builder(tmp_path, size):
    write(tmp_path / "ours", size=size)
    builder = indexed_dataset.make_builder(str(tmp_path / "theirs.bin"), impl="mmap", vocab_size=size)
    for sample in SAMPLES:
        builder.add_item(torch.tensor(sample))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ours, theirs in zip(dataset_files(tmp_path / "ours"), dataset_files(tmp_path / "theirs"), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def test_counts_and_rerun(tmp_path):
    prefix = tmp_path / "new" / "train"
    counts = write(prefix)
    assert counts.record() == {"samples": 4, "tokens": 10, "unknown": 1, "longest": 4}
    assert counts.by_id.tolist() == [0, 0, 4, 1, 3, 2]
    before = [file.stat().st_mtime_ns for file in dataset_files(prefix)]
    assert binarize(partial(pytest.fail, "encoded again"), SIZE, prefix, 4) == counts
    assert [file.stat().st_mtime_ns for file in dataset_files(prefix)] == before


def test_other_numbers_of_rows_are_refused(tmp_path):
    with pytest.raises(DataError, match="4 samples and 10 tokens, not 5 samples"):
        binarize(lambda: [block(SAMPLES)], SIZE, tmp_path / "train", 5)
    with pytest.raises(DataError, match="not 3 samples"):
        binarize(list, SIZE, tmp_path / "train", 3)
    with pytest.raises(DataError, match="no lines"):
        binarize(list, SIZE, tmp_path / "empty", 0)


@pytest.mark.parametrize("samples", [[[4, 6, 2]], [[4], [4, 2]], [[4, 2], [4, 5]]])
def test_wrong_samples(tmp_path, samples):
    with pytest.raises(DataError, match="does not hold samples"):
        binarize(lambda: [block(samples)], SIZE, tmp_path / "train", len(samples))


def test_failure_while_encoding_leaves_nothing(tmp_path):
    def blocks():
        yield block(SAMPLES)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        binarize(blocks, SIZE, tmp_path / "data" / "train", 4)
    assert list((tmp_path / "data").iterdir()) == []


def test_class_k_has_id_4_plus_k():
    [(ids, lengths)] = label_blocks(["b", "a", "b"], ["a", "b"])
    assert ids.tolist() == [5, 2, 4, 2, 5, 2]
    assert lengths.tolist() == [2, 2, 2]
