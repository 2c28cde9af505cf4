"""Load a tokenizer together with its dict.txt. Pre-training and fine-tuning must use the same pair.

The option `--tokenizer` of the programs accepts

    DIR                 a directory built by data_prep, whose manifest.json names the tokenizer and the dictionary
    DIR                 a directory with encoder.json, vocab.bpe and dict.txt, or with spm.model or tokenizer.json and
                        optionally dict.txt; `lln-fairseq convert` writes such directories
    FILE.model          a SentencePiece model

Every manifest records the `identity` of its vocabulary. Two data sets with the same identity encode a text to the same
ids.
"""

import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lln_fairseq.errors import UserError
from lln_fairseq.files import sha256_bytes
from lln_fairseq.text.special_symbols import FILLER, MASK, NUM_SPECIAL, SPECIAL_SYMBOLS, UNKNOWN, parse_dictionary
from lln_fairseq.text.tokenizers import (
    TOKENIZER_FILES,
    Tokenizer,
    dictionary_text,
    load_sentencepiece,
    make_tokenizer,
)

DICTIONARY = "dict.txt"
MANIFEST = "manifest.json"
MAX_MISSING = 0.5  # the share of the tokenizer's symbols that dict.txt may lack
MAX_FOREIGN = 0.01  # the share of dict.txt's symbols that no text has with this tokenizer, if others are missing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer with its dictionary, which together encode text into fairseq's ids.

    `dictionary` is the content of dict.txt. It may have more symbols than the tokenizer. If it lacks some, because the
    text that it was made from does not have them, they become <unk>, as in fairseq.

    Raises:
        UserError: if dict.txt is malformed, or that of another tokenizer: it lacks more than MAX_MISSING of the
            tokenizer's symbols, or it lacks some, and more than MAX_FOREIGN of its own are not the tokenizer's. Also
            if a symbol of the tokenizer is a special symbol.
    """

    tokenizer: Tokenizer
    dictionary: str

    def __post_init__(self) -> None:
        if not self.missing:
            return
        foreign = 0
        for symbol in self.symbols:
            if symbol != MASK and not symbol.startswith(FILLER) and not self.tokenizer.can_give(symbol):
                foreign += 1
        known = len(self.tokenizer.symbols())
        has_special = not set(SPECIAL_SYMBOLS).isdisjoint(self.missing)  # as text, with the id of a special symbol
        if has_special or len(self.missing) > MAX_MISSING * known or foreign > MAX_FOREIGN * len(self.symbols):
            raise UserError(
                f"{DICTIONARY} does not fit the {self.tokenizer.kind} tokenizer: it lacks {self.missing[0]!r} "
                f"({len(self.missing)} of {known} missing; at most {MAX_MISSING:.0%} may be), and {foreign} of its "
                f"{len(self.symbols)} symbols are not the tokenizer's (at most {MAX_FOREIGN:.0%})"
            )

    @cached_property
    def missing(self) -> list[str]:
        """The symbols of the tokenizer that dict.txt lacks, without pieces of several words, which it cannot have."""
        return [symbol for symbol in self.tokenizer.symbols() if symbol not in self._ids and symbol.split() == [symbol]]

    def missing_message(self) -> str:
        """Return a line that counts the missing symbols, or "" if there are none."""
        if not self.missing:
            return ""
        return (
            f"{DICTIONARY} lacks {len(self.missing)} of the tokenizer's {len(self.tokenizer.symbols())} symbols, such "
            f"as {self.missing[0]!r}: they become <unk>, as in fairseq"
        )

    @cached_property
    def symbols(self) -> list[str]:
        """The symbols of dict.txt in order. Symbol i, from 0, has fairseq's id 4 + i."""
        try:
            return parse_dictionary(io.StringIO(self.dictionary, newline=None))
        except UserError as error:
            raise UserError(f"{DICTIONARY}, {error}") from error

    @property
    def size(self) -> int:
        """The number of ids: the symbols of dict.txt and fairseq's four special symbols, but not a task's <mask>."""
        return NUM_SPECIAL + len(self.symbols)

    @cached_property
    def table(self) -> np.ndarray:
        """fairseq's id for each of the tokenizer's ids, int32 (tokenizer ids,). An id without a symbol gets <unk>."""
        return np.array([self._ids.get(symbol, UNKNOWN) for symbol in self.tokenizer.symbols_by_id], dtype=np.int32)

    @cached_property
    def _ids(self) -> dict[str | None, int]:
        """fairseq's id for each symbol. As in fairseq, the last one of equal symbols counts."""
        return {symbol: NUM_SPECIAL + i for i, symbol in enumerate(self.symbols)}

    def encode(self, lines: Sequence[str]) -> list[np.ndarray]:
        """Return fairseq's ids of each line, int32 (tokens,), without special tokens."""
        encoded = []
        for line, ids in zip(lines, self.tokenizer.encode_ids(lines), strict=True):
            if self.tokenizer.open_ids.isdisjoint(ids):
                encoded.append(self.table[np.array(ids, dtype=np.int32)])
            else:
                found = [self._ids.get(symbol, UNKNOWN) for symbol in self.tokenizer.line_symbols(line)]
                encoded.append(np.array(found, dtype=np.int32))
        return encoded

    @cached_property
    def identity(self) -> str:
        return vocabulary_identity(self.tokenizer.kind, self.tokenizer.files, self.symbols)

    def with_counts(self, counts: np.ndarray) -> "Vocabulary":
        """Return a copy of this vocabulary with these counts in dict.txt, one for each of fairseq's ids, (size,).

        The counts of the four special symbols are ignored.
        """
        symbol_counts = counts[NUM_SPECIAL:].tolist()
        lines = (f"{symbol} {count}\n" for symbol, count in zip(self.symbols, symbol_counts, strict=True))
        return Vocabulary(self.tokenizer, "".join(lines))

    def record(self, directory: str = "") -> dict[str, Any]:
        """Return the entry "tokenizer" of a manifest.

        `directory` is that of dict.txt relative to the manifest, such as "input0/", or "" for the manifest's own.
        """
        return {
            "kind": self.tokenizer.kind,
            "identity": self.identity,
            "files": {name: sha256_bytes(content) for name, content in self.tokenizer.files.items()},
            "dictionary": {"file": directory + DICTIONARY, "symbols": len(self.symbols)},
        }


def vocabulary_identity(kind: str, files: Mapping[str, bytes], symbols: Sequence[str]) -> str:
    """Return a SHA-256 checksum over the kind and files of a tokenizer and the symbols of dict.txt, without counts."""
    checksums = [sha256_bytes(content) for _, content in sorted(files.items())]
    return sha256_bytes("\n".join([kind, *checksums, *symbols]).encode())


def new_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Return a vocabulary whose dictionary is made from the tokenizer: its symbols in the order of its ids, counts 0.

    Filler symbols are appended so that the size of the dictionary, including the <mask> of a task, is divisible by 8.
    """
    return Vocabulary(tokenizer, dictionary_text(tokenizer.symbols(), {}, reserved=1))


def load_vocabulary(source: str) -> Vocabulary:
    """Return the vocabulary that `source`, the value of the option `--tokenizer`, names.

    The module docstring lists the possible values. In a directory, manifest.json is used. If it does not exist, the
    tokenizer's own files are used, and otherwise manifest.json of the parent directory, because some programs of
    data_prep write the data into a subdirectory. A missing or damaged tokenizer, or one that does not match the
    manifest, raises UserError.
    """
    path = Path(source)
    if path.is_file():
        return new_vocabulary(load_sentencepiece(path))
    if not path.is_dir():
        raise UserError(
            f"no such tokenizer: {source} (`python -m data_prep.fetch gpt2` downloads GPT-2's "
            "tokenizer and prints its directory)"
        )
    if (path / MANIFEST).is_file():
        return _from_manifest(path / MANIFEST)
    vocabulary = _from_files(path)
    if vocabulary is not None:
        return vocabulary
    if (path.parent / MANIFEST).is_file():
        return _from_manifest(path.parent / MANIFEST)
    advice = f": give {path / 'tokenizer'}" if (path / "tokenizer").is_dir() else ""
    raise UserError(
        f"{path} has neither {MANIFEST} nor spm.model, encoder.json and vocab.bpe, or tokenizer.json{advice}"
    )


def recorded_identity(directory: Path) -> str:
    """Return the identity of the vocabulary that a directory of data was encoded with; "" if none is recorded.

    The manifest is the one that `load_vocabulary` would use, but the tokenizer is not loaded. A damaged manifest counts
    as none.
    """
    manifest = directory / MANIFEST
    has_tokenizer = any(all((directory / name).is_file() for name in names) for names in TOKENIZER_FILES.values())
    if not manifest.is_file() and not has_tokenizer:
        manifest = directory.parent / MANIFEST
    try:
        return str(json.loads(manifest.read_bytes())["tokenizer"]["identity"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _from_manifest(manifest: Path) -> Vocabulary:
    directory = manifest.parent
    try:
        content = json.loads(_read(manifest))
        if "tokenizer" not in content:  # data without text, such as images
            raise UserError(f"{manifest} names no tokenizer")
        record = content["tokenizer"]
        files = {name: _read(directory / name) for name in TOKENIZER_FILES[record["kind"]]}
        for name, content in files.items():
            if sha256_bytes(content) != record["files"][name]:
                raise UserError(f"{directory / name} is not the file that {manifest} lists")
        dictionary = directory / record["dictionary"]["file"]
        vocabulary = _with_dictionary(make_tokenizer(record["kind"], files), dictionary)
        if vocabulary.identity != record["identity"]:
            raise UserError(f"{dictionary} is not the dictionary that {manifest} was written with")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{manifest} is damaged or names no tokenizer: {error}") from error
    return vocabulary


def _from_files(directory: Path) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer files in a directory, or None if the directory contains no tokenizer.

    If there is no dict.txt, the dictionary is made from the tokenizer. For GPT-2, a missing dict.txt raises UserError.
    """
    dictionary = directory / DICTIONARY
    for kind, names in TOKENIZER_FILES.items():
        if all((directory / name).is_file() for name in names):
            tokenizer = make_tokenizer(kind, {name: _read(directory / name) for name in names})
            if kind == "gpt2" or dictionary.is_file():
                return _with_dictionary(tokenizer, dictionary)
            return new_vocabulary(tokenizer)
    return None


def _with_dictionary(tokenizer: Tokenizer, path: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer and the dict.txt at `path`. Errors are UserErrors that contain the path.

    Symbols that dict.txt lacks are reported as a warning.
    """
    try:
        vocabulary = Vocabulary(tokenizer, _read(path).decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    if vocabulary.missing:
        logger.warning(vocabulary.missing_message())
    return vocabulary


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
