"""Read and clean lines of text, recognize repeated sentences, and assign sentences to train, valid and test."""

import hashlib
import html
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count
from typing import BinaryIO

from lln_fairseq.errors import UserError

SPLITS = ("train", "valid", "test")
MAX_LINE = 4 << 20  # bytes; tokenizers need 60 times as much memory
LINE_BREAKS = re.compile(r"[\r\n]+")  # inside a text: each becomes one space, in training, prediction and exports

# The semicolon is required: html.unescape on its own would turn "&not" in "R&notes" into "¬".
_ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")


def clean_text(text: str) -> str:
    """Resolve HTML entities, normalize the text to Unicode NFC, and reduce white space to single spaces.

    Entities are resolved once, so "&amp;lt;" becomes "&lt;". Two apostrophes become a double quote. Every sequence of
    white space and control characters becomes one space, and is removed at both ends.
    """
    text = _ENTITY.sub(lambda entity: html.unescape(entity.group()), text)
    text = text.replace("''", '"')
    text = unicodedata.normalize("NFC", text)
    text = "".join(" " if unicodedata.category(character) == "Cc" else character for character in text)
    return " ".join(text.split())


def sentence_key(text: str) -> str:
    """Return a key of the text. Texts that differ only in case, accents, punctuation or white space have the same key.

    A text without letters and digits keeps its punctuation in the key.
    """
    text = unicodedata.normalize("NFKD", text).casefold()
    letters_and_digits = "".join(character for character in text if character.isalnum())
    if letters_and_digits:
        return letters_and_digits
    return "".join(text.split())


def assign_split(text: str) -> str:
    """Assign a sentence to "train" (80 % of all sentences), "valid" (10 %) or "test" (10 %), and return the split.

    The split depends only on a hash of the `sentence_key`, so a sentence gets the same split in every corpus. No
    sentence in the "train" split of one corpus is therefore in the "valid" or "test" split of another.
    """
    digest = hashlib.sha256(sentence_key(text).encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 10
    if bucket == 0:
        return "valid"
    if bucket == 1:
        return "test"
    return "train"


def read_raw_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number, bytes) for each line of a file. Numbers start at 1, and the bytes include the final LF.

    A line of more than MAX_LINE bytes raises UserError.
    """
    for number, line in enumerate(iter(partial(stream.readline, MAX_LINE + 1), b""), start=1):
        _check_size(line, number, name)
        yield number, line


def _check_size(line: bytes, number: int, name: str) -> None:
    if len(line) > MAX_LINE:
        raise UserError(f"{name}, line {number}: more than {MAX_LINE >> 20} MiB; break it into shorter lines")


def read_lines(stream: BinaryIO, name: str, limit: int | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without line ends and without a byte order mark. Only LF and CRLF end a line.

    With `limit`, stop before the line with which more than this number of bytes would have been read, line ends
    included. UserError, with the file's `name`, is raised if a line is not UTF-8 or has more than MAX_LINE bytes.
    """
    total_bytes = 0
    for number, raw in read_raw_lines(stream, name):
        total_bytes += len(raw)
        if limit is not None and total_bytes > limit:
            return
        yield _decode_line(raw, number, name)


def _decode_line(raw: bytes, number: int, name: str) -> str:
    """Return a line without its end and, in line 1, without a byte order mark."""
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error
    return line.removesuffix("\n").removesuffix("\r")


def read_each_line(stream: BinaryIO, name: str) -> Iterator[str | UserError]:
    """Yield the lines that `read_lines` yields, and its UserError in the place of each line that it rejects."""
    for number in count(1):
        raw = stream.readline(MAX_LINE + 1)
        if not raw:
            return
        try:
            _check_size(raw, number, name)
            yield _decode_line(raw, number, name)
        except UserError as error:
            yield error
        while len(raw) > MAX_LINE and not raw.endswith(b"\n"):  # the rest of a line that is too long
            raw = stream.readline(MAX_LINE + 1)


def sample_lines_evenly(lines: Iterable[str], limit: int) -> list[str]:
    """Return every k-th non-empty line, so that the sample has at most `limit` characters.

    k is a power of two, as small as possible. The lines are read once, and only about `limit` characters are held in
    memory. Nothing is random. The first non-empty line is always part of the sample, even if it exceeds the limit.
    """
    sample: list[str] = []
    characters = 0
    stride = 1
    non_empty = (line for line in lines if line)
    for number, line in enumerate(non_empty):
        if number % stride:
            continue
        sample.append(line)
        characters += len(line)
        while characters > limit and len(sample) > 1:
            stride *= 2
            sample = sample[::2]
            characters = sum(map(len, sample))
    return sample
