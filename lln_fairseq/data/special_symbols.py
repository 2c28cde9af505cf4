"""fairseq's special symbols and its dict.txt. Its dictionaries begin with them, and dict.txt does not list them."""

from collections.abc import Iterable

from lln_fairseq.data.reporting import DataError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # symbol i has the id i
NUM_SPECIAL = 4  # symbol i of dict.txt has the id 4 + i
BOS = 0
PAD = 1
EOS = 2
UNKNOWN = 3
MASK = "<mask>"  # the tasks append it to the dictionary
OVERWRITE = " #fairseq:overwrite"  # at the end of a line whose symbol may be there twice


def parse_dictionary(lines: Iterable[str]) -> list[str]:
    """Return the symbols of the lines of a dict.txt; symbol i has fairseq's id 4 + i.

    Raises:
        DataError: with the number of a line that fairseq could not read, or whose symbol is there twice.
    """
    seen = set(SPECIAL_SYMBOLS)
    symbols = []
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip()
        symbol, space, times = entry.removesuffix(OVERWRITE).rpartition(" ")
        try:
            int(space and times)
        except ValueError as error:
            raise DataError(f"line {number}: expected a symbol and its count, found {entry[:40]!r}") from error
        if symbol in seen and not entry.endswith(OVERWRITE):
            raise DataError(f"line {number}: the symbol {symbol!r} is there twice")
        seen.add(symbol)
        symbols.append(symbol)
    return symbols
