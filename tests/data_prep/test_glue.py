"""Test GLUE with files in the published formats: contents, labels, fairseq's task, bad input."""

import re
import shutil

import numpy as np
import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import glue
from data_prep.glue_tasks import GLUE_TASKS
from lln_fairseq.errors import UserError
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import files_without_manifest, read_files, tar_gz, text_of

# Texts with characters that a CSV reader or str.splitlines would misinterpret.
TEXTS = ['A "quote that never ends, é', 'it\'s "fine"  \u2028 here \x85 too']
COLUMNS = {
    "MNLI": ["index", "genre", "sentence1", "sentence2", "label1", "gold_label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "SST-2": ["sentence", "label"],
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "CoLA": ["source", "label", "mark", "sentence"],
    "STS-B": ["index", "genre", "sentence1", "sentence2", "score"],
}
TEST_COLUMNS = {
    "QQP": ["id", "question1", "question2"],
    "SST-2": ["index", "sentence"],
    "CoLA": ["index", "sentence"],
}
COUNTS = {"train": 8, "valid": 5, "valid1": 4, "test": 3, "test1": 2}


def make_rows(name, split, count):
    """Return rows (texts, label). The labels are neither in the order of GLUE_TASKS nor in that of their frequency."""
    task = GLUE_TASKS[name]
    labels = list(reversed(task.labels)) or ["5.000", "0.0", "2.500"]
    rows = []
    for i in range(count):
        texts = tuple(f"{TEXTS[(i + j) % 2]} {split} {i}" for j in range(len(task.inputs)))
        rows.append((texts, labels[i * i % len(labels)]))
    return rows


def make_file(name, split, rows, end="\n"):
    """Return a file with these rows and the columns of the published file."""
    task = GLUE_TASKS[name]
    is_test = split.startswith("test")
    columns = COLUMNS[name]
    if is_test:
        columns = TEST_COLUMNS.get(name, columns)
        columns = [column for column in columns if column != task.label]
    lines = ["\t".join(columns)]
    if name == "CoLA" and not is_test:
        lines = []  # no header
    for i, (texts, label) in enumerate(rows):
        cells = dict(zip(task.inputs, texts, strict=True)) | {task.label: label}
        lines.append("\t".join(cells.get(column, str(i)) for column in columns))
    encoding = "utf-8-sig" if name == "MRPC" else "utf-8"
    return (end.join(lines) + end).encode(encoding)


ROWS = {
    name: {split: make_rows(name, split, COUNTS[split]) for split in task.files} for name, task in GLUE_TASKS.items()
}


def make_files(name, end="\n"):
    files = {}
    for split, file in GLUE_TASKS[name].files.items():
        files[f"{name}/{file}"] = make_file(name, split, ROWS[name][split], end)
    return files


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "glue_data"
    for name in GLUE_TASKS:
        for file, content in make_files(name).items():
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_bytes(content)
    return directory


@pytest.fixture
def build(tmp_path, gpt2, source):
    """A function that builds tasks, by default all of them from `source` into tmp_path / "out"."""

    def call(*tasks, out=tmp_path / "out", source=source, **options):
        return glue.build_glue_tasks(out, str(gpt2), tasks or list(GLUE_TASKS), source, workers=1, **options)

    return call


def load_task(out, name):
    """Return fairseq's task, which keeps the order of the files."""
    task = GLUE_TASKS[name]
    num_classes = len(task.labels) or 1
    config = SentencePredictionConfig(data=str(out / name), num_classes=num_classes, no_shuffle=True, seed=1)
    config.regression_target = not task.labels
    return SentencePredictionTask.setup_task(config)


def decode_inputs(vocabulary, tokens):
    """Return the text of each input of a sample; every input ends with </s>."""
    parts = np.split(tokens, np.flatnonzero(tokens == 2) + 1)[:-1]
    return tuple(text_of(vocabulary, part) for part in parts)


@pytest.mark.parametrize("name", list(GLUE_TASKS))
def test_fairseq_loads_texts_and_targets(tmp_path, build, gpt2, name):
    content = build(name)[name]

    task = GLUE_TASKS[name]
    fairseq_task = load_task(tmp_path / "out", name)
    vocabulary = load_vocabulary(str(gpt2))
    assert set(read_files(tmp_path / "out" / name)) == {*content["files"], "manifest.json"}
    for split, rows in ROWS[name].items():
        dataset = fairseq_task.load_dataset(split)
        assert len(dataset) == len(rows) == content["counts"][split]["rows"]
        samples = [dataset[i] for i in range(len(rows))]
        labels = [label for _, label in rows]
        for sample, (texts, _) in zip(samples, rows, strict=True):
            assert decode_inputs(vocabulary, sample["net_input.src_tokens"].numpy()) == texts
        targets = [sample.get("target") for sample in samples]
        if split.startswith("test"):
            assert targets == [None] * len(rows)
        elif task.labels:
            assert [task.labels[int(target)] for target in targets] == labels
        else:
            assert [float(target[0]) for target in targets] == pytest.approx([float(label) / 5 for label in labels])
    if task.labels:
        lines = (tmp_path / "out" / name / "label/dict.txt").read_text().split("\n")
        assert [line.split()[0] for line in lines[: len(task.labels)]] == list(task.labels)


def test_archive_with_crlf_gives_same_data(tmp_path, build):
    build("QNLI", "SST-2")
    archive = tmp_path / "all.tar.gz"
    archive.write_bytes(tar_gz(make_files("QNLI", end="\r\n") | make_files("SST-2", end="\r\n")))

    build("QNLI", "SST-2", out=tmp_path / "tar", source=archive)

    assert files_without_manifest(tmp_path / "tar/SST-2") == files_without_manifest(tmp_path / "out/SST-2")


def test_directory_of_single_task_gives_same_data(tmp_path, build):
    build("SST-2")

    build("SST-2", out=tmp_path / "one", source=tmp_path / "glue_data/SST-2")

    assert files_without_manifest(tmp_path / "one/SST-2") == files_without_manifest(tmp_path / "out/SST-2")


def test_files_of_other_tasks_are_not_used(tmp_path, build):
    archive = tmp_path / "all.tar.gz"
    archive.write_bytes(tar_gz(make_files("QNLI") | make_files("SST-2")))

    with pytest.raises(UserError, match=r"has no RTE/train\.tsv"):
        build("RTE", out=tmp_path / "none", source=archive)


def test_broken_rows_of_qqp_are_counted_and_left_out(build, source, capsys):
    path = source / "QQP/train.tsv"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], lines[3][:12], lines[3][12:], *lines[4:]]))

    content = build("QQP")["QQP"]

    assert content["counts"]["train"]["rows"] == 7
    assert content["counts"]["train"]["broken_lines"] == [4, 5]
    assert "LEFT OUT 2 broken rows, first at line 4, 5" in capsys.readouterr().out
    assert content["datasets"]["input1"]["train"]["samples"] == 7


def test_mrpc_in_format_of_microsoft(tmp_path, build):
    directory = tmp_path / "msr" / "MRPC"
    directory.mkdir(parents=True)
    rows = ROWS["MRPC"]["train"]
    (directory / "msr_paraphrase_train.txt").write_bytes(make_file("MRPC", "train", rows, end="\r\n"))
    (directory / "msr_paraphrase_test.txt").write_bytes(make_file("MRPC", "valid", ROWS["MRPC"]["test"], end="\r\n"))
    (directory / "mrpc_dev_ids.tsv").write_text("1\t1\n6\t6\n")  # the ids of row i are i, i

    counts = build("MRPC", source=directory.parent)["MRPC"]["counts"]

    assert {split: counts[split]["rows"] for split in counts} == {"train": 6, "valid": 2, "test": 3}
    dataset = load_task(tmp_path / "out", "MRPC").load_dataset("valid")
    assert [int(dataset[i]["target"]) for i in range(2)] == [int(rows[1][1]), int(rows[6][1])]


def test_empty_inputs_are_kept_and_counted(build, source):
    (source / "SST-2/dev.tsv").write_text("sentence\tlabel\n\t1\nnot empty\t0\n\n")

    assert build("SST-2")["SST-2"]["counts"]["valid"] == {
        "rows": 2,
        "broken": 0,
        "empty_inputs": 1,
        "labels": {"0": 1, "1": 1},
    }


def test_finished_data_are_kept(build, monkeypatch):
    manifests = build("RTE", "STS-B")
    monkeypatch.setattr(glue, "write_glue_task", None)  # would raise if it were called

    assert build("RTE", "STS-B") == manifests


def test_changed_dictionary_is_rejected(tmp_path, build, source, gpt2):
    build("RTE")
    other = shutil.copytree(gpt2, tmp_path / "other")
    lines = (gpt2 / "dict.txt").read_text().splitlines(keepends=True)
    (other / "dict.txt").write_text("".join([*lines[:-3], lines[-2], lines[-3], lines[-1]]))

    with pytest.raises(UserError, match=r"RTE was built with another tokenizer: .*--overwrite"):
        glue.build_glue_tasks(tmp_path / "out", str(other), ["RTE"], source)


SST_2_HEADER = b"sentence\tlabel\n"
STS_B_HEADER = b"sentence1\tsentence2\tscore\n"
BAD_INPUT = [
    ("SST-2/train.tsv", SST_2_HEADER + b"fine\t1\na\tb\tc\n", r"train\.tsv, line 3: expected 2 columns, got 3"),
    ("SST-2/train.tsv", SST_2_HEADER + b"\nfine\t1\n", r"train\.tsv, line 2: expected 2 columns, got 1"),
    ("SST-2/train.tsv", SST_2_HEADER + b"fine\t2\n", r"train\.tsv, line 2: the label must be one of 0, 1, got '2'"),
    ("SST-2/train.tsv", b"text\tlabel\nfine\t1\n", r"train\.tsv, line 1: no column 'sentence'"),
    ("SST-2/train.tsv", SST_2_HEADER + b"fine\t1\n\xe9\t1\n", r"train\.tsv, line 3: not UTF-8"),
    ("SST-2/train.tsv", SST_2_HEADER, r"train\.tsv has no rows"),
    ("SST-2/train.tsv", b"", r"train\.tsv is empty"),
    ("SST-2/dev.tsv", None, r"has no SST-2/dev\.tsv"),
    ("SST-2/test.tsv", b"index\tsentence\n1\n", r"test\.tsv, line 2: expected 2 columns, got 1"),
    ("CoLA/train.tsv", b"", r"train\.tsv has no rows"),
    ("STS-B/dev.tsv", STS_B_HEADER + b"a\tb\t5.1\n", r"dev\.tsv, line 2: the score must be in \[0, 5\], got 5\.1"),
    ("STS-B/dev.tsv", STS_B_HEADER + b"a\tb\tx\n", r"dev\.tsv, line 2: the score must be a number, got 'x'"),
]


@pytest.mark.parametrize(("file", "content", "message"), BAD_INPUT)
def test_bad_input_is_one_line_with_file_and_line(tmp_path, source, gpt2, capfd, file, content, message):
    (source / file).unlink()
    if content is not None:
        (source / file).write_bytes(content)
    task = file.partition("/")[0]
    arguments = ["--out", tmp_path / "out", "--source", source, "--tokenizer", gpt2, "--tasks", task]

    assert glue.main([str(argument) for argument in arguments]) == 1

    err = capfd.readouterr().err.splitlines()
    assert len(err) == 1
    assert re.search(message, err[0])
    assert not (tmp_path / "out").exists()
