"""Text: reading lines, cleaning, when two sentences count as the same, and the split that a sentence belongs to."""

import hashlib
import html
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import partial
from typing import BinaryIO

from lln_fairseq.data.reporting import DataError

SPLITS = ("train", "valid", "test")
MAX_LINE = 4 << 20  # bytes; tokenizers need 60 times as much memory

# With the semicolon only: html.unescape alone would also turn "&not" in "R&notes" into "¬".
_ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")


def clean(text: str) -> str:
    """The text as a reader sees it: HTML entities resolved once, '' (a doubled apostrophe) as a double quote, NFC,
    every run of white space or control characters one space, none at the ends."""
    text = _ENTITY.sub(lambda entity: html.unescape(entity.group()), text).replace("''", '"')
    text = "".join(" " if unicodedata.category(c) == "Cc" else c for c in unicodedata.normalize("NFC", text))
    return " ".join(text.split())


def sentence_key(text: str) -> str:
    """Two texts with the same key count as the same sentence: letters and digits only, without case or accents.

    A text without letters and digits is its own key, white space apart.
    """
    text = unicodedata.normalize("NFKD", text).casefold()
    return "".join(c for c in text if c.isalnum()) or "".join(text.split())


def split_of(text: str) -> str:
    """ "valid" (10%), "test" (10%) or "train", by the sha256 of the key alone.

    Nothing else enters, so the same sentence falls into the same split wherever it occurs: a corpus made of "train"
    texts cannot hold a sentence of another corpus's "valid" or "test".
    """
    bucket = int.from_bytes(hashlib.sha256(sentence_key(text).encode()).digest()[:8], "big") % 10
    return {0: "valid", 1: "test"}.get(bucket, "train")


def raw_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each line, its end included.

    Raises:
        DataError: with `name` and the number of a line of more than MAX_LINE bytes.
    """
    for number, line in enumerate(iter(partial(stream.readline, MAX_LINE + 1), b""), start=1):
        if len(line) > MAX_LINE:
            raise DataError(f"{name}, line {number}: more than {MAX_LINE >> 20} MiB; break it into shorter lines")
        yield number, line


def read_lines(stream: BinaryIO, name: str, limit: int | None = None) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends (LF or CRLF) and a BOM; no other character ends a line.

    With `limit` it stops before the line that would make it more than so many bytes. Raises DataError with `name` and
    the number of the line that is not UTF-8 or has more than MAX_LINE bytes.
    """
    total = 0
    for number, raw in raw_lines(stream, name):
        total += len(raw)
        if limit is not None and total > limit:
            return
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{name}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error
        yield line.removesuffix("\n").removesuffix("\r")


def spread_sample(lines: Iterable[str], limit: int) -> list[str]:
    """Every k-th non-empty line, k the smallest power of two for which they have at most `limit` characters.

    One pass and at most `limit` characters in memory; nothing is random.
    """
    kept: list[str] = []
    size, stride = 0, 1
    for number, line in enumerate(line for line in lines if line):
        if number % stride:
            continue
        kept.append(line)
        size += len(line)
        while size > limit and len(kept) > 1:
            stride *= 2
            kept = kept[::2]
            size = sum(map(len, kept))
    return kept
