"""Define the special symbols of fairseq's dictionaries, and parse dict.txt.

Every fairseq dictionary begins with four special symbols, which dict.txt does not list.
"""

from collections.abc import Iterable, Mapping, Sequence

from lln_fairseq.errors import UserError

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # symbol i has the id i
NUM_SPECIAL = 4  # symbol i of dict.txt has the id 4 + i
BOS = 0
PAD = 1
EOS = 2
UNKNOWN = 3
MASK = "<mask>"  # the tasks append it to the dictionary
FILLER = "madeupword"  # with a number, it makes the size of a dictionary divisible by 8
OVERWRITE = " #fairseq:overwrite"  # ends a line of dict.txt whose symbol may occur twice


def parse_dictionary(lines: Iterable[str]) -> list[str]:
    """Return the symbols of a dict.txt, with lines "SYMBOL COUNT", in order. Symbol i, from 0, has fairseq's id 4 + i.

    UserError, with the line number, is raised if a line is not a symbol and an integer. Also if its symbol is a special
    symbol or occurs in an earlier line, unless the line ends with OVERWRITE.
    """
    seen = set(SPECIAL_SYMBOLS)
    symbols = []
    for number, line in enumerate(lines, start=1):
        entry = line.rstrip()
        symbol, separator, count = entry.removesuffix(OVERWRITE).rpartition(" ")
        if not separator or not _is_integer(count):
            raise UserError(f"line {number}: expected a symbol and its count, found {entry[:40]!r}")
        if symbol in seen and not entry.endswith(OVERWRITE):
            raise UserError(f"line {number}: the symbol {symbol!r} occurs twice")
        seen.add(symbol)
        symbols.append(symbol)
    return symbols


def _is_integer(text: str) -> bool:
    """Return True if fairseq accepts the text as a count: it must be an integer for Python's `int`."""
    try:
        int(text)
    except ValueError:
        return False
    return True


def format_dictionary(symbols: Sequence[str], counts: Mapping[str, int], reserved: int = 0, multiple: int = 8) -> str:
    """Return the content of a dict.txt, which has a line "SYMBOL COUNT" for each symbol. The symbols are not checked.

    Symbol i, from 0, gets fairseq's id 4 + i. A special symbol, and a symbol that occurs again, get OVERWRITE, without
    which fairseq refuses them. Filler symbols "madeupword0000", ... with the count 0 are appended until the size of the
    dictionary is divisible by `multiple`, which makes matrix products faster on tensor cores. The size includes
    fairseq's special symbols and the `reserved` ones that a task will append, such as <mask>. Symbols that are not in
    `counts` get the count 0.
    """
    padding = -(NUM_SPECIAL + len(symbols) + reserved) % multiple
    filler = [f"{FILLER}{i:04d}" for i in range(padding)]
    seen = set(SPECIAL_SYMBOLS)
    lines = []
    for symbol in [*symbols, *filler]:
        ending = OVERWRITE if symbol in seen else ""
        lines.append(f"{symbol} {counts.get(symbol, 0)}{ending}\n")
        seen.add(symbol)
    return "".join(lines)
