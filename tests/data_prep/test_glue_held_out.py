"""Test GLUE tasks with a labeled test split and with distractors, from small files in GLUE's layout."""

import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import glue_held_out
from data_prep.glue_tasks import GlueRows
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import text_of

LABELS = ["entailment", "not_entailment"]


def make_rows(name, count):
    """Return rows (question, sentence, label); two rows each share a question."""
    return [(f"question {name} {i // 2}", f"sentence {name} {i}", LABELS[i * i % 3 % 2]) for i in range(count)]


TRAIN = make_rows("train", 20)
DEV = make_rows("dev", 8)


@pytest.fixture
def build(tmp_path, gpt2):
    source = tmp_path / "source" / "QNLI"
    source.mkdir(parents=True)
    for name, rows in (("train", TRAIN), ("dev", DEV)):
        lines = ["index\tquestion\tsentence\tlabel"]
        lines += [f"{i}\t{question}\t{sentence}\t{label}" for i, (question, sentence, label) in enumerate(rows)]
        (source / f"{name}.tsv").write_text("\n".join(lines) + "\n")

    def call(*options):
        arguments = ["QNLI", "--tokenizer", gpt2, "--out", tmp_path / "out", "--source", source.parent, "--workers", 1]
        return glue_held_out.main([str(argument) for argument in (*arguments, *options)])

    return call


def load_rows(directory, gpt2):
    """Return the rows (question, text, label) of every split as fairseq loads them."""
    config = SentencePredictionConfig(data=str(directory), num_classes=2, no_shuffle=True, seed=1)
    config.regression_target = False  # otherwise taken from the criterion
    config.init_token = 0
    config.separator_token = 2
    task = SentencePredictionTask.setup_task(config)
    vocabulary = load_vocabulary(str(gpt2))
    splits = {}
    for split in ("train", "valid", "test"):
        splits[split] = []
        for sample in task.load_dataset(split):
            tokens = sample["net_input.src_tokens"]
            separator = int((tokens == 2).nonzero()[0])
            question = text_of(vocabulary, tokens[1 : separator + 1])
            text = text_of(vocabulary, tokens[separator + 2 :])
            splits[split].append((question, text, LABELS[int(sample["target"])]))
    return splits


def test_test_split_is_the_end_of_the_training_file(tmp_path, build, gpt2):
    assert build("--train", 6, "--test", 5) == 0

    assert load_rows(tmp_path / "out", gpt2) == {"train": TRAIN[:6], "valid": DEV, "test": TRAIN[-5:]}


def test_distractors_are_sentences_of_other_questions_of_the_same_split(tmp_path, build, gpt2):
    assert build("--train", 10, "--test", 8, "--sentences", 3) == 0

    splits = load_rows(tmp_path / "out", gpt2)
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


def test_both_texts_of_qqp_are_hidden_among_different_rows():
    firsts = [f"first {i}?" for i in range(30)]
    seconds = [f"second {i}?" for i in range(30)]
    rows = GlueRows((firsts, seconds), [str(i % 2) for i in range(30)], empty=0)

    hidden = glue_held_out.add_distractors(rows, 4, seed=3, hidden=glue_held_out.HIDDEN["QQP"])

    assert hidden.labels == rows.labels
    for row, texts in enumerate(zip(*hidden.inputs, strict=True)):
        sources = [[int(word.strip("?")) for word in text.split()[1::2]] for text in texts]
        assert [len(set(numbers)) for numbers in sources] == [4, 4]
        assert set(sources[0]) & set(sources[1]) == {row}


def test_too_many_rows_are_rejected(build, capsys):
    assert build("--train", 18, "--test", 5) == 1

    assert "--train and --test must be at most 20 rows together, got 23" in capsys.readouterr().err


def test_too_many_sentences_are_rejected(build, capsys):
    assert build("--train", 6, "--test", 5, "--sentences", 9) == 1

    assert "--sentences is 9, but a split has only 6 rows" in capsys.readouterr().err
