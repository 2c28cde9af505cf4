"""The Long Range Arena's data: contents as fairseq loads them, sources in every form, stand-ins, bad input."""

import io
import json
import re
import zipfile

import numpy as np
import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from PIL import Image

from data_prep import lra, lra_sources
from data_prep.lra_tasks import LRA_TASKS
from lln_fairseq.data.files import sha256_of
from lln_fairseq.data.reporting import DataError
from tests.data_prep.conftest import tar_gz, tree
from tests.data_prep.test_newsgroups import TEST, TRAIN, wheel  # noqa: F401  a fixture


def build(out, task, *options):
    return lra.main([task, "--out", str(out), "--workers", "1", *map(str, options)])


def rows_of(folder, split, inputs=1):
    """(label, symbols, ...) of every row, as fairseq reads them."""
    labels = [line.split()[0] for line in (folder / "label/dict.txt").read_text().splitlines()]
    labels = [label for label in labels if not label.startswith("madeup")]
    config = SentencePredictionConfig(data=str(folder), num_classes=len(labels), no_shuffle=True, seed=1)
    config.regression_target, config.separator_token = False, 2
    dataset = SentencePredictionTask.setup_task(config).load_dataset(split)
    found = []
    for i in range(len(dataset)):
        ids = dataset[i]["net_input.src_tokens"].tolist()
        parts = " ".join(map(str, ids[:-1])).split(" 2 2 ") if inputs == 2 else [" ".join(map(str, ids[:-1]))]
        assert ids[-1] == 2
        symbols = [bytes(int(word) - 4 for word in part.split()) for part in parts]
        found.append((labels[int(dataset[i]["target"])], *symbols))
    return found


def png(pixels, side=32):
    """A grey picture."""
    buffer = io.BytesIO()
    Image.frombytes("L", (len(pixels) // side, side), pixels).save(buffer, "PNG")
    return buffer.getvalue()


def pixels(number):
    return bytes((number * 31 + i * i) % 256 for i in range(1024))


def cifar(numbers):
    return b"".join(bytes([n % 10]) + pixels(n) + pixels(n + 1) + pixels(n + 2) for n in numbers)


PICTURES = 20
FOLDER = "lra_release/lra_release/pathfinder32/curv_contour_length_14"
METADATA = "".join(f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n" for i in range(PICTURES))
SOURCES = {
    "listops": {
        f"lra_release/lra_release/listops-1000/basic_{name}.tsv": (
            "Source\tTarget\n" + f"( ( ( ( [MAX 1 ) {n} ) 2 ) ] )\t{max(n, 2)}\n" * 3
        ).encode()
        for n, name in ((7, "train"), (8, "val"), (1, "test"))
    },
    "text": {
        f"aclImdb/{split}/{label}/{n}_{n}.txt": f"{split} {label} {n} é".encode()
        for split in ("train", "test")
        for label in ("neg", "pos")
        for n in (1, 2)
    }
    | {"aclImdb/train/unsup/1_0.txt": b"unlabelled", "aclImdb/README": b"read me"},
    "retrieval": {
        f"lra_release/tsv_data/new_aan_pairs.{name}.tsv": f"1.0\t1\t2\t{name} a\tb\n0.0\t3\t4\tc\td\n".encode()
        for name in ("train", "eval", "test")
    },
    "pathfinder": {f"{FOLDER}/metadata/0.npy": METADATA.encode()}
    | {f"{FOLDER}/imgs/0/sample_{i}.png": png(pixels(i)) for i in range(PICTURES - 1)}
    | {f"{FOLDER}/imgs/0/sample_{PICTURES - 1}.png": b""}
    | {"lra_release/lra_release/pathfinder64/curv_contour_length_14/imgs/0/sample_0.png": b"another size"},
    "image": {f"cifar-10-batches-bin/data_batch_{i}.bin": cifar(range(10 * i, 10 * i + 10)) for i in range(1, 6)}
    | {"cifar-10-batches-bin/test_batch.bin": cifar(range(4))},
}


@pytest.fixture
def given(tmp_path):
    """given(task, form, changes) -> a source with these files in them: a directory, a tar.gz or a zip."""

    def make(task, form="directory", **changes):
        files = {**SOURCES[task]}
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
        path = tmp_path / {"tar": "given.gz", "zip": "given.zip"}[form]
        if form == "tar":
            path.write_bytes(tar_gz(dict(reversed(files.items()))))
        else:
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in files.items():
                    archive.writestr(name, content)
        return path

    return make


@pytest.mark.parametrize("task", SOURCES)
def test_an_archive_and_a_directory_give_the_same_data(task, given, tmp_path):
    results = []
    for form in ("directory", "tar", "zip"):
        assert build(tmp_path / form, task, "--source", given(task, form)) == 0
        found = tree(tmp_path / form / task)
        del found["manifest.json"]
        results.append(found)
    assert results[0] == results[1] == results[2]


def test_listops_of_the_release(given, tmp_path):
    assert build(tmp_path, "listops", "--source", given("listops")) == 0
    (label, symbols), *_ = rows_of(tmp_path / "listops", "train")
    assert (label, [lra.listops.SYMBOLS[s] for s in symbols]) == ("7", ["[MAX", "1", "7", "2", "]"])
    assert build(tmp_path, "listops", "--reading", "skyformer", "--source", given("listops")) == 0
    (label, symbols), *_ = rows_of(tmp_path / "listops-skyformer", "test")
    assert (label, [lra.listops.READINGS["skyformer"][s] for s in symbols]) == ("2", ["MAX", "1", "1", "2"])


def test_reviews_are_cut_and_test_is_valid_too(given, tmp_path):
    assert build(tmp_path, "text", "--source", given("text"), "--length", "11") == 0
    assert rows_of(tmp_path / "text", "train") == [
        ("neg", b"train neg 1"), ("neg", b"train neg 2"), ("pos", b"train pos 1"), ("pos", b"train pos 2")]  # fmt: skip
    test = rows_of(tmp_path / "text", "test")
    assert test == rows_of(tmp_path / "text", "valid")
    assert test[0] == ("neg", "test neg 1 é".encode()[:11])


def test_pairs_of_papers(given, tmp_path):
    assert build(tmp_path, "retrieval", "--source", given("retrieval")) == 0
    assert rows_of(tmp_path / "retrieval", "valid", inputs=2) == [("1", b"eval a", b"b"), ("0", b"c", b"d")]


def test_pictures_of_the_release(given, tmp_path):
    assert build(tmp_path, "pathfinder", "--source", given("pathfinder")) == 0
    folder = tmp_path / "pathfinder"
    found = [row for split in ("train", "valid", "test") for row in rows_of(folder, split)]
    assert sorted(found) == sorted((str(i % 2), pixels(i)) for i in range(PICTURES - 1))
    counts = json.loads((folder / "manifest.json").read_text())["counts"]
    assert [counts[split]["rows"] for split in counts] == [15, 2, 2]
    assert counts["train"]["empty"] == 1


def test_cifar_in_grey(given, tmp_path):
    assert build(tmp_path, "image", "--source", given("image")) == 0
    folder = tmp_path / "image"
    found = [rows_of(folder, split) for split in ("train", "valid", "test")]
    assert list(map(len, found)) == [45, 5, 4]
    labels = LRA_TASKS["image"].labels
    assert [row[0] for row in found[0][:3]] == list(labels[:3])
    red, green, blue = (np.frombuffer(pixels(10 + i), np.uint8).astype(float) for i in range(3))
    wanted = 0.2989 * red + 0.587 * green + 0.114 * blue
    assert np.abs(np.frombuffer(found[0][0][1], np.uint8) - wanted).max() <= 1


def test_the_published_archive_is_the_one_with_that_checksum(given, tmp_path, capsys):
    wrong = given("image", "tar").rename(tmp_path / "cifar-10-binary.tar.gz")
    assert build(tmp_path / "out", "image", "--source", wrong) == 1
    assert "is not cifar-10-binary.tar.gz: it has" in capsys.readouterr().err


def test_manifest_has_the_checksum_of_the_source(given, tmp_path, capsys):
    release = given("listops", "tar")
    assert build(tmp_path, "listops", "--source", release) == 0
    recorded = json.loads((tmp_path / "listops/manifest.json").read_text())["settings"]["source"]
    assert recorded == {"given.gz": sha256_of(release)}
    release.write_bytes(tar_gz({**SOURCES["listops"], "more": b""}))
    assert build(tmp_path, "listops", "--source", release) == 1
    assert "was built with source" in capsys.readouterr().err


def test_drawn_rows(tmp_path, capsys):
    assert build(tmp_path, "listops", "--rows", "50") == 0
    found = [row for split in ("train", "valid", "test") for row in rows_of(tmp_path / "listops", split)]
    assert len(found) == 50
    assert all(str(lra.listops.evaluate(symbols)) == label for label, symbols in found)
    assert build(tmp_path, "listops", "--rows", "50") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert build(tmp_path, "listops", "--rows", "50", "--seed", "2") == 1
    assert "was built with seed = 1, not 2" in capsys.readouterr().err
    assert build(tmp_path, "pathfinder", "--rows", "10") == 0
    assert len(rows_of(tmp_path / "pathfinder", "train")) == 8


def test_posts_stand_in_for_reviews_and_papers(wheel, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(lra, "obtain", lambda file: wheel)
    assert build(tmp_path, "text", "--stand-in", "--length", "12") == 0
    assert "a stand-in: 20 newsgroups as bytes" in capsys.readouterr().out
    folder = tmp_path / "text-stand-in"
    assert rows_of(folder, "test") == [(label, text.encode()[:12]) for label, text in TEST]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["data"] == "stand-in"
    assert not (tmp_path / "text").exists()
    assert build(tmp_path, "retrieval", "--stand-in") == 0
    group = {text.encode(): label for label, text in (*TRAIN, *TEST)}
    pairs = rows_of(tmp_path / "retrieval-stand-in", "train", inputs=2)
    assert [label for label, *_ in pairs[:3]] == ["0", "1", "0"]
    assert all((group[a] == group[b]) == (label == "1") for label, a, b in pairs)


def test_digits_stand_in_for_pictures(tmp_path):
    assert build(tmp_path, "image", "--stand-in") == 0
    found = rows_of(tmp_path / "image-stand-in", "train")
    assert len(found) == 1437
    picture = np.frombuffer(found[0][1], np.uint8).reshape(32, 32)
    assert (picture[::4, ::4].repeat(4, 0).repeat(4, 1) == picture).all()
    assert picture.max() == 255


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GIF89a" + png(pixels(1)), "is not a readable PNG picture"),
        (png(pixels(1))[:60], "is not a readable PNG picture"),
        (png(bytes(512)), "(16, 32) pixels"),
    ],
)
def test_read_png_refuses_other_pictures(content, message):
    with pytest.raises(DataError, match=re.escape(message)):
        lra_sources.read_png(content, "it")


def listops(line):
    return b"Source\tTarget\n" + line.encode() + b"\n"


BAD_FILES = [
    ("listops", {"train_tsv": listops("( [MAX 1 2 ] )\t1")}, "line 2: the target is '1', expected 2"),
    (
        "listops",
        {"train_tsv": listops("( [MAX 1 2 ] )\t02")},
        "train.tsv, line 2: the target is '02', expected",
    ),
    ("listops", {"train_tsv": listops("( [MAX 1 2 )\t1")}, "line 2: not a row of ListOps"),
    ("listops", {"train_tsv": listops("( [AVG 1 2 ] )\t1")}, "line 2: not a row of ListOps"),
    ("listops", {"train_tsv": listops("")}, "line 2: not a row of ListOps"),
    ("listops", {"train_tsv": b"\xff\xfe\0"}, "line 1: not a row of ListOps"),
    ("listops", {"test_tsv": None}, "has no rows of listops's test"),
    ("text", {"train/neg": b""}, "1_1.txt is empty"),
    ("retrieval", {"train_tsv": b"1.0\t1\t2\ta\n"}, "line 1: expected a label, two numbers and two texts"),
    ("retrieval", {"train_tsv": b"2.0\t1\t2\ta\tb\n"}, "line 1: expected a label"),
    ("retrieval", {"train_tsv": b"1.0\t1\t2\ta\t\n"}, "line 1: expected a label"),
    ("pathfinder", {"0_npy": b"\x93NUMPY\1\0"}, "line 1: expected a folder, a file, a number and a label"),
    ("pathfinder", {"sample_3_png": png(bytes(64 * 64), side=64)}, "(64, 64) pixels"),
    ("pathfinder", {"sample_3_png": None}, "has no imgs/0/sample_3.png, which its metadata lists"),
    ("image", {"test_batch": b"\x0b" + bytes(3072)}, "does not hold pictures of 32 x 32"),
    ("image", {"test_batch": bytes(3072)}, "does not hold pictures of 32 x 32"),
    ("image", {"test_batch": b""}, "does not hold pictures of 32 x 32"),
]


@pytest.mark.parametrize(("task", "changes", "message"), BAD_FILES)
def test_bad_files_end_in_one_line(task, changes, message, given, tmp_path, capsys):
    assert build(tmp_path / "out", task, "--source", given(task, **changes)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "out").exists()


def test_damaged_and_wrong_archives_end_in_one_line(given, tmp_path, capsys):
    whole = given("pathfinder", "tar")
    content = whole.read_bytes()
    for name, data, message in (
        ("cut.gz", content[:-300], "cannot be read, it is damaged or incomplete"),
        ("flipped.gz", content[:200] + bytes(50) + content[250:], "is not a readable archive"),
        ("empty.gz", b"", "is not a readable archive"),
        ("other.gz", tar_gz({"listops/README": b""}), "has no rows of pathfinder's train, valid, test"),
        ("text.tar.gz", b"not an archive", "is not a readable archive"),
    ):
        (tmp_path / name).write_bytes(data)
        assert build(tmp_path / "out", "pathfinder", "--source", tmp_path / name) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line, line
        assert not (tmp_path / "out").exists()
    assert build(tmp_path / "out", "pathfinder", "--source", tmp_path / "none") == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("text", "--stand-in", "--length", "0"), "--length is 0, and must be at least 1"),
        (("listops", "--rows", "0"), "--rows is 0, and must be at least 50"),
        (("listops", "--stand-in"), "has no stand-in: it is drawn"),
        (("image", "--rows", "9"), "--rows is not for image"),
        (("listops", "--length", "9"), "--length is not for listops"),
        (("text", "--reading", "skyformer"), "--reading is not for text"),
        (("image", "--stand-in", "--source", "x"), "--source is not for image-stand-in"),
        (("retrieval",), "retrieval needs --source: lra_release.gz"),
    ],
)
def test_options_that_cannot_be_meant(options, message, tmp_path, capsys):
    assert build(tmp_path / "out", *options) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()
