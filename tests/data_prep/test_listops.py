"""ListOps: every row's value by another evaluator, the rules of drawing, and the two readings."""

import hashlib
import re
import statistics

import pytest

from data_prep import listops
from data_prep.chunks import draw_chunk, draw_rows

ROWS = draw_chunk(listops.draw, "listops", 3, 200, 0)
FUNCTIONS = {"MIN": min, "MAX": max, "MED": lambda v: int(statistics.median(v)), "SM": lambda v: sum(v) % 10}


def text_of(symbols, reading="fixed"):
    return " ".join(listops.READINGS[reading][symbol] for symbol in symbols)


def value_of(text):
    """The innermost lists are replaced by their values until one digit is left."""
    innermost = re.compile(r"\[(MIN|MAX|MED|SM)((?: \d)+) \]")
    while "[" in text:
        text, changed = innermost.subn(lambda m: str(FUNCTIONS[m[1]](list(map(int, m[2].split())))), text)
        assert changed, text
    assert re.fullmatch(r"\d", text)
    return int(text)


def test_two_hundred_rows_by_another_evaluator():
    assert [value_of(text_of(row.symbols)) for row in ROWS] == [row.label for row in ROWS]
    assert [listops.evaluate(row.symbols) for row in ROWS] == [row.label for row in ROWS]
    assert {row.label for row in ROWS} == set(range(10))


def test_rows_are_what_the_paper_says():
    for row in ROWS:
        words = text_of(row.symbols).split()
        assert 500 < len(words) < 2000
        depth = arguments = 0
        stack = []
        for word in words:
            if word.startswith("["):
                stack.append(0)
                depth = max(depth, len(stack))
            elif word == "]":
                arguments = stack.pop()
                assert 2 <= arguments <= 10
            if stack and not word.startswith("["):
                stack[-1] += 1
        assert depth < 10  # the tenth level is digits
    lengths = [len(row.symbols) for row in ROWS]
    assert 900 < statistics.mean(lengths) < 1200


def test_the_same_rows_whatever_the_number_of_processes():
    one, three = (draw_rows(listops.draw, "listops", 1, 30, workers, size=8) for workers in (1, 3))
    assert one == three
    assert len({row.symbols for row in one}) == 30
    assert draw_rows(listops.draw, "listops", 2, 30, 1, size=8) != one


def test_a_seed_means_the_same_rows_for_ever():
    row = draw_chunk(listops.draw, "listops", 1, 1, 0)[0]
    key = hashlib.blake2b(row.symbols, digest_size=16).hexdigest()
    assert (key, row.label) == ("8b489b126148feaa49da08f52a72395d", 4)


def test_rows_that_are_there_twice_are_drawn_again():
    def few(generator):
        value = int(generator.random() * 5)
        return listops.Drawn(bytes([value]), value)

    assert sorted(row.label for row in draw_rows(few, "few", 1, 5, 1, size=3)) == [0, 1, 2, 3, 4]


def test_the_reading_of_skyformer_has_no_closing_brackets():
    for row in ROWS[:5]:
        read = text_of(listops.read_as(row.symbols, "skyformer"), "skyformer")
        assert read == " ".join(text_of(row.symbols).replace("[", "").replace("]", "").split())
        assert listops.read_as(row.symbols, "fixed") == row.symbols


def test_published_rows_are_read_without_round_brackets():
    symbols = listops.parse("( ( ( ( [SM 3 ) ( ( ( [MED 1 ) 4 ) ] ) ) 9 ) ] )")
    assert text_of(symbols) == "[SM 3 [MED 1 4 ] 9 ]"
    assert listops.evaluate(symbols) == (3 + 2 + 9) % 10


@pytest.mark.parametrize("text", ["", "[MAX 1 2", "1 ]", "[MIN ]", "1 2", "[MAX 1 ] ]"])
def test_what_is_no_row_is_refused(text):
    with pytest.raises(ValueError, match=r"bracket|not one"):
        listops.evaluate(listops.parse(text))
