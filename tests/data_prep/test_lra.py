"""Test the Long Range Arena's data: contents as fairseq loads them, forms of the source, bad input."""

import io
import json
import re
import shutil
import zipfile

import numpy as np
import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from PIL import Image

from data_prep import listops, lra, lra_sources
from data_prep.lra_tasks import LRA_TASKS
from lln_fairseq.errors import UserError
from lln_fairseq.files import sha256_of
from tests.data_prep.conftest import files_without_manifest, tar_gz


def build(out, task, *options):
    return lra.main([task, "--out", str(out), "--workers", "1", *map(str, options)])


def read_rows(directory, split, inputs=1):
    """Return (label, symbols, ...) of every row, as fairseq reads them."""
    labels = [line.split()[0] for line in (directory / "label/dict.txt").read_text().splitlines()]
    labels = [label for label in labels if not label.startswith("madeup")]
    config = SentencePredictionConfig(data=str(directory), num_classes=len(labels), no_shuffle=True, seed=1)
    config.regression_target = False
    config.separator_token = 2
    dataset = SentencePredictionTask.setup_task(config).load_dataset(split)
    rows = []
    for i in range(len(dataset)):
        ids = dataset[i]["net_input.src_tokens"].tolist()
        assert ids[-1] == 2
        texts = [" ".join(map(str, ids[:-1]))]
        if inputs == 2:
            texts = texts[0].split(" 2 2 ")
        symbols = [bytes(int(word) - 4 for word in text.split()) for text in texts]
        rows.append((labels[int(dataset[i]["target"])], *symbols))
    return rows


def read_all_rows(directory):
    rows = []
    for split in ("train", "valid", "test"):
        rows += read_rows(directory, split)
    return rows


def png(pixels, side=32):
    """Return a gray picture as a PNG file."""
    buffer = io.BytesIO()
    Image.frombytes("L", (len(pixels) // side, side), pixels).save(buffer, "PNG")
    return buffer.getvalue()


def pixels(number):
    return bytes((number * 31 + i * i) % 256 for i in range(1024))


def cifar(numbers):
    return b"".join(bytes([n % 10]) + pixels(n) + pixels(n + 1) + pixels(n + 2) for n in numbers)


def listops_file(number):
    """Return a file of LRA's release with the same row three times."""
    row = f"( ( ( ( [MAX 1 ) {number} ) 2 ) ] )\t{max(number, 2)}\n"
    return ("Source\tTarget\n" + row * 3).encode()


def review_files():
    files = {"aclImdb/train/unsup/1_0.txt": b"unlabeled", "aclImdb/README": b"read me"}
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            for number in (1, 2):
                files[f"aclImdb/{split}/{label}/{number}_{number}.txt"] = f"{split} {label} {number} é".encode()
    return files


def pathfinder_files():
    """Return the pictures of the release, the last of them empty, and one of another size in another directory."""
    directory = "lra_release/lra_release/pathfinder32/curv_contour_length_14"
    other_directory = "lra_release/lra_release/pathfinder64/curv_contour_length_14"
    metadata = "".join(f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n" for i in range(PICTURES))
    files = {f"{directory}/metadata/0.npy": metadata.encode()}
    for i in range(PICTURES - 1):
        files[f"{directory}/imgs/0/sample_{i}.png"] = png(pixels(i))
    files[f"{directory}/imgs/0/sample_{PICTURES - 1}.png"] = b""
    files[f"{other_directory}/imgs/0/sample_0.png"] = b"another size"
    return files


PICTURES = 20
SOURCES = {
    "listops": {
        "lra_release/lra_release/listops-1000/basic_train.tsv": listops_file(7),
        "lra_release/lra_release/listops-1000/basic_val.tsv": listops_file(8),
        "lra_release/lra_release/listops-1000/basic_test.tsv": listops_file(1),
    },
    "text": review_files(),
    "retrieval": {
        f"lra_release/tsv_data/new_aan_pairs.{name}.tsv": f"1.0\t1\t2\t{name} a\tb\n0.0\t3\t4\tc\td\n".encode()
        for name in ("train", "eval", "test")
    },
    "pathfinder": pathfinder_files(),
    "image": {f"cifar-10-batches-bin/data_batch_{i}.bin": cifar(range(10 * i, 10 * i + 10)) for i in range(1, 6)}
    | {"cifar-10-batches-bin/test_batch.bin": cifar(range(4))},
}


@pytest.fixture
def make_source(tmp_path):
    """A function that writes the files of a task to a directory, a tar.gz or a zip archive, and returns its path.

    A keyword argument replaces the content of the file whose name contains the keyword, with _ for a dot; None removes
    the file.
    """

    def make(task, form="directory", **changes):
        files = dict(SOURCES[task])
        for part, content in changes.items():
            name = next(name for name in files if part in name.replace(".", "_"))
            files[name] = content
            if content is None:
                del files[name]
        if form == "directory":
            for name, content in files.items():
                (tmp_path / "given" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "given" / name).write_bytes(content)
            return tmp_path / "given"
        if form == "tar":
            path = tmp_path / "given.gz"
            path.write_bytes(tar_gz(dict(reversed(files.items()))))
            return path
        path = tmp_path / "given.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path

    return make


@pytest.mark.parametrize("task", SOURCES)
def test_archives_and_directory_give_same_data(task, make_source, tmp_path):
    results = []
    for form in ("directory", "tar", "zip"):
        assert build(tmp_path / form, task, "--source", make_source(task, form)) == 0
        results.append(files_without_manifest(tmp_path / form / task))

    assert results[0] == results[1] == results[2]


def test_listops_of_release(make_source, tmp_path):
    assert build(tmp_path, "listops", "--source", make_source("listops")) == 0

    label, symbols = read_rows(tmp_path / "listops", "train")[0]
    assert label == "7"
    assert [listops.SYMBOLS[symbol] for symbol in symbols] == ["[MAX", "1", "7", "2", "]"]


def test_listops_of_release_in_skyformer_reading(make_source, tmp_path):
    assert build(tmp_path, "listops", "--reading", "skyformer", "--source", make_source("listops")) == 0

    label, symbols = read_rows(tmp_path / "listops-skyformer", "test")[0]
    assert label == "2"
    assert [listops.READINGS["skyformer"][symbol] for symbol in symbols] == ["MAX", "1", "1", "2"]


def test_reviews_are_truncated_and_valid_is_test(make_source, tmp_path):
    assert build(tmp_path, "text", "--source", make_source("text"), "--length", "11") == 0

    assert read_rows(tmp_path / "text", "train") == [
        ("neg", b"train neg 1"),
        ("neg", b"train neg 2"),
        ("pos", b"train pos 1"),
        ("pos", b"train pos 2"),
    ]
    test_rows = read_rows(tmp_path / "text", "test")
    assert test_rows == read_rows(tmp_path / "text", "valid")
    assert test_rows[0] == ("neg", "test neg 1 é".encode()[:11])


def test_pairs_of_papers(make_source, tmp_path):
    assert build(tmp_path, "retrieval", "--source", make_source("retrieval")) == 0

    assert read_rows(tmp_path / "retrieval", "valid", inputs=2) == [("1", b"eval a", b"b"), ("0", b"c", b"d")]


def test_pathfinder_of_release(make_source, tmp_path):
    assert build(tmp_path, "pathfinder", "--source", make_source("pathfinder")) == 0

    directory = tmp_path / "pathfinder"
    assert sorted(read_all_rows(directory)) == sorted((str(i % 2), pixels(i)) for i in range(PICTURES - 1))
    counts = json.loads((directory / "manifest.json").read_text())["counts"]
    assert [counts[split]["rows"] for split in counts] == [15, 2, 2]
    assert counts["train"]["empty"] == 1


def test_cifar_in_gray(make_source, tmp_path):
    assert build(tmp_path, "image", "--source", make_source("image")) == 0

    train, valid, test = (read_rows(tmp_path / "image", split) for split in ("train", "valid", "test"))
    assert (len(train), len(valid), len(test)) == (45, 5, 4)
    labels = LRA_TASKS["image"].labels
    assert [label for label, _ in train[:3]] == list(labels[:3])
    red, green, blue = (np.frombuffer(pixels(10 + i), np.uint8).astype(float) for i in range(3))
    expected = 0.2989 * red + 0.587 * green + 0.114 * blue
    first_picture = train[0][1]
    assert np.abs(np.frombuffer(first_picture, np.uint8) - expected).max() <= 1


def test_published_name_requires_published_content(make_source, tmp_path, capsys):
    wrong = make_source("image", "tar").rename(tmp_path / "cifar-10-binary.tar.gz")

    assert build(tmp_path / "out", "image", "--source", wrong) == 1

    assert "is not cifar-10-binary.tar.gz: it has" in capsys.readouterr().err


def test_changed_source_is_rejected(make_source, tmp_path, capsys):
    release = make_source("listops", "tar")
    assert build(tmp_path, "listops", "--source", release) == 0
    recorded = json.loads((tmp_path / "listops/manifest.json").read_text())["settings"]["source"]
    assert recorded == {"given.gz": sha256_of(release)}
    release.write_bytes(tar_gz({**SOURCES["listops"], "more": b""}))

    assert build(tmp_path, "listops", "--source", release) == 1

    assert "was built with other files (given.gz)" in capsys.readouterr().err


def test_drawn_listops_rows(tmp_path):
    assert build(tmp_path, "listops", "--rows", "50") == 0

    rows = read_all_rows(tmp_path / "listops")
    assert len(rows) == 50
    assert all(str(listops.evaluate_listops_row(symbols)) == label for label, symbols in rows)


def test_finished_data_are_kept_and_changed_seed_is_rejected(tmp_path, capsys):
    assert build(tmp_path, "listops", "--rows", "50") == 0

    assert build(tmp_path, "listops", "--rows", "50") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert build(tmp_path, "listops", "--rows", "50", "--seed", "2") == 1
    assert "was built with seed = 1, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GIF89a" + png(pixels(1)), "is not a readable PNG picture"),
        (png(pixels(1))[:60], "is not a readable PNG picture"),
        (png(bytes(512)), "got 16 x 32 pixels"),
    ],
)
def test_read_png_rejects_other_pictures(content, message):
    with pytest.raises(UserError, match=re.escape(message)):
        lra_sources.read_png(content, "it")


def listops_line(line):
    return b"Source\tTarget\n" + line.encode() + b"\n"


BAD_FILES = [
    ("listops", {"train_tsv": listops_line("( [MAX 1 2 ] )\t1")}, "line 2: the target must be 2, got '1'"),
    ("listops", {"train_tsv": listops_line("( [MAX 1 2 ] )\t02")}, "train.tsv, line 2: the target must be 2, got '02'"),
    ("listops", {"train_tsv": listops_line("( [MAX 1 2 )\t1")}, "line 2: not a row of ListOps"),
    ("listops", {"train_tsv": listops_line("( [AVG 1 2 ] )\t1")}, "line 2: not a row of ListOps"),
    ("listops", {"train_tsv": listops_line("")}, "line 2: not a row of ListOps"),
    ("listops", {"train_tsv": b"\xff\xfe\0"}, "line 1: not a row of ListOps"),
    ("listops", {"test_tsv": None}, "has no rows for test of listops"),
    ("text", {"train/neg": b""}, "1_1.txt is empty"),
    ("retrieval", {"train_tsv": b"1.0\t1\t2\ta\n"}, "line 1: expected a label, two numbers and two texts"),
    ("retrieval", {"train_tsv": b"2.0\t1\t2\ta\tb\n"}, "line 1: expected a label"),
    ("retrieval", {"train_tsv": b"1.0\t1\t2\ta\t\n"}, "line 1: expected a label"),
    ("pathfinder", {"0_npy": b"\x93NUMPY\1\0"}, "line 1: expected a directory, a file, a number and a label"),
    ("pathfinder", {"sample_3_png": png(bytes(64 * 64), side=64)}, "got 64 x 64 pixels"),
    ("pathfinder", {"sample_3_png": None}, "has no imgs/0/sample_3.png, which its metadata lists"),
    ("image", {"test_batch": b"\x0b" + bytes(3072)}, "does not hold pictures of 32 x 32"),
    ("image", {"test_batch": bytes(3072)}, "does not hold pictures of 32 x 32"),
    ("text", {"train/neg/1": None, "train/neg/2": None}, "has reviews of one class only in train"),
    ("image", {"data_batch_4": None}, "has no data_batch_4.bin"),
    ("image", {"test_batch": b""}, "does not hold pictures of 32 x 32"),
]


@pytest.mark.parametrize(("task", "changes", "message"), BAD_FILES)
def test_bad_file_is_one_line(task, changes, message, make_source, tmp_path, capsys):
    assert build(tmp_path / "out", task, "--source", make_source(task, **changes)) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "out").exists()


def test_bad_archive_is_one_line(make_source, tmp_path, capsys):
    content = make_source("pathfinder", "tar").read_bytes()
    for name, data, message in (
        ("cut.gz", content[:-300], "cannot be read"),
        ("flipped.gz", content[:200] + bytes(50) + content[250:], "is not a readable archive"),
        ("empty.gz", b"", "is not a readable archive"),
        ("other.gz", tar_gz({"listops/README": b""}), "has no rows for train, valid, test of pathfinder"),
        ("text.tar.gz", b"not an archive", "is not a readable archive"),
    ):
        (tmp_path / name).write_bytes(data)

        assert build(tmp_path / "out", "pathfinder", "--source", tmp_path / name) == 1

        (line,) = capsys.readouterr().err.splitlines()
        assert message in line, line
        assert not (tmp_path / "out").exists()


def test_two_copies_of_the_reviews_are_one_line(make_source, tmp_path, capsys):
    source = make_source("text")
    shutil.copytree(source / "aclImdb", source / "copy")

    assert build(tmp_path / "out", "text", "--source", source) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert "has a review of train twice" in line


def test_missing_source_is_one_line(tmp_path, capsys):
    assert build(tmp_path / "out", "pathfinder", "--source", tmp_path / "none") == 1

    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("text", "--length", "0"), "--length must be at least 1, got 0"),
        (("listops", "--rows", "0"), "--rows must be at least 50, got 0"),
        (("image", "--rows", "9"), "--rows does not apply to image"),
        (("listops", "--rows", "90", "--source", "x"), "--rows does not apply to listops with --source"),
        (("listops", "--length", "9"), "--length does not apply to listops"),
        (("text", "--reading", "skyformer"), "--reading does not apply to text"),
        (("pathfinder", "--rows", "20"), "--rows does not apply to pathfinder"),
        (("pathfinder",), "pathfinder needs --source: lra_release.gz"),
        (("retrieval",), "retrieval needs --source: lra_release.gz"),
    ],
)
def test_invalid_options_are_rejected(options, message, tmp_path, capsys):
    assert build(tmp_path / "out", *options) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()
