"""Test the rows of TSV, CSV, JSON Lines and Parquet files, and the rows that are errors."""

import json
import math
import sys

import pytest

from lln_fairseq.errors import UserError
from lln_fairseq.text.row_labels import ClassLabels, check_number
from lln_fairseq.text.rows import Columns, read_file_rows

TEXTS = ["a, b", 'say "so"', "", "caf\u00e9 \u2028 end"]
LABELS = ["good", "bad", "good", "bad"]
CSV = 'id,review,stars\n1,"a, b",good\n2,"say ""so""",bad\n3,, good\n4,caf\u00e9 \u2028 end,bad\n'


def as_json(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_dicts():
    rows = zip(TEXTS, LABELS, strict=True)
    return [{"id": number, "review": text, "stars": label} for number, (text, label) in enumerate(rows, start=1)]


def keep_label(label, location):
    return label


@pytest.fixture
def read(tmp_path):
    """A function that writes a file and reads its rows."""

    def call(name, content, *columns, parse_label=keep_label, **options):
        path = tmp_path / name
        path.write_bytes(content.encode())
        return read_file_rows(path, Columns(*columns, **options), parse_label)

    return call


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.tsv", CSV.replace('"a, b"', "a; b").replace('"say ""so"""', 'say "so"').replace(",", "\t")),
        ("rows.txt", CSV.replace('"a, b"', "a; b").replace('"say ""so"""', 'say "so"').replace(",", "\t") + "\n\n"),
        ("rows.csv", CSV),
        ("ROWS.CSV", "\ufeff" + CSV.replace("\n", "\r\n") + "\r\n"),
        ("rows.jsonl", as_json(as_dicts())),
        ("rows.json", "\n".join(as_json(as_dicts()).splitlines()[:4]) + "\n\n"),
    ],
)
def test_formats_have_the_same_rows(read, name, content):
    rows = read(name, content, ["review"], "stars", group="id")

    assert [text.replace("a; b", "a, b") for text in rows.inputs[0]] == TEXTS
    assert (rows.labels, rows.groups, rows.empty, len(rows)) == (LABELS, ["1", "2", "3", "4"], 1, 4)


def test_parquet_has_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"stars": [1, 0], "review": ["a\nb", "c"], "score": [0.5, -1.0], "is": [True, False], "x.y": [["a"], []]}
    columns["some"] = [0.5, math.nan]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns), path)

    rows = read_file_rows(path, Columns(["review"], "stars", group="review"), keep_label)
    assert (rows.inputs, rows.labels, rows.groups) == ((["a b", "c"],), ["1", "0"], ["a b", "c"])
    assert read_file_rows(path, Columns(["review"], "score"), check_number).labels == ["0.5", "-1.0"]
    assert read_file_rows(path, Columns(["review"], "is"), keep_label).labels == ["true", "false"]
    with pytest.raises(UserError, match=r"rows.parquet, row 1: 'x.y' must be a text or a number, got \[\"a\"\]"):
        read_file_rows(path, Columns(["x.y"], None), keep_label)
    with pytest.raises(UserError, match=r"rows.parquet, row 2: 'some' must be a text or a number, got NaN"):
        read_file_rows(path, Columns(["review"], "some"), keep_label)
    with pytest.raises(UserError, match=r"rows.parquet: no column 'text' among stars, review, score, is, x.y, some$"):
        read_file_rows(path, Columns(["text"], None), keep_label)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"rows.parquet: "):
        read_file_rows(path, Columns(["review"], None), keep_label)


def test_parquet_without_pyarrow_is_one_line(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(UserError, match=r"rows.parquet: reading Parquet needs pyarrow: pip install pyarrow"):
        read("rows.parquet", "PAR1", ["text"], None)


def test_labels_and_groups_are_read_only_if_they_are_named(read):
    rows = read("rows.tsv", "query\tpassage\tlabel\nq\tp\t\n", ["query", "passage"], None, group="query")

    assert (rows.inputs, rows.labels, rows.groups) == ((["q"], ["p"]), None, ["q"])
    assert read("rows.csv", "text\na\nb\n", ["text"], None).groups is None


def test_line_breaks_in_cells_become_spaces_and_lines_are_counted(read):
    content = 'text,label\r\n"a\r\n\r\nb",1\r\n"c\nd",x\r\n'

    with pytest.raises(UserError, match=r"rows.csv, line 5: the label of a regression .* got 'x'"):
        read("rows.csv", content, ["text"], "label", parse_label=check_number)
    assert read("rows.csv", content, ["text"], "label").inputs == (["a b", "c d"],)
    assert read("rows.jsonl", '{"text": "a\\r\\n\\nb", "label": 1}', ["text"], "label").inputs == (["a b"],)
    assert read("rows.tsv", "text\tlabel\na\r\rb\t1\r\n", ["text"], "label").inputs == (["a b"],)


def test_long_cells_of_csv_are_read(read):
    assert read("rows.csv", "text,label\n" + 200_000 * "a" + ",1\n", ["text"], "label").labels == ["1"]


def test_values_of_json_keep_their_text(read):
    values = ["1", "0.50", "-1e3", '"so so"', "true", str(10**30), "12345678901234567890.123456789"]
    rows = "".join(f'{{"text": {number}, "label": {value}}}\n' for number, value in enumerate(values))

    labels = read("rows.jsonl", rows, ["text"], "label").labels

    assert labels == ["1", "0.50", "-1e3", "so so", "true", *values[5:]]


def test_files_without_header_have_numbers(read):
    rows = read("rows.csv", 'a,"x, y"\nb,z\n', ["2"], "1", False)

    assert (rows.inputs, rows.labels) == ((["x, y", "z"],), ["a", "b"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "text,label\na,b,c\n", "line 2: expected 2 columns, got 3$"),
        ("rows.csv", "text,label\na,b\n\nc,d\n", "line 3: expected 2 columns, got 1$"),
        (
            "rows.csv",
            'text,label\na,b\n"c,d\ne,f\n',
            "the row that starts in line 3 is not CSV: unexpected end of data",
        ),
        ("rows.csv", 'text,label\n"a"b,c\n', "the row that starts in line 2 is not CSV: ',' expected after"),
        ("rows.csv", "text,label\ra,b\r", "the row that starts in line 1 is not CSV: new-line character seen"),
        ("rows.csv", "text;label\na;b\n", "line 1 has no comma: the columns must be separated by commas, got 'text;"),
        ("rows.csv", "", "rows.csv is empty"),
        ("rows.csv", "text,label\n", "rows.csv has no rows"),
        (
            "rows.tsv",
            'text\tlabel\n"a ""b"""\tc\n',
            "line 2: .* is quoted as in CSV, but .* in TSV: .* or name it .csv",
        ),
        ("rows.tsv", 'text\tlabel\na\t"c"\n', 'line 2: "c" is quoted as in CSV'),
        ("rows.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n', "line 2: the key 'label' is missing"),
        (
            "rows.jsonl",
            '{"text": "a", "label": [1]}\n',
            r"line 1: 'label' must be a text or a number, got \['1'\]|\[\"1",
        ),
        ("rows.jsonl", '{"text": null, "label": 1}\n', "line 1: 'text' must be a text or a number, got null"),
        ("rows.jsonl", '{"text": "a", "label": NaN}\n', "line 1: 'label' must be a text or a number, got null"),
        ("rows.jsonl", '{"text": "\\ud83d", "label": 1}\n', r"line 1: 'text' has half of a character: '\\ud83d'"),
        ("rows.jsonl", '{"text": "a"}\n', "line 1: no column 'label' among text$"),
        ("rows.json", '[\n{"text": "a"}]\n', r"line 1: expected a JSON object in one line, got '\['"),
        ("rows.json", '["text"]\n', "line 1: expected a JSON object in one line, got"),
        ("rows.jsonl", 100_000 * "[", "line 1: expected a JSON object in one line, got"),
        ("rows.jsonl", "\n", "rows.jsonl is empty"),
    ],
)
def test_unusable_rows_are_one_line(read, name, content, message):
    with pytest.raises(UserError, match=message) as caught:
        read(name, content, ["text"], "label")
    assert "\n" not in str(caught.value)


def test_columns_that_cannot_be_read_are_errors(read):
    with pytest.raises(UserError, match=r"rows.jsonl: --no-header is for TSV and CSV"):
        read("rows.jsonl", '{"text": "a"}', ["1"], None, False)
    with pytest.raises(UserError, match=r"line 1: no column 'query' among text, id; "):
        read("rows.csv", "text,id\na,1\n", ["text"], None, group="query")
    with pytest.raises(UserError, match=r"line 2: the group is empty"):
        read("rows.csv", "text,query\na, \n", ["text"], None, group="query")


def test_labels_of_a_classifier_are_checked_and_renamed(read):
    labels = ClassLabels(["yes", "no"], "the labels of model", {"1": "yes"})

    rows = read(
        "rows.jsonl", as_json([{"t": "a", "l": 1}, {"t": "b", "l": "no"}]), ["t"], "l", parse_label=labels.parse
    )

    assert (rows.labels, labels.seen.keys()) == (["yes", "no"], {"1", "no"})
    with pytest.raises(UserError, match=r"line 1: the label must be one of the labels of model \(yes, no\), got '0'"):
        read("rows.jsonl", '{"t": "a", "l": 0}', ["t"], "l", parse_label=labels.parse)


def test_list_of_training_labels_is_an_error_with_its_line(read):
    labels = ClassLabels([], "", {})
    read("rows.csv", 'text,label\n"a\nb",x\nc,y\nd,"x, y"\n', ["text"], "label", parse_label=labels.parse)

    with pytest.raises(UserError, match=r"rows.csv, line 5: the row has 2 labels, 'x, y'"):
        labels.use_seen_labels("rows.csv")
