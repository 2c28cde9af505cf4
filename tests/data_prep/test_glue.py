"""GLUE from files as they really are: contents, labels, fairseq's task, interruption, bad input."""

import re

import numpy as np
import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import glue
from data_prep.glue_tasks import GLUE_TASKS
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.vocabulary import load_vocabulary
from tests.data_prep.conftest import killed_everywhere, tar_gz, text_of, tree

A, B = 'A "quote that never ends, é', 'it\'s "fine"  \u2028 here \x85 too'


def rows_of(name, split, count):
    """Rows of a task as (inputs, label); labels come in an order that neither the table nor frequency has."""
    task = GLUE_TASKS[name]
    labels = list(task.labels)[::-1] or ["5.000", "0.0", "2.500"]
    texts = [tuple(f"{(A, B)[(i + j) % 2]} {split} {i}" for j in range(len(task.inputs))) for i in range(count)]
    return [(text, labels[i * i % len(labels)]) for i, text in enumerate(texts)]


def file_of(name, split, rows, end="\n"):
    """The file with these rows, with the columns that the real one has."""
    test = split.startswith("test")
    columns = {
        "MNLI": ["index", "genre", "sentence1", "sentence2", "label1", "gold_label"],
        "QNLI": ["index", "question", "sentence", "label"],
        "QQP": ["id", "question1", "question2"]
        if test
        else ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        "SST-2": ["index", "sentence"] if test else ["sentence", "label"],
        "RTE": ["index", "sentence1", "sentence2", "label"],
        "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        "CoLA": ["index", "sentence"] if test else ["source", "label", "mark", "sentence"],
        "STS-B": ["index", "genre", "sentence1", "sentence2", "score"],
    }[name]
    task = GLUE_TASKS[name]
    columns = [column for column in columns if not (test and column == task.label)]
    lines = [] if name == "CoLA" and not test else ["\t".join(columns)]
    for i, (texts, label) in enumerate(rows):
        cells = dict(zip(task.inputs, texts, strict=True)) | {task.label: label}
        lines.append("\t".join(cells.get(column, str(i)) for column in columns))
    return (end.join(lines) + end).encode("utf-8-sig" if name == "MRPC" else "utf-8")


COUNTS = {"train": 8, "valid": 5, "valid1": 4, "test": 3, "test1": 2}
ROWS = {name: {split: rows_of(name, split, COUNTS[split]) for split in task.files} for name, task in GLUE_TASKS.items()}


def files_of(name, end="\n"):
    return {f"{name}/{file}": file_of(name, s, ROWS[name][s], end) for s, file in GLUE_TASKS[name].files.items()}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "glue_data"
    for name in GLUE_TASKS:
        for file, content in files_of(name).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    return folder


@pytest.fixture
def build(tmp_path, gpt2, source):
    def call(*tasks, out=tmp_path / "out", source=source, **options):
        return glue.build_all(out, str(gpt2), tasks or list(GLUE_TASKS), source, workers=1, **options)

    return call


def load(out, name):
    """fairseq's task on the data, its samples in the order of the files."""
    task = GLUE_TASKS[name]
    config = SentencePredictionConfig(data=str(out / name), num_classes=task.num_classes, no_shuffle=True, seed=1)
    config.regression_target = not task.labels
    return SentencePredictionTask.setup_task(config)


@pytest.mark.parametrize("name", list(GLUE_TASKS))
def test_fairseq_loads_it_texts_decode_and_label_k_is_class_k(tmp_path, build, gpt2, name):
    content = build(name)[name]
    task, fairseq, vocabulary = GLUE_TASKS[name], load(tmp_path / "out", name), load_vocabulary(str(gpt2))
    assert set(tree(tmp_path / "out" / name)) == {*content["files"], "manifest.json"}
    for split, rows in ROWS[name].items():
        dataset = fairseq.load_dataset(split)
        assert len(dataset) == len(rows) == content["counts"][split]["rows"]
        targets = []
        for i, (texts, _) in enumerate(rows):
            sample = dataset[i]
            tokens = sample["net_input.src_tokens"].numpy()
            parts = np.split(tokens, np.flatnonzero(tokens == 2) + 1)[:-1]
            assert tuple(text_of(vocabulary, part) for part in parts) == texts
            targets.append(sample.get("target"))
        if split.startswith("test"):
            assert targets == [None] * len(rows)
        elif task.labels:
            assert [task.labels[int(target)] for target in targets] == [label for _, label in rows]
        else:
            assert [float(target[0]) for target in targets] == pytest.approx([float(label) / 5 for _, label in rows])
    if task.labels:
        names = (tmp_path / "out" / name / "label/dict.txt").read_text().split("\n")
        assert [line.split()[0] for line in names[: len(task.labels)]] == list(task.labels)


def test_archive_crlf_and_a_directory_of_one_task_give_the_same(tmp_path, build):
    build("QNLI", "SST-2")
    archive = tmp_path / "all.tar.gz"
    archive.write_bytes(tar_gz(files_of("QNLI", end="\r\n") | files_of("SST-2", end="\r\n")))
    build("QNLI", "SST-2", out=tmp_path / "tar", source=archive)
    build("SST-2", out=tmp_path / "one", source=tmp_path / "glue_data/SST-2")
    whole, *others = (
        {n: d for n, d in tree(tmp_path / o / "SST-2").items() if n != "manifest.json"} for o in ("out", "tar", "one")
    )
    assert others == [whole, whole]
    with pytest.raises(DataError, match=r"has no RTE/train\.tsv"):  # never another task's file
        build("RTE", out=tmp_path / "none", source=archive)


def test_broken_rows_of_qqp_are_counted_and_left_out(tmp_path, build, source, capsys):
    path = source / "QQP/train.tsv"
    lines = path.read_bytes().split(b"\n")
    first, second = lines[3].split(b"question", 1)[0][:12], lines[3][12:]
    path.write_bytes(b"\n".join([*lines[:3], first, second, *lines[4:]]))
    content = build("QQP")["QQP"]
    assert content["counts"]["train"]["rows"] == 7
    assert content["counts"]["train"]["broken_lines"] == [4, 5]
    assert "LEFT OUT 2 broken rows, first at line 4, 5" in capsys.readouterr().out
    assert content["datasets"]["input1"]["train"]["samples"] == 7


def test_mrpc_as_microsoft_publishes_it(tmp_path, build):
    folder = tmp_path / "msr" / "MRPC"
    folder.mkdir(parents=True)
    rows = ROWS["MRPC"]["train"]
    (folder / "msr_paraphrase_train.txt").write_bytes(file_of("MRPC", "train", rows, end="\r\n"))
    (folder / "msr_paraphrase_test.txt").write_bytes(file_of("MRPC", "valid", ROWS["MRPC"]["test"], end="\r\n"))
    (folder / "mrpc_dev_ids.tsv").write_text("1\t1\n6\t6\n")  # the ids of row i are i, i
    content = build("MRPC", source=folder.parent)["MRPC"]
    assert {split: counts["rows"] for split, counts in content["counts"].items()} == {"train": 6, "valid": 2, "test": 3}
    dataset = load(tmp_path / "out", "MRPC").load_dataset("valid")
    assert [int(dataset[i]["target"]) for i in range(2)] == [int(rows[1][1]), int(rows[6][1])]


def test_empty_inputs_are_kept_and_counted(build, source):
    (source / "SST-2/dev.tsv").write_text("sentence\tlabel\n\t1\nnot empty\t0\n\n")
    assert build("SST-2")["SST-2"]["counts"]["valid"] == {
        "rows": 2,
        "broken": 0,
        "empty_inputs": 1,
        "labels": {"0": 1, "1": 1},
    }


def test_settings(tmp_path, build, source, monkeypatch, gpt2):
    manifests = build("RTE", "STS-B")
    monkeypatch.setattr(glue, "write_result", None)  # would raise if used
    assert build("RTE", "STS-B") == manifests
    other = tmp_path / "other"
    other.mkdir()
    for file in gpt2.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    lines = (gpt2 / "dict.txt").read_text().splitlines(keepends=True)
    (other / "dict.txt").write_text("".join([*lines[:-3], lines[-2], lines[-3], lines[-1]]))
    with pytest.raises(DataError, match=r"RTE was built with tokenizer = .*--overwrite"):
        glue.build_all(tmp_path / "out", str(other), ["RTE"], source)


def test_killed_anywhere_and_run_again_gives_the_same_bytes(tmp_path, build):
    build("QNLI", "STS-B", out=tmp_path / "whole")
    killed_everywhere(lambda: build("QNLI", "STS-B"), tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


BAD_INPUT = [
    ("SST-2/train.tsv", b"sentence\tlabel\nfine\t1\none\ttwo\tthree\n", r"train\.tsv, line 3: 3 columns, expected 2"),
    ("SST-2/train.tsv", b"sentence\tlabel\n\nfine\t1\n", r"train\.tsv, line 2: 1 columns, expected 2"),
    ("SST-2/train.tsv", b"sentence\tlabel\nfine\t2\n", r"train\.tsv, line 2: the label '2' is none of 0, 1"),
    ("SST-2/train.tsv", b"text\tlabel\nfine\t1\n", r"train\.tsv, line 1: no column 'sentence'"),
    ("SST-2/train.tsv", b"sentence\tlabel\nfine\t1\n\xe9\t1\n", r"train\.tsv, line 3: not UTF-8"),
    ("SST-2/train.tsv", b"sentence\tlabel\n", r"train\.tsv has no rows"),
    ("SST-2/train.tsv", b"", r"train\.tsv is empty"),
    ("SST-2/dev.tsv", None, r"has no SST-2/dev\.tsv"),
    ("SST-2/test.tsv", b"index\tsentence\n1\n", r"test\.tsv, line 2: 1 columns, expected 2"),
    ("CoLA/train.tsv", b"", r"train\.tsv has no rows"),
    (
        "STS-B/dev.tsv",
        b"sentence1\tsentence2\tscore\na\tb\t5.1\n",
        r"dev\.tsv, line 2: the score 5\.1 is not in \[0, 5\]",
    ),
    ("STS-B/dev.tsv", b"sentence1\tsentence2\tscore\na\tb\tx\n", r"dev\.tsv, line 2: the score 'x' is not a number"),
]


@pytest.mark.parametrize(("file", "content", "message"), BAD_INPUT)
def test_bad_input_is_one_line_with_file_and_row(tmp_path, source, gpt2, capfd, file, content, message):
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


def test_tokenizer_has_no_default(capsys):
    with pytest.raises(SystemExit):
        glue.main(["--tasks", "RTE"])
    assert "--tokenizer" in capsys.readouterr().err
