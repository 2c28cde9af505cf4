"""A tokenizer together with its dict.txt: what pre-training and fine-tuning must have in common.

`--tokenizer` of the programs is one of
    gpt2                the published GPT-2 BPE with fairseq's dict.txt (fetched once)
    DIR                 a directory built by a program of this package: its manifest names tokenizer and dictionary
    DIR                 a directory with encoder.json, vocab.bpe and dict.txt, or with spm.model or tokenizer.json
                        (and dict.txt): what `python -m lln_fairseq convert` writes is one
    FILE.model          a SentencePiece model
There is no default for fine-tuning data, and the manifest records `identity`, so two data sets with the same identity
give every text the same ids, and others are told apart.
"""

import io
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lln_fairseq.data.download import fetch_file
from lln_fairseq.data.files import sha256_bytes
from lln_fairseq.data.manifest import MANIFEST
from lln_fairseq.data.published_files import FILES
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import NUM_SPECIAL, UNKNOWN, parse_dictionary
from lln_fairseq.data.tokenizers import (
    TOKENIZER_FILES,
    Tokenizer,
    dictionary_text,
    load_sentencepiece,
    make_tokenizer,
)

DICTIONARY = "dict.txt"
MAX_FILE = 256 << 20  # bytes
_DICTIONARY_NAME = re.compile(
    rf"(\w+/)?{re.escape(DICTIONARY)}"
)  # what a manifest may name: dict.txt or FOLDER/dict.txt

GPT2_FILES = {name: FILES[name] for name in (*TOKENIZER_FILES["gpt2"], DICTIONARY)}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the text of its dict.txt. Raises DataError where fairseq could not read that text, and where it
    lacks a symbol of the tokenizer."""

    tokenizer: Tokenizer
    dictionary: str

    def __post_init__(self) -> None:
        there = set(self.symbols)
        missing = [symbol for symbol in self.tokenizer.symbols() if symbol not in there]
        if missing:
            raise DataError(
                f"{DICTIONARY} does not fit the {self.tokenizer.kind} tokenizer: it lacks {missing[0]!r} "
                f"({len(missing)} missing)"
            )

    @cached_property
    def symbols(self) -> list[str]:
        """The symbols of dict.txt; symbol i has fairseq's id 4 + i."""
        try:
            return parse_dictionary(io.StringIO(self.dictionary, newline=None))
        except DataError as error:
            raise DataError(f"{DICTIONARY}, {error}") from error

    @property
    def size(self) -> int:
        """Number of fairseq's ids, its four special ones included, <mask> not."""
        return NUM_SPECIAL + len(self.symbols)

    @cached_property
    def table(self) -> np.ndarray:
        """fairseq's id for each id of the tokenizer."""
        ids = {symbol: NUM_SPECIAL + i for i, symbol in enumerate(self.symbols)}
        symbols = self.tokenizer.symbols_by_id
        return np.array([UNKNOWN if symbol is None else ids[symbol] for symbol in symbols], dtype=np.int32)

    @cached_property
    def identity(self) -> str:
        """sha256 over the tokenizer's files and the dictionary's symbols in order (counts do not matter)."""
        parts = [sha256_bytes(data) for _, data in sorted(self.tokenizer.files.items())]
        return sha256_bytes("\n".join([self.tokenizer.kind, *parts, *self.symbols]).encode())

    def with_counts(self, counts: np.ndarray) -> "Vocabulary":
        """The same with `counts` (by fairseq's id) in dict.txt."""
        numbers = counts[NUM_SPECIAL:].tolist()
        lines = (f"{symbol} {number}\n" for symbol, number in zip(self.symbols, numbers, strict=True))
        return Vocabulary(self.tokenizer, "".join(lines))

    def record(self, folder: str = "") -> dict[str, Any]:
        """What a manifest says of it; `folder` is where, inside the output directory, dict.txt lies."""
        return {
            "kind": self.tokenizer.kind,
            "identity": self.identity,
            "files": {name: sha256_bytes(data) for name, data in self.tokenizer.files.items()},
            "dictionary": {"file": folder + DICTIONARY, "symbols": len(self.symbols)},
        }


def new_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's symbols in their own order, counts zero; one id is left for <mask>, which the tasks add."""
    return Vocabulary(tokenizer, dictionary_text(tokenizer.symbols(), {}, reserved=1))


def _read(path: Path) -> bytes:
    """Return the content of a regular file of at most MAX_FILE bytes, or raise DataError."""
    if path.exists() and not path.is_file():  # reading a pipe would block, and a device may never end
        raise DataError(f"cannot read {path}: it is not a regular file")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_FILE:
        raise DataError(f"cannot read {path}: it is larger than {MAX_FILE >> 20} MiB, the limit for tokenizer files")
    return content


def _with_dictionary(tokenizer: Tokenizer, path: Path) -> Vocabulary:
    try:
        return Vocabulary(tokenizer, _read(path).decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _from_manifest(manifest: Path) -> Vocabulary:
    folder = manifest.parent
    try:
        record = json.loads(_read(manifest))["tokenizer"]
        files = {name: _read(folder / name) for name in TOKENIZER_FILES[record["kind"]]}
        for name, data in files.items():
            if sha256_bytes(data) != record["files"][name]:
                raise DataError(f"{folder / name} is not the file that {manifest} lists")
        name = record["dictionary"]["file"]
        if not _DICTIONARY_NAME.fullmatch(name):
            raise DataError(f"{manifest} names {name!r:.80}: expected {DICTIONARY}, or FOLDER/{DICTIONARY}, beside it")
        dictionary = folder / name
        vocabulary = _with_dictionary(make_tokenizer(record["kind"], files), dictionary)
        if vocabulary.identity != record["identity"]:
            raise DataError(f"{dictionary} is not the dictionary that {manifest} was written with")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{manifest} is damaged or names no tokenizer: {error}") from error
    return vocabulary


def _from_files(folder: Path) -> Vocabulary | None:
    """Of the tokenizer's own files in the directory; None where there are none."""
    for kind, names in TOKENIZER_FILES.items():
        if all((folder / name).is_file() for name in names):
            tokenizer = make_tokenizer(kind, {name: _read(folder / name) for name in names})
            if kind == "gpt2" or (folder / DICTIONARY).is_file():
                return _with_dictionary(tokenizer, folder / DICTIONARY)
            return new_vocabulary(tokenizer)
    return None


def load_vocabulary(given: str) -> Vocabulary:
    """The vocabulary that `--tokenizer` names (see the top of this file). Raises DataError."""
    path = Path(given)
    if given == "gpt2":
        paths = {name: fetch_file(file) for name, file in GPT2_FILES.items()}
        files = {name: _read(path) for name, path in paths.items()}
        return _with_dictionary(make_tokenizer("gpt2", files), paths[DICTIONARY])
    if path.is_file():
        return new_vocabulary(load_sentencepiece(path))
    if not path.is_dir():
        raise DataError(f"--tokenizer {given}: no such file or directory (or the word gpt2)")
    if (path / MANIFEST).is_file():
        return _from_manifest(path / MANIFEST)
    if vocabulary := _from_files(path):
        return vocabulary
    if (path.parent / MANIFEST).is_file():  # DATA/lm of the demo is what one trains on
        return _from_manifest(path.parent / MANIFEST)
    raise DataError(f"{path} holds neither a {MANIFEST} nor spm.model, encoder.json and vocab.bpe, or tokenizer.json")
