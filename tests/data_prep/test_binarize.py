"""fairseq's datasets are written whole and read back."""

import pytest

from data_prep.binarize import DatasetCounts, binarize, dataset_files, read_back
from data_prep.command import DataError
from data_prep.tokenizers import dictionary_text


@pytest.fixture
def dictionary(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text(dictionary_text(["a", "b"], {}), encoding="utf-8")
    return path


def test_counts_and_rerun(tmp_path, dictionary):
    prefix = tmp_path / "new" / "train"
    counts = binarize(["a b", "b unknown a", "a"], str.split, dictionary, prefix)
    assert counts == DatasetCounts(samples=3, tokens=9, unknown=1, longest=4)
    before = [file.stat().st_mtime_ns for file in dataset_files(prefix)]
    assert binarize(["a b", "b unknown a", "a"], str.split, dictionary, prefix) == counts
    assert [file.stat().st_mtime_ns for file in dataset_files(prefix)] == before


def test_kept_dataset_with_other_rows_is_refused(tmp_path, dictionary):
    binarize(["a b"], str.split, dictionary, tmp_path / "train")
    with pytest.raises(DataError, match="1 samples"):
        binarize(["a b", "a"], str.split, dictionary, tmp_path / "train")


def test_no_lines(tmp_path, dictionary):
    with pytest.raises(DataError, match="no lines"):
        binarize([], str.split, dictionary, tmp_path / "train")


# fairseq's reader fails a second time in its __del__ when its index cannot be read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", [0, 1])
def test_truncated_dataset(tmp_path, dictionary, suffix):
    binarize(["a b", "a b a"], str.split, dictionary, tmp_path / "train")
    damaged = dataset_files(tmp_path / "train")[suffix]
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(DataError, match="train"):
        read_back(tmp_path / "train", dictionary)


def test_failure_while_encoding_leaves_nothing(tmp_path, dictionary):
    def encode(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        binarize(["a"], encode, dictionary, tmp_path / "data" / "train")
    assert list((tmp_path / "data").iterdir()) == []
