"""Test the rows of long pairs from small files in GLUE's layout, and the commands of their teachers."""

import shlex

import pytest

from data_prep import tsv
from lln_fairseq.text.row_labels import ClassLabels
from lln_fairseq.text.rows import Columns, TextRows
from scripts import long_pairs
from scripts.long_pairs import Task
from scripts.train_tasks import compose_config

LABELS = ["entailment", "not_entailment"]


def make_rows(name, count):
    """Return rows (question, sentence, label); two rows each share a question."""
    return [(f"question {name} {i // 2}", f"sentence {name} {i}", LABELS[i * i % 3 % 2]) for i in range(count)]


TRAIN = make_rows("train", 20)
DEV = make_rows("dev", 8)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that writes qnli3 in small size and returns the exit code."""
    tasks = {
        "qnli": Task("QNLI", sentences=1, train=6, test=5),
        "qnli3": Task("QNLI", sentences=3, train=10, test=8, start="qnli"),
    }
    monkeypatch.setattr(long_pairs, "TASKS", tasks)
    source = tmp_path / "source" / "QNLI"
    source.mkdir(parents=True)
    for name, rows in (("train", TRAIN), ("dev", DEV)):
        lines = ["index\tquestion\tsentence\tlabel"]
        lines += [f"{i}\t{question}\t{sentence}\t{label}" for i, (question, sentence, label) in enumerate(rows)]
        (source / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return lambda: long_pairs.main(["qnli3", "--source", str(source.parent), "--out", str(tmp_path / "out")])


def read_tsv(directory):
    """Return the rows (question, text, label) of every split as data_prep.tsv reads them."""
    files = {split: directory / f"{split}.tsv" for split in ("train", "valid", "test")}
    columns = Columns(("question", "sentence"), "label")
    splits = tsv.read_splits(files, columns, ClassLabels([], "", {}))
    return {split: list(zip(*rows.inputs, rows.labels, strict=True)) for split, rows in splits.items()}


def test_test_rows_are_the_end_of_the_training_file(run, tmp_path):
    assert run() == 0

    assert read_tsv(tmp_path / "out" / "qnli") == {"train": TRAIN[:6], "valid": DEV, "test": TRAIN[-5:]}


def test_distractors_are_sentences_of_other_questions_of_the_same_split(run, tmp_path):
    assert run() == 0

    splits = read_tsv(tmp_path / "out" / "qnli3")
    places = []
    for split, originals in {"train": TRAIN[:10], "valid": DEV, "test": TRAIN[-8:]}.items():
        questions = {sentence: question for question, sentence, _ in originals}
        for (question, text, label), original in zip(splits[split], originals, strict=True):
            assert (question, label) == (original[0], original[2])
            sentences = ["sentence" + part.rstrip() for part in text.split("sentence")[1:]]
            assert len(set(sentences)) == 3
            assert [questions[sentence] == question for sentence in sentences].count(True) == 1
            places.append(sentences.index(original[1]))
    assert set(places) == {0, 1, 2}


def test_commands_train_each_teacher_from_the_one_before(run, tmp_path, capsys, monkeypatch):
    parsed = []
    monkeypatch.setattr(tsv, "run_command", lambda build: parsed.append(build.keywords) or 0)
    run()

    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]

    starts = []
    for words in lines[2:]:
        if words[2] == "data_prep.tsv":
            tsv.main(words[3:])
        else:
            config = compose_config("finetune", words[6:])
            starts.append(config.checkpoint.finetune_from_model)
            assert config.task.data == str(parsed[-1]["out"])
    out = tmp_path / "out"
    assert starts == [str(out / "encoder" / "model.pt"), str(out / "qnli" / "teacher" / "checkpoint_last.pt")]
    assert parsed[1]["files"] == {split: out / "qnli3" / f"{split}.tsv" for split in ("train", "valid", "test")}


def test_both_texts_of_qqp_are_hidden_among_different_rows():
    firsts = [f"first {i}?" for i in range(30)]
    seconds = [f"second {i}?" for i in range(30)]
    rows = TextRows((firsts, seconds), [str(i % 2) for i in range(30)])

    hidden = long_pairs.add_distractors(rows, 4, seed=3, hidden=long_pairs.HIDDEN["QQP"])

    assert hidden.labels == rows.labels
    for row, texts in enumerate(zip(*hidden.inputs, strict=True)):
        sources = [[int(word.strip("?")) for word in text.split()[1::2]] for text in texts]
        assert [len(set(numbers)) for numbers in sources] == [4, 4]
        assert set(sources[0]) & set(sources[1]) == {row}


def test_only_texts_quoted_as_in_csv_lose_their_quotes():
    texts = ['"What does ""otoke"" mean?"', '"a quotation"', 'say "so"']

    assert long_pairs.unquote(TextRows((texts,), ["0"] * 3)).inputs == (
        ['What does "otoke" mean?', '"a quotation"', 'say "so"'],
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("QNLI", sentences=3, train=18, test=5), "has 20 rows for training: 23 are needed"),
        (Task("QNLI", sentences=9, train=6, test=5), "cannot be hidden among 9: a split has only 6 rows"),
    ],
)
def test_too_few_rows_end_in_one_line(task, message, run, monkeypatch, capsys):
    monkeypatch.setitem(long_pairs.TASKS, "qnli3", task)

    assert run() == 1

    assert message in capsys.readouterr().err
