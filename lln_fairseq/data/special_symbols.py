"""fairseq's special symbols, and the parser of its dict.txt.

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
    """Return the symbols in the lines of a dict.txt, "symbol count" each; symbol i has fairseq's id 4 + i.

    Raises:
        DataError: with the number of the line, if a line is not a symbol and an integer, or its symbol has occurred
            before or is one of fairseq's special symbols. The line may end with OVERWRITE to repeat a symbol.
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
