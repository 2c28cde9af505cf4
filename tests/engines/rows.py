"""The rows of the test: texts of random words, of which some are broken. It needs the standard library only."""

import random

ROWS = 20_000
BROKEN = 20
WORDS = [f"word{number}" for number in range(2000)]
BROKEN_TEXTS = (b"\xff not UTF-8", None, b"word1 " * 900_000, b"")  # the third has 5 MB


def make_rows(count: int = ROWS) -> list[tuple[int, bytes | None]]:
    """Return the number and the text of every row, the same in every process."""
    generator = random.Random(1)
    rows: list[tuple[int, bytes | None]] = []
    for number in range(count):
        words = generator.choices(WORDS, k=generator.randint(5, 60))
        rows.append((number, " ".join(words).encode()))
    broken = generator.sample(range(count), BROKEN)
    for place, number in enumerate(broken):
        rows[number] = (number, BROKEN_TEXTS[place % len(BROKEN_TEXTS)])
    return rows


def has_output(text: bytes | None) -> bool:
    """Return True if a row must get an output: its text is not broken, or only empty."""
    return text not in BROKEN_TEXTS[:3]
