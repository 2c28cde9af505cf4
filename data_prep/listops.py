"""ListOps as the Long Range Arena draws it (arXiv 2011.04006, 2.2.1): nested lists of digits, and what they amount to.

    [SM 3 [MAX 1 9 ] [MED 4 4 7 ] ]   ->   6

An argument is a list with probability 1/4, at most 10 deep, else a digit; a list has 2 to 10 arguments. A row counts
one for each digit and two for each list, its operator and its bracket, and rows of more than 500 and fewer than 2,000
are kept.
"""

import random
from collections.abc import Callable, Sequence

from .chunks import Drawn, below

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: _median(values),
    "SM": lambda values: sum(values) % 10,
}
DIGITS = tuple("0123456789")
CLOSE = "]"
DEPTH, ARGUMENTS, LIST_SHARE = 10, 10, 0.25
SHORTEST, LONGEST = 501, 1999

# The two ways to read a row. `skyformer` is what that code base (and with it the paper) trained on: its tokenizer keeps
# letters and digits alone, so that the closing brackets are lost and no model can know where a list ends.
READINGS = {
    "fixed": (*(f"[{name}" for name in OPERATORS), CLOSE, *DIGITS),
    "skyformer": (*OPERATORS, *DIGITS),
}
SYMBOLS = READINGS["fixed"]  # a row is a byte for each symbol, its place in here
_NAMES = list(OPERATORS)
_CLOSE, _ZERO = SYMBOLS.index(CLOSE), SYMBOLS.index("0")


def _median(values: list[int]) -> int:
    """The median, of an even number of values the mean of the two in the middle, rounded down."""
    values, half = sorted(values), len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) // 2


class _TooLong(Exception):
    pass


def draw(generator: random.Random) -> Drawn:
    """A row of allowed length."""
    while True:
        symbols = bytearray()
        try:
            value = _argument(generator, 1, symbols)
        except _TooLong:
            continue
        if len(symbols) >= SHORTEST:
            return Drawn(bytes(symbols), value)


def _argument(generator: random.Random, depth: int, symbols: bytearray) -> int:
    """Appends a digit or a list to `symbols`; returns its value. Raises _TooLong, so no time goes into such rows."""
    if depth >= DEPTH or generator.random() > LIST_SHARE:
        digit = below(generator, 10)
        symbols.append(_ZERO + digit)
        return digit
    if len(symbols) > LONGEST:
        raise _TooLong
    arguments, operator = 2 + below(generator, ARGUMENTS - 1), below(generator, len(_NAMES))
    symbols.append(operator)
    values = [_argument(generator, depth + 1, symbols) for _ in range(arguments)]
    symbols.append(_CLOSE)
    if len(symbols) > LONGEST:
        raise _TooLong
    return OPERATORS[_NAMES[operator]](values)


def parse(source: str) -> bytes:
    """The symbols of a row of the published files, whose round brackets mean nothing. Raises ValueError, KeyError."""
    numbers = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    return bytes(numbers[word] for word in source.split() if word not in "()")


def evaluate(symbols: Sequence[int]) -> int:
    """What a row amounts to. Raises ValueError where the brackets do not fit."""
    open_lists: list[tuple[str, list[int]]] = [("", [])]
    for symbol in symbols:
        if symbol < len(_NAMES):
            open_lists.append((_NAMES[symbol], []))
            continue
        value = symbol - _ZERO
        if symbol == _CLOSE:
            name, values = open_lists.pop()
            if not open_lists or not values:
                raise ValueError("a bracket that closes nothing")
            value = OPERATORS[name](values)
        open_lists[-1][1].append(value)
    if len(open_lists) != 1 or len(open_lists[0][1]) != 1:
        raise ValueError("not one list or digit")
    return open_lists[0][1][0]


def read_as(symbols: bytes, reading: str) -> bytes:
    """The row with the symbols of a reading, numbers of READINGS[reading]."""
    if reading == "fixed":
        return symbols
    places = [READINGS[reading].index(symbol.removeprefix("[")) if symbol != CLOSE else 0 for symbol in SYMBOLS]
    return symbols.translate(bytes(places) + bytes(256 - len(places)), bytes([_CLOSE]))
