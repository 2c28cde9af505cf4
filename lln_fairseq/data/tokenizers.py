"""Tokenizers behind one interface: lines of text to integer ids and to the symbols of a fairseq dictionary.

Implemented: SentencePiece, trained here, the byte-level BPE of GPT-2, and every tokenizer.json of Hugging Face. A
further tokenizer is one more subclass of Tokenizer and one more row of TOKENIZERS.
"""

import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lln_fairseq.data.reporting import DataError, say
from lln_fairseq.data.special_symbols import MASK, NUM_SPECIAL, SPECIAL_SYMBOLS
from lln_fairseq.data.text import MAX_LINE, spread_sample

VOCAB_SIZE = 32000
TRAIN_CHARACTERS = 20_000_000  # for a new model; more changes little and costs memory (unigram: 30 times it)
MOST_IDS = 1 << 24  # ten times what any tokenizer has
_OTHER_SPACE = re.compile(r"[^\S ]")


class Tokenizer(ABC):
    """What the programs need of a tokenizer. Symbols hold no white space; None stands for an id without a symbol."""

    kind: ClassVar[str]
    files: Mapping[str, bytes]  # what it is made of, by file name: kept beside the data, sent to other processes
    symbols_by_id: Sequence[str | None]  # the dictionary's symbol for each id; None (control, unknown) becomes <unk>

    @abstractmethod
    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        """The tokenizer's own ids of each line."""

    def symbols(self) -> list[str]:
        """All symbols of the vocabulary in the order of their ids, without fairseq's special ones."""
        return [symbol for symbol in self.symbols_by_id if symbol is not None]

    @abstractmethod
    def symbol_text(self, symbol: str) -> str:
        """What a symbol stands for in the midst of a line, with the space in front that is part of it."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file, used by the SentencePiece library (fairseq: `--bpe sentencepiece`)."""

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor  # here: a finished run must not pay for the import

        try:
            self.processor = p = SentencePieceProcessor(model_proto=model)
            pieces = [p.id_to_piece(i) for i in range(p.get_piece_size())]
        except (RuntimeError, UnicodeDecodeError) as error:
            raise DataError(f"not a SentencePiece model: {error}") from error
        if not pieces:
            raise DataError("not a SentencePiece model: it has no pieces")
        special = [p.is_control(i) or p.is_unknown(i) for i in range(len(pieces))]
        self.symbols_by_id = [None if s else piece for s, piece in zip(special, pieces, strict=True)]
        self.files = {"spm.model": model}

    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        return self.processor.encode(list(lines), out_type=int, num_threads=1)

    def symbol_text(self, symbol: str) -> str:
        """As the base class; of a single byte of a character: �."""
        is_byte = self.processor.is_byte(self.processor.piece_to_id(symbol))
        return self.processor.decode_pieces([symbol]) if is_byte else symbol.replace("▁", " ")

    def vocabulary_text(self) -> str:
        """The text of SentencePiece's .vocab file: piece, tab, score, one a line in the order of the ids."""
        ids = range(self.processor.get_piece_size())
        return "".join(f"{self.processor.id_to_piece(i)}\t{self.processor.get_score(i):g}\n" for i in ids)


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: a printable letter for every byte, the byte's own where that is printable."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {**{chr(byte): byte for byte in own}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


class GPT2Tokenizer(Tokenizer):
    """Byte-level BPE from encoder.json and vocab.bpe (fairseq: `--bpe gpt2`), with the ids of fairseq's GPT2BPE.

    tiktoken merges two neighbours when their concatenation is a token, GPT-2 when the pair is a merge. That is the same
    for a vocabulary in which every token encodes to itself, and a test holds it against fairseq's encoder.
    The symbol of id i is the decimal number i.
    """

    kind = "gpt2"
    _PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

    def __init__(self, encoder_json: bytes, vocab_bpe: bytes) -> None:
        import tiktoken  # here: a finished run must not pay for the import

        try:
            ids = json.loads(encoder_json)
            merges = [tuple(line.split()) for line in vocab_bpe.decode().split("\n")[1:-1]]
            letters = _byte_letters()
            tokens = [*letters, *(left + right for left, right in merges)]
            ranks = {bytes(letters[c] for c in token): ids[token] for token in tokens}
            special = {token: i for token, i in ids.items() if i >= len(tokens)}  # <|endoftext|>: never from text
            numbers = sorted(ids.values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DataError(
                f"encoder.json and vocab.bpe are no byte-level BPE that belong together: {error}"
            ) from error
        merged = [ids[token] for token in tokens[len(letters) :]]
        if merged != list(range(len(letters), len(tokens))) or numbers != list(range(len(ids))):
            raise DataError("encoder.json does not number the tokens in the order of vocab.bpe's merges")
        self.encoding = tiktoken.Encoding("gpt2", pat_str=self._PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.files = {"encoder.json": encoder_json, "vocab.bpe": vocab_bpe}
        self.symbols_by_id = [str(i) for i in range(self.encoding.n_vocab)]

    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        return [self.encoding.encode_ordinary(line) for line in lines]

    def symbol_text(self, symbol: str) -> str:
        """As the base class; of a part of a character: �."""
        return self.encoding.decode_single_token_bytes(int(symbol)).decode("utf-8", errors="replace")


@contextmanager
def _data_errors(what: str) -> Iterator[None]:
    """Errors of Hugging Face's library, which have no class of their own; panics of Rust are not even Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise DataError(f"{what}: {error}") from error


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json (byte-level BPE, WordPiece, ...), by Hugging Face's library; lln-fairseq convert writes one.

    The symbol of id i is the decimal number i, since tokens may hold what a dictionary cannot. Special tokens have no
    symbol: where a text spells one it is <unk>.
    """

    kind = "huggingface"
    _SPECIAL = (*SPECIAL_SYMBOLS, MASK, "[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            from tokenizers import Tokenizer as Library  # here: an extra
        except ModuleNotFoundError as error:
            raise DataError("tokenizer.json needs the package tokenizers: pip install 'lln-fairseq[hf]'") from error
        with _data_errors("not a tokenizer.json"):
            self.library = Library.from_str(tokenizer_json.decode())
        self.library.no_truncation()
        self.library.no_padding()
        if hasattr(self.library.model, "dropout"):  # of a BPE: the same text would get other ids every time
            self.library.model.dropout = None
        added = self.library.get_added_tokens_decoder()
        ids = self.library.get_vocab()
        if (largest := max(ids.values(), default=-1)) >= MOST_IDS:  # a list of all is made
            raise DataError(f"not a tokenizer.json: it has the id {largest}, and may have ids below {MOST_IDS}")
        known = {number for token, number in ids.items() if token not in self._SPECIAL}
        known -= {number for number, token in added.items() if token.special}
        self.symbols_by_id = [str(i) if i in known else None for i in range(largest + 1)]
        self.files = {"tokenizer.json": tokenizer_json}

    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        with _data_errors("tokenizer.json cannot encode a line"):
            return [encoded.ids for encoded in self.library.encode_batch(list(lines), add_special_tokens=False)]

    def symbol_text(self, symbol: str) -> str:
        """As the base class; of a part of a character: �."""
        token = self.library.id_to_token(int(symbol))
        if type(self.library.model).__name__ == "WordPiece":
            return token[2:] if token.startswith("##") else f" {token}"
        byte_level = type(self.library.decoder).__name__ == "ByteLevel"
        return self.library.decode([int(symbol)]) if byte_level else token.replace("▁", " ")


KINDS: tuple[type[Tokenizer], ...] = (SentencePieceTokenizer, GPT2Tokenizer, HuggingFaceTokenizer)
TOKENIZERS = {cls.kind: cls for cls in KINDS}
TOKENIZER_FILES = {
    "sentencepiece": ("spm.model",), "gpt2": ("encoder.json", "vocab.bpe"), "huggingface": ("tokenizer.json",)
}  # fmt: skip


def make_tokenizer(kind: str, files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of these files, as `Tokenizer.kind` and `Tokenizer.files` name them."""
    return TOKENIZERS[kind](*(files[name] for name in TOKENIZER_FILES[kind]))


def flat_ids(encoded: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all lines in one array, and the length of each line."""
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    return np.fromiter(chain.from_iterable(encoded), dtype=np.int32, count=int(lengths.sum())), lengths


def train_sentencepiece(
    lines: Iterable[str], vocab_size: int, model_type: str = "bpe", byte_fallback: bool = False, fold: bool = False
) -> bytes:
    """Train a SentencePiece model ("bpe" or "unigram") on `lines`; the same input gives the same bytes.

    For that: one thread, no sampling of the input, no path in the model (text and model pass through memory). No
    normalisation is applied, so the text survives encoding and decoding; but with `fold` the model itself takes case
    and variants of characters (NFKC) away wherever it is used, so that a small text has more examples of a word.
    Without `byte_fallback` every character of `lines` is in the vocabulary; with it the rarest 0.05% of characters,
    every unseen one and every space are spelt exactly too, as bytes: for a corpus with thousands of characters.
    `vocab_size` counts SentencePiece's three special pieces. Raises DataError where the text is too small, or has too
    many characters, for it.
    """
    import sentencepiece

    model, count = io.BytesIO(), 0

    def counted() -> Iterable[str]:
        nonlocal count
        for line in lines:
            count += 1
            # Other white space (no-break spaces) must not get into a symbol: dictionaries separate symbols by it.
            yield _OTHER_SPACE.sub(" ", line) if byte_fallback else line

    coverage: dict[str, Any] = {"character_coverage": 0.9995, "byte_fallback": True, "remove_extra_whitespaces": False}
    sentencepiece.set_random_generator_seed(1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(counted()),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            **(coverage if byte_fallback else {"character_coverage": 1.0}),
            normalization_rule_name="nmt_nfkc_cf" if fold else "identity",
            num_threads=1,
            max_sentence_length=MAX_LINE,  # bytes; longer lines would be left out silently
            minloglevel=3,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2] or error  # without the place in SentencePiece's sources
        raise DataError(f"SentencePiece cannot train {vocab_size} pieces on {count} lines: {reason}") from error
    return model.getvalue()


def train_on_corpus(lines: Iterable[str], vocab_size: int, model_type: str) -> SentencePieceTokenizer:
    """A tokenizer for a corpus of any size and any characters, trained on TRAIN_CHARACTERS spread over all of it."""
    sample = spread_sample(lines, TRAIN_CHARACTERS)
    say(f"training a SentencePiece model of {vocab_size} pieces on {sum(map(len, sample)) / 1e6:.1f} M characters")
    return SentencePieceTokenizer(train_sentencepiece(sample, vocab_size, model_type, byte_fallback=True))


def dictionary_text(symbols: Sequence[str], counts: Mapping[str, int], reserved: int = 0, multiple: int = 8) -> str:
    """The text of fairseq's dict.txt: "symbol count" lines in the given order, so that symbol i has id 4 + i.

    "madeupword" symbols fill up until 4 special symbols + lines + `reserved` symbols that a task adds later is a
    multiple of `multiple` (what tensor cores like). Raises DataError for symbols that fairseq could not read back.
    """
    taken = {*SPECIAL_SYMBOLS, MASK}
    for symbol in symbols:
        if symbol in taken or len(symbol.split()) != 1 or symbol != symbol.strip():
            raise DataError(f"the symbol {symbol!r} cannot stand in a fairseq dictionary (reserved, twice, or a space)")
        taken.add(symbol)
    padding = -(NUM_SPECIAL + len(symbols) + reserved) % multiple
    filler = [f"madeupword{i:04d}" for i in range(padding)]
    return "".join(f"{symbol} {counts.get(symbol, 0)}\n" for symbol in [*symbols, *filler])


def load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    """The tokenizer of a model file. Raises DataError where it is none."""
    return SentencePieceTokenizer(path.read_bytes())
