"""Test your own TSV files: texts, labels and classes of the result, and the rows and settings that are errors."""

import json
import re

import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import tsv
from data_prep.glue import main as glue_main
from lln_fairseq import load
from lln_fairseq.inference.evaluate import main as main_evaluate
from lln_fairseq.text.labels import label_dictionary
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import files_without_manifest, read_files, text_of
from tests.data_prep.test_glue import make_file, make_rows
from tests.fairseq_runs import SCORED_CLASSIFICATION, train

TRAIN = [('a "fine" film', "very good"), ('"no', "bad"), ('"so"', "n/a"), ("dull: it's", "bad"), ("", "very good")]
VALID = [("nice ", " bad"), ("\u2028 story", "n/a")]


@pytest.fixture
def build(tmp_path, gpt2, capfd):
    """A function that runs the program in tmp_path and returns its exit code, stdout and lines of stderr."""

    def call(*arguments, out="out"):
        program = ["--tokenizer", gpt2, "--out", tmp_path / out, "--workers", 1, *arguments]
        code = tsv.main([str(argument) for argument in program])
        stdout, stderr = capfd.readouterr()
        return code, stdout, stderr.splitlines()

    return call


@pytest.fixture
def write(tmp_path):
    """A function that writes rows with a header line, or lines, to a file and returns its path."""

    def call(name, rows, header=("text", "label"), end="\n"):
        lines = ["\t".join(row) for row in ([header] if header else []) + list(rows)]
        path = tmp_path / name
        path.write_bytes("".join(line + end for line in lines).encode())
        return path

    return call


def load_samples(out, gpt2, split, classes, inputs=1):
    """Return the texts and the target of each row of a split, as fairseq's own task reads them."""
    config = SentencePredictionConfig(data=str(out), num_classes=max(classes, 1), no_shuffle=True, seed=1)
    config.regression_target = classes == 0
    dataset = SentencePredictionTask.setup_task(config).load_dataset(split)
    vocabulary = load_vocabulary(str(gpt2))
    samples = []
    for sample in dataset:
        ids = sample["net_input.src_tokens"]
        texts = []
        for _ in range(inputs):
            length = int((ids == 2).nonzero()[0]) + 1
            texts.append(text_of(vocabulary, ids[:length]))
            ids = ids[length:]
        samples.append((*texts, sample.get("target")))
    return samples


@pytest.mark.parametrize(
    ("header", "end", "columns"),
    [
        (("text", "label"), "\n", ()),
        (("review", "stars"), "\r\n", ("--text", "review", "--label", "stars")),
        (("\ufefftext", "text"), "\n", ("--text", 1, "--label", 2)),
        (None, "\n", ("--no-header", "--text", 1, "--label", 2)),
    ],
)
def test_fairseq_reads_texts_and_labels(tmp_path, build, write, gpt2, header, end, columns):
    train = write("train.tsv", TRAIN, header, end)
    valid = write("valid.tsv", VALID, header, end)

    code, stdout, _ = build("--train", train, "--valid", valid, *columns)

    assert code == 0
    assert "train: 5 rows, 2 bad, 1 n/a, 2 very good" in stdout
    assert "1 rows with an empty input" in stdout
    assert "3 classes (task.num_classes): bad, n/a, very good" in stdout
    classes = ["bad", "n/a", "very good"]
    for split, rows in (("train", TRAIN), ("valid", VALID)):
        expected = [(text.strip(), classes.index(label.strip())) for text, label in rows]
        assert load_samples(tmp_path / "out", gpt2, split, 3) == expected


def test_pairs_have_two_inputs_and_test_may_lack_labels(tmp_path, build, write, gpt2):
    rows = [("first", "x", "second"), ("third", "y", "fourth")]
    train = write("train.tsv", rows, ("b", "label", "a"))
    test = write("test.tsv", [("7", "fifth", "sixth")], ("id", "a", "b"))

    code, stdout, _ = build("--train", train, "--valid", train, "--test", test, "--text", "a", "b")

    assert code == 0
    assert "test.tsv: no column 'label' among id, a, b: these rows have no labels\n" in stdout
    assert load_samples(tmp_path / "out", gpt2, "train", 2, inputs=2) == [
        ("second", "first", 0),
        ("fourth", "third", 1),
    ]
    assert load_samples(tmp_path / "out", gpt2, "test", 2, inputs=2) == [("fifth", "sixth", None)]


def test_regression_writes_one_number_per_line(tmp_path, build, write, gpt2):
    train = write("train.tsv", [("a film", "-0.5"), ("a story", "1e2")])

    code, stdout, _ = build("--train", train, "--valid", train, "--regression")

    assert code == 0
    assert "classes" not in stdout
    assert (tmp_path / "out/label/train.label").read_text() == "-0.5\n1e2\n"
    targets = [target for _, target in load_samples(tmp_path / "out", gpt2, "train", 0)]
    assert targets == [[-0.5], [100]]


def test_same_rows_give_same_files_as_glue(tmp_path, build, gpt2):
    for split, file in (("train", "train"), ("valid", "dev"), ("test", "test")):
        (tmp_path / "RTE").mkdir(exist_ok=True)
        (tmp_path / f"RTE/{file}.tsv").write_bytes(make_file("RTE", split, make_rows("RTE", split, 8)))
    glue = ["--tasks", "RTE", "--source", tmp_path, "--tokenizer", gpt2, "--out", tmp_path / "glue", "--workers", 1]
    assert glue_main([str(argument) for argument in glue]) == 0
    files = {"train": "train", "valid": "dev", "test": "test"}
    options = [word for split, file in files.items() for word in (f"--{split}", tmp_path / f"RTE/{file}.tsv")]

    code, _, _ = build(*options, "--text", "sentence1", "sentence2")

    assert code == 0
    assert files_without_manifest(tmp_path / "out") == files_without_manifest(tmp_path / "glue/RTE")


def test_csv_and_json_lines_give_the_same_files_as_tsv(tmp_path, build, write):
    rows = [("a, film", "1"), ("the story", "0")]
    objects = [json.dumps({"label": int(label), "text": text}) for text, label in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(objects))
    (tmp_path / "rows.csv").write_text('text,label\n"a, film",1\nthe story,0\n')

    for path in (write("rows.tsv", rows), tmp_path / "rows.csv", tmp_path / "rows.jsonl"):
        assert build("--train", path, "--valid", path, out=path.suffix)[0] == 0

    expected = files_without_manifest(tmp_path / ".tsv")
    assert files_without_manifest(tmp_path / ".csv") == expected
    assert files_without_manifest(tmp_path / ".jsonl") == expected


def test_numbers_are_sorted_as_numbers(build, write):
    train = write("train.tsv", [("a", label) for label in ("10", "-1", "2", "0")])

    _, stdout, _ = build("--train", train, "--valid", train)

    assert "4 classes (task.num_classes): -1, 0, 2, 10" in stdout


@pytest.fixture
def classifier(tmp_path):
    """Return the checkpoint of a classifier of the labels POSITIVE, NEGATIVE and "so so"."""
    (tmp_path / "run/tokenizer/label").mkdir(parents=True)
    names = label_dictionary(["POSITIVE", "NEGATIVE", "so so"], {})
    (tmp_path / "run/tokenizer/label/dict.txt").write_text(names)
    (tmp_path / "run/checkpoint_best.pt").touch()
    return tmp_path / "run/checkpoint_best.pt"


def test_classes_of_a_classifier_keep_their_order(tmp_path, build, write, gpt2, classifier):
    test = write("test.tsv", [("a", "0"), ("b", "1"), ("c", "so so")])

    code, stdout, _ = build(
        "--test", test, "--labels", classifier, "--rename", 0, "NEGATIVE", "--rename", 1, "POSITIVE"
    )

    assert code == 0
    assert "3 classes (task.num_classes): POSITIVE, NEGATIVE, so so" in stdout
    assert load_samples(tmp_path / "out", gpt2, "test", 3) == [("a", 1), ("b", 0), ("c", 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"test.tsv, line 2: the label must be one of the labels of .*best.pt \(POSITIVE, .*, so so\), got '0'"),
        (("--rename", "NEGATIVE", "0"), "--rename NEGATIVE 0: '0' is not one of the labels of .*best.pt"),
        (("--rename", "0", "so so", "--rename", "1", "so so"), "--rename 1: no row has the label '1'"),
    ],
)
def test_unknown_labels_are_one_line(build, write, classifier, options, message):
    test = write("test.tsv", [("a", "0"), ("b", "POSITIVE")])

    code, _, stderr = build("--test", test, "--labels", classifier, *options)

    assert code == 1
    assert_one_line(stderr, message)


def assert_one_line(stderr, message):
    """Assert that the last line of stderr is an error that contains the message, a regular expression."""
    assert re.search(message, stderr[-1]), stderr
    assert stderr[-1].startswith("error: ")
    assert sum(line.startswith("error: ") for line in stderr) == 1


ROWS = b"text\tlabel\na film\tgood\na story\tbad\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (ROWS + b"a scene\n", (), r"line 4: expected 2 columns, got 1"),
        (ROWS + b"a\tscene\tbad\n", (), r"line 4: expected 2 columns, got 3"),
        (ROWS + b"\na scene\tbad\n", (), r"line 4: expected 2 columns, got 1"),
        (ROWS + b"a scene\t \n", (), r"line 4: the label is empty"),
        (ROWS + b"caf\xe9\tbad\n", (), r"line 4: not UTF-8 \(invalid continuation byte at byte 3\)"),
        (ROWS.decode().encode("utf-16"), (), r"line 1: not UTF-8"),
        (ROWS + b'"a ""good"" scene"\tbad\n', (), r'line 4: "a ""good"" scene" is quoted as in CSV'),
        (ROWS + b'a scene\t"bad"\n', (), r'line 4: "bad" is quoted as in CSV'),
        (ROWS + b'"a\nscene"\tbad\n', (), r"line 4: expected 2 columns, got 1; a cell in CSV quotes"),
        (ROWS + b'"a\tscene"\tbad\n', (), r"line 4: expected 2 columns, got 3; a cell in CSV quotes"),
        (ROWS + b"a scene\tgood, bad\n", (), r"line 4: the row has 2 labels, 'good, bad', but multi-label"),
        (ROWS + b"a scene\tmadeupword\n", (), r"'madeupword': fairseq's dictionaries use this symbol"),
        (ROWS + b"a scene\tgood\n", ("--regression",), r"line 2: the label of a regression must be one finite number"),
        (b"text\tlabel\na film\t1\na\tnan\n", ("--regression",), r"line 3: .* must be one finite number, got 'nan'"),
        (ROWS.split(b"\n", 1)[1], (), r"line 1: no column 'text' among a film, good; .* give --no-header"),
        (b"a\tgood\nb\tbad\nc\tgood\n", ("--text", 1, "--label", 2), r"line 1 looks like a row .* add --no-header"),
        (b"a\t0.5\nb\t0.7\n", ("--regression", "--text", 1, "--label", 2), r"line 1 looks like a row"),
        (ROWS, ("--no-header",), r"line 1: no column 'text' .* columns are numbers from 1 to 2"),
        (ROWS, ("--text", "3"), r"line 1: no column '3' among text, label"),
        (ROWS, ("--text", "text,label"), r"no column 'text,label' .*; separate two columns by a space: text label"),
        (ROWS.replace(b"\t", b","), (), r"line 1 has no tab: the columns must be separated by tabs, got 'text,label'"),
        (ROWS.replace(b"\t", b";"), ("--no-header", "--text", 1, "--label", 2), r"has no tab: .* got 'text;label'"),
        (ROWS, ("--text", "label"), r"--text and --label must be different columns; if line 1 is a row, add --no-h"),
        (b'"text"\t"label"\n"a film"\tgood\n', ("--text", 1, "--label", 2), r'line 1: "text" is quoted as in CSV'),
        (b"text\ttext\tlabel\na\tb\tc\n", (), r"line 1: two columns are called 'text'"),
        (b"text\tlabel\na\tgood\nb\tgood\n", (), r"all rows have the same label, 'good'"),
        (b"text\tlabel\n", (), r"has no rows"),
        (b"", (), r"is empty"),
    ],
)
def test_unusable_file_is_one_line_and_writes_nothing(tmp_path, build, content, options, message):
    path = tmp_path / "train.tsv"
    path.write_bytes(content)

    code, _, stderr = build("--train", path, "--valid", path, *options)

    assert code == 1
    assert_one_line(stderr, message)
    assert not (tmp_path / "out").exists()


def test_header_with_the_number_that_was_given_is_reported(build, write):
    train = write("train.tsv", [("0", "b film"), ("1", "a story")], header=("1", "a film"))

    code, stdout, _ = build("--train", train, "--valid", train, "--text", "2", "--label", "1")

    assert code == 0
    assert "train.tsv: line 1 is the header, with a column '1'; if it is a row, add --no-header\n" in stdout


def test_label_that_only_valid_has_is_an_error(build, write):
    train = write("train.tsv", TRAIN)
    valid = write("valid.tsv", [*VALID, ("new", "great")])

    code, _, stderr = build("--train", train, "--valid", valid)

    assert code == 1
    assert_one_line(
        stderr, r"valid.tsv, line 4: the label must be one of the labels of .*train.tsv \(bad, n/a, very good\)"
    )


def test_test_file_whose_label_is_spelled_otherwise_is_an_error(build, write):
    rows = write("rows.tsv", TRAIN)
    test = write("test.tsv", TRAIN, ("text", "Label"))

    code, _, stderr = build("--train", rows, "--valid", rows, "--test", test)

    assert code == 1
    assert_one_line(stderr, "test.tsv, line 1: no column 'label' among text, Label")


def test_numbers_as_classes_are_reported(build, write):
    train = write("train.tsv", [("a", "0.5"), ("b", "2")])
    valid = write("valid.tsv", [("c", "1.5")])
    advice = "to predict the numbers themselves, give --regression"

    assert_one_line(build("--train", train, "--valid", valid)[2], rf"valid.tsv, line 2: .* got '1.5'; {advice}")
    assert f"2 classes (task.num_classes): 0.5, 2; {advice}\n" in build("--train", train, "--valid", train)[1]


def test_finished_directory_is_kept_and_changed_rows_are_an_error(tmp_path, build, write):
    train = write("train.tsv", TRAIN)
    valid = write("valid.tsv", VALID)
    assert build("--train", train, "--valid", valid)[0] == 0
    files = read_files(tmp_path / "out")

    assert "nothing to do" in build("--train", train, "--valid", valid)[1]
    write("train.tsv", TRAIN * 2)
    code, _, stderr = build("--train", train, "--valid", valid, "--test", valid)

    assert code == 1
    assert_one_line(stderr, r"was built with other files \(train, test\): choose another directory, or")
    assert read_files(tmp_path / "out") == files
    manifest = json.loads(files["manifest.json"])
    assert manifest["settings"]["labels"] == ["bad", "n/a", "very good"]
    assert manifest["counts"]["train"]["labels"] == {"bad": 2, "n/a": 1, "very good": 2}
    assert set(files) == {*manifest["files"], "manifest.json"}


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--valid", "x"),
        ("--train", "x"),
        ("--train", "x", "--valid", "x", "--text", "a", "b", "c"),
        ("--train", "x", "--valid", "x", "--regression", "--labels", "y"),
        ("--train", "x", "--valid", "x", "--rename", "1", "0", "--rename", "1", "2"),
    ],
)
def test_options_that_do_not_fit_are_errors(build, options):
    with pytest.raises(SystemExit):
        build(*options)


def test_model_of_own_rows_is_trained_scored_and_used(tmp_path, build, write, monkeypatch):
    labels = ("very good", "bad", "n/a")
    rows = [(f"film {number}", labels[number % 3]) for number in range(9)]
    path = write("rows.tsv", rows)
    assert build("--train", path, "--valid", path)[0] == 0

    run = tmp_path / "run"
    options = (*SCORED_CLASSIFICATION, "--num-classes", 3, "--max-update", 1)
    train(monkeypatch, tmp_path / "log", tmp_path / "out", run, *options)

    checkpoint = str(run / "checkpoint_last.pt")
    main_evaluate([checkpoint, "--predict", str(tmp_path / "predictions.tsv"), "--json", str(tmp_path / "scores.json")])
    predictions = load(checkpoint).predict([text for text, _ in rows])
    assert json.loads((tmp_path / "scores.json").read_text())["rows"] == 9
    lines = (tmp_path / "predictions.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in lines] == [prediction.label for prediction in predictions]
    assert {prediction.label for prediction in predictions} <= set(labels)
    # More rows for the same classifier, whose labels they need not all have.
    test = write("test.tsv", rows[:2])
    more = ("--test", test, "--labels", checkpoint, "--tokenizer", run / "tokenizer")
    assert build(*more, out="more")[0] == 0
    main_evaluate([checkpoint, str(tmp_path / "more"), "--split", "test"])
