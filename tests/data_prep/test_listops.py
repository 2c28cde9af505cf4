"""Test ListOps: values by an independent evaluator, the rules of drawing, and the two readings."""

import hashlib
import re
import statistics

import pytest

from data_prep import listops
from data_prep.chunks import DrawnRow, draw_chunk, draw_rows

ROWS = draw_chunk(listops.draw_listops_row, "listops", 3, 200, 0)
FUNCTIONS = {"MIN": min, "MAX": max, "MED": lambda v: int(statistics.median(v)), "SM": lambda v: sum(v) % 10}
INNERMOST_LIST = re.compile(r"\[(MIN|MAX|MED|SM)((?: \d)+) \]")


def text_of(symbols, reading="fixed"):
    return " ".join(listops.READINGS[reading][symbol] for symbol in symbols)


def evaluate_text(text):
    """Replace the innermost lists by their values until a single digit is left, and return it."""

    def evaluate_list(match):
        arguments = [int(digit) for digit in match[2].split()]
        return str(FUNCTIONS[match[1]](arguments))

    while "[" in text:
        text, changed = INNERMOST_LIST.subn(evaluate_list, text)
        assert changed, text
    assert re.fullmatch(r"\d", text)
    return int(text)


def test_labels_match_independent_evaluator():
    labels = [row.label for row in ROWS]

    assert [evaluate_text(text_of(row.symbols)) for row in ROWS] == labels
    assert [listops.evaluate_listops_row(row.symbols) for row in ROWS] == labels
    assert set(labels) == set(range(10))


def test_rows_follow_rules_of_paper():
    for row in ROWS:
        words = text_of(row.symbols).split()
        assert 500 < len(words) < 2000
        max_depth = 0
        num_arguments = []  # of every open list
        for word in words:
            if word.startswith("["):
                num_arguments.append(0)
                max_depth = max(max_depth, len(num_arguments))
                continue
            if word == "]":
                assert 2 <= num_arguments.pop() <= 10
            if num_arguments:
                num_arguments[-1] += 1
        assert max_depth < 10  # the tenth level consists of digits
    lengths = [len(row.symbols) for row in ROWS]
    assert 900 < statistics.mean(lengths) < 1200


def test_rows_do_not_depend_on_number_of_workers():
    one = draw_rows(listops.draw_listops_row, "listops", 1, 30, workers=1, chunk_size=8)
    two = draw_rows(listops.draw_listops_row, "listops", 1, 30, workers=2, chunk_size=8)

    assert one == two
    assert len({row.symbols for row in one}) == 30


def test_rows_depend_on_seed():
    first = draw_rows(listops.draw_listops_row, "listops", 1, 30, workers=1, chunk_size=8)
    second = draw_rows(listops.draw_listops_row, "listops", 2, 30, workers=1, chunk_size=8)

    assert first != second


def test_rows_of_seed_never_change():
    row = draw_chunk(listops.draw_listops_row, "listops", 1, 1, 0)[0]

    key = hashlib.blake2b(row.symbols, digest_size=16).hexdigest()
    assert (key, row.label) == ("8b489b126148feaa49da08f52a72395d", 4)


def test_duplicate_rows_are_drawn_again():
    def draw_one_of_five(generator):
        value = int(generator.random() * 5)
        return DrawnRow(bytes([value]), value)

    rows = draw_rows(draw_one_of_five, "few", 1, 5, workers=1, chunk_size=3)

    assert sorted(row.label for row in rows) == [0, 1, 2, 3, 4]


def test_skyformer_reading_has_no_closing_brackets():
    for row in ROWS[:5]:
        words = text_of(row.symbols).replace("[", "").replace("]", "").split()
        converted = listops.convert_to_reading(row.symbols, "skyformer")
        assert text_of(converted, "skyformer").split() == words


def test_fixed_reading_is_unchanged():
    symbols = ROWS[0].symbols

    assert listops.convert_to_reading(symbols, "fixed") == symbols


def test_published_rows_are_parsed_without_round_brackets():
    symbols = listops.parse_listops_row("( ( ( ( [SM 3 ) ( ( ( [MED 1 ) 4 ) ] ) ) 9 ) ] )")

    assert text_of(symbols) == "[SM 3 [MED 1 4 ] 9 ]"
    assert listops.evaluate_listops_row(symbols) == (3 + 2 + 9) % 10


@pytest.mark.parametrize("text", ["", "[MAX 1 2", "1 ]", "[MIN ]", "1 2", "[MAX 1 ] ]"])
def test_evaluate_rejects_malformed_rows(text):
    with pytest.raises(ValueError, match=r"bracket|not a single"):
        listops.evaluate_listops_row(listops.parse_listops_row(text))
