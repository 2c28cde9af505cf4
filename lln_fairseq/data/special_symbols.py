"""Define fairseq's special symbols, and parse its dict.txt.

Every fairseq dictionary begins with four special symbols, which dict.txt does not list.
"""

from collections.abc import Iterable

from lln_fairseq.data.reporting import DataError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # symbol i has the id i
NUM_SPECIAL = 4  # symbol i of dict.txt has the id 4 + i
BOS = 0
PAD = 1
EOS = 2
UNKNOWN = 3
MASK = "<mask>"  # the tasks append it to the dictionary
OVERWRITE = " #fairseq:overwrite"  # ends a line of dict.txt whose symbol may occur twice


def parse_dictionary(lines: Iterable[str]) -> list[str]:
    """Return the symbols of a dict.txt, which has a line "symbol count" for each; symbol i has fairseq's id 4 + i.

    Raises:
        DataError: with the line number, if a line is not a symbol and an integer, or if it repeats an earlier or
            special symbol without ending with OVERWRITE.
    """
    seen = set(SPECIAL_SYMBOLS)
    symbols = []
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip()
        symbol, separator, count = entry.removesuffix(OVERWRITE).rpartition(" ")
        if not separator or not _is_integer(count):
            raise DataError(f"line {number}: expected a symbol and its count, found {entry[:40]!r}")
        if symbol in seen and not entry.endswith(OVERWRITE):
            raise DataError(f"line {number}: the symbol {symbol!r} occurs twice")
        seen.add(symbol)
        symbols.append(symbol)
    return symbols


def _is_integer(text: str) -> bool:
    """Return True if Python's `int`, which fairseq uses, accepts the text."""
    try:
        int(text)
    except ValueError:
        return False
    return True
