"""Draw, parse and evaluate rows of ListOps: nested operations on digits, labeled with the digit they evaluate to.

    [SM 3 [MAX 1 9 ] [MED 4 4 7 ] ]   ->   6

Rows are drawn as in the Long Range Arena (arXiv 2011.04006, section 2.2.1). An argument is a list with probability
1/4 and a digit otherwise; at depth 10 it is always a digit. A list has 2 to 10 arguments. The length of a row is the
number of its digits, operators and closing brackets. Rows with a length of 501 to 1,999 are kept.
"""

import random
from collections.abc import Callable, Sequence

from .chunks import DrawnRow, random_below


def _median(values: list[int]) -> int:
    """Return the median; for an even number of values, the mean of the middle two, rounded down."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) // 2


def _sum_modulo_10(values: list[int]) -> int:
    return sum(values) % 10


OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": _median,
    "SM": _sum_modulo_10,
}
DIGITS = tuple("0123456789")
CLOSING_BRACKET = "]"
MAX_DEPTH = 10
MAX_ARGUMENTS = 10
LIST_PROBABILITY = 0.25
MIN_LENGTH = 501
MAX_LENGTH = 1999

# The symbols of the two ways to tokenize a row. Skyformer's code base, which the paper used, keeps only letters and
# digits. With this reading, "skyformer", closing brackets are lost, and no model can know where a list ends.
READINGS = {
    "fixed": (*(f"[{name}" for name in OPERATORS), CLOSING_BRACKET, *DIGITS),
    "skyformer": (*OPERATORS, *DIGITS),
}
SYMBOLS = READINGS["fixed"]  # each byte of a drawn or parsed row is an index into this tuple
_OPERATOR_NAMES = list(OPERATORS)  # in the order of SYMBOLS, where the operators come first
_CLOSE_ID = SYMBOLS.index(CLOSING_BRACKET)
_ZERO_ID = SYMBOLS.index("0")


class _RowTooLongError(Exception):
    """Raised when a row that is being drawn exceeds MAX_LENGTH."""


def draw_listops_row(generator: random.Random) -> DrawnRow:
    """Draw rows until one has a length between MIN_LENGTH and MAX_LENGTH, and return it.

    The symbols of the row are indices into SYMBOLS. Its label is the digit that it evaluates to.
    """
    while True:
        symbols = bytearray()
        try:
            value = _draw_argument(generator, 1, symbols)
        except _RowTooLongError:
            continue
        if len(symbols) >= MIN_LENGTH:
            return DrawnRow(bytes(symbols), value)


def _draw_argument(generator: random.Random, depth: int, symbols: bytearray) -> int:
    """Draw a digit or a list, append it to `symbols` in place, and return its value.

    `depth` is 1 for the whole row, 2 for the arguments of its outermost list, and so on. _RowTooLongError is raised as
    soon as the row is too long, so that no time is spent on the rest of it.
    """
    if depth >= MAX_DEPTH or generator.random() > LIST_PROBABILITY:
        digit = random_below(generator, 10)
        symbols.append(_ZERO_ID + digit)
        return digit
    if len(symbols) > MAX_LENGTH:
        raise _RowTooLongError
    num_arguments = 2 + random_below(generator, MAX_ARGUMENTS - 1)
    operator = random_below(generator, len(_OPERATOR_NAMES))
    symbols.append(operator)
    values = [_draw_argument(generator, depth + 1, symbols) for _ in range(num_arguments)]
    symbols.append(_CLOSE_ID)
    if len(symbols) > MAX_LENGTH:
        raise _RowTooLongError
    return OPERATORS[_OPERATOR_NAMES[operator]](values)


def parse_listops_row(source: str) -> bytes:
    """Convert a row of the published files, without its target, to indices into SYMBOLS. Parentheses are ignored.

    A word that is not a symbol raises KeyError.
    """
    symbol_ids = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    return bytes(symbol_ids[word] for word in source.split() if word not in "()")


def evaluate_listops_row(symbols: Sequence[int]) -> int:
    """Return the digit that a row of indices into SYMBOLS evaluates to.

    ValueError is raised if a closing bracket closes no list or an empty list, or if the row is not exactly one complete
    list or one digit.
    """
    # The first entry is not a list of the row: it collects the value of the whole row.
    open_lists: list[tuple[str, list[int]]] = [("", [])]
    for symbol in symbols:
        if symbol < len(_OPERATOR_NAMES):
            open_lists.append((_OPERATOR_NAMES[symbol], []))
            continue
        if symbol == _CLOSE_ID:
            operator, arguments = open_lists.pop()
            if not open_lists or not arguments:
                raise ValueError("a closing bracket without a list to close")
            value = OPERATORS[operator](arguments)
        else:
            value = symbol - _ZERO_ID
        open_lists[-1][1].append(value)
    if len(open_lists) != 1 or len(open_lists[0][1]) != 1:
        raise ValueError("not a single list or digit")
    return open_lists[0][1][0]


def convert_to_reading(row: bytes, reading: str) -> bytes:
    """Convert a row from indices into SYMBOLS to indices into READINGS[reading].

    With the reading "fixed", the row is returned unchanged. With "skyformer", the closing brackets are dropped.
    """
    if reading == "fixed":
        return row
    new_ids = bytearray(256)  # a translation table for all bytes; a row uses only the first few
    for old_id, symbol in enumerate(SYMBOLS):
        if symbol != CLOSING_BRACKET:
            new_ids[old_id] = READINGS[reading].index(symbol.removeprefix("["))
    return row.translate(bytes(new_ids), bytes([_CLOSE_ID]))
