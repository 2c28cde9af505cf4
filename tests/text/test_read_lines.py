"""Text is cleaned, compared, assigned to splits and read line by line."""

import io
from collections import Counter

import pytest

from lln_fairseq.errors import UserError
from lln_fairseq.text.read_lines import MAX_LINE, assign_split, clean_text, read_lines, sentence_key


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("  a \t b\u00a0 c\x07d ", "a b c d"),
        ("''quoted'' and it's", '"quoted" and it\'s'),
        ("Q&amp;A &lt;3 &#39;x&#x27;", "Q&A <3 'x'"),
        ("&amp;lt;", "&lt;"),  # only once: an entity that the author wrote about remains
        ("R&notes AT&T &unknown;", "R&notes AT&T &unknown;"),
        ("cafe\u0301", "caf\u00e9"),
        ("\u2028\x00", ""),
    ],
)
def test_clean_text(raw, cleaned):
    assert clean_text(raw) == cleaned


def test_sentence_key_ignores_case_accents_punctuation_and_spaces():
    assert sentence_key("Touché, co-writer!") == sentence_key("touche co writer") == sentence_key("TOUCHÉ cowriter...")


def test_sentence_key_distinguishes_letters_digits_and_smileys():
    assert sentence_key("It is 1.") != sentence_key("It is 2.")
    assert sentence_key(":-)") != sentence_key(":-(")
    assert sentence_key("! !") == "!!"


def test_splits_have_the_expected_shares():
    counts = Counter(assign_split(f"sentence {i}") for i in range(10_000))

    assert abs(counts["valid"] - 1000) < 120  # four standard deviations
    assert abs(counts["test"] - 1000) < 120


def test_splits_never_change():
    """Another hash would make all existing data sets incomparable with new ones."""
    expected = "train train valid test valid valid train test train train valid train"

    assert " ".join(assign_split(f"sentence {i}") for i in range(12)) == expected
    assert assign_split("Sentence 7!") == assign_split("sentence 7")


class EndlessLine(io.RawIOBase):
    """A file with an endless line, which fails if more than two maximal lines of it are read."""

    bytes_read = 0

    def readable(self):
        return True

    def readinto(self, buffer):
        self.bytes_read += len(buffer)
        assert self.bytes_read < 2 * MAX_LINE
        buffer[:] = b"x" * len(buffer)
        return len(buffer)


def test_endless_line_raises_before_it_is_read():
    with pytest.raises(UserError, match="here, line 1: more than 4 MiB; break it into shorter lines"):
        list(read_lines(io.BufferedReader(EndlessLine()), "here"))


def test_lines_of_the_maximal_length_are_read():
    longest = b"x" * (MAX_LINE - 1) + b"\n"

    assert [len(line) for line in read_lines(io.BytesIO(longest * 2), "here")] == [MAX_LINE - 1] * 2
