"""Tokenizers with a common interface: they turn lines of text into integer ids, which stand for dictionary symbols.

This module supports SentencePiece models, which it can also train, GPT-2's byte-level BPE, and Hugging Face's
tokenizer.json. To add a tokenizer, write a subclass of Tokenizer and add it to TOKENIZERS and TOKENIZER_FILES.
"""

import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lln_fairseq.errors import UserError
from lln_fairseq.terminal import print_status
from lln_fairseq.text.read_lines import MAX_LINE, sample_lines_evenly
from lln_fairseq.text.special_symbols import MASK, SPECIAL_SYMBOLS, format_dictionary

VOCAB_SIZE = 32000
TRAIN_CHARACTERS = 20_000_000  # for training a model; more hardly improves it, and unigram needs 30 bytes for each
MAX_IDS = 1 << 24  # ten times as many as any known tokenizer has
_PIECE_SPACE = "▁"  # stands for a space in SentencePiece's pieces
_OTHER_SPACE = re.compile(r"[^\S ]")  # white space other than the space itself


class Tokenizer(ABC):
    """Interface of all tokenizers.

    A tokenizer numbers its tokens with its own ids, which differ from fairseq's ids. The symbol of an id is its entry
    in fairseq's dict.txt, and contains no white space. An id without a symbol becomes fairseq's <unk>. The symbols of a
    line with one of `open_ids` depend on its text: `line_symbols` returns them.
    """

    kind: ClassVar[str]  # a key of TOKENIZERS, which manifests record
    files: Mapping[str, bytes]  # the contents of the files from which `make_tokenizer` recreates the tokenizer
    symbols_by_id: Sequence[str | None]  # the symbol for each of the tokenizer's ids; None for ids that become <unk>
    open_ids: frozenset[int] = frozenset()

    @abstractmethod
    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the tokenizer's own ids of each line, without special tokens."""

    @abstractmethod
    def token_spans(self, line: str) -> list[tuple[int, int]]:
        """Return the start and the end, in characters of the line, of the text of each symbol of `line_symbols`.

        A token that encodes only some of a character's bytes has the span of the whole character, or of several if the
        library knows no more. The span may include white space around the token.
        """

    def symbols(self) -> list[str]:
        """Return all symbols, in the order of the tokenizer's ids. Ids without a symbol are skipped."""
        return [symbol for symbol in self.symbols_by_id if symbol is not None]

    def line_symbols(self, line: str) -> list[str | None]:
        """Return the symbols of a line. None, and a symbol that dict.txt lacks, become <unk>."""
        (ids,) = self.encode_ids([line])
        return [self.symbols_by_id[i] for i in ids]

    def encode_masked(self, left: str, right: str) -> tuple[list[int], int] | None:
        """Return the tokenizer's own ids of left<mask>right, and the position of <mask>; None if it has no <mask>."""
        return None

    def can_give(self, symbol: str) -> bool:
        """Return True if a line can have this symbol."""
        return symbol in self._known_symbols

    @cached_property
    def _known_symbols(self) -> frozenset[str]:
        return frozenset(self.symbols())

    @abstractmethod
    def symbol_text(self, symbol: str) -> str:
        """Return the text that a symbol stands for in the middle of a line, with a leading space if it begins a word.

        If the symbol stands for only some bytes of a character, the text is "�".
        """


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, used through the SentencePiece library (fairseq: `--bpe sentencepiece`).

    The symbols are the pieces, without control pieces and the unknown piece. As in `spm_encode --output_format=piece`,
    text without a piece is its own symbol, and as in fairseq-preprocess, white space separates symbols.
    `model` is the content of a model file; anything else raises UserError.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor  # slow to import, and not needed if a build is finished

        try:
            self.processor = SentencePieceProcessor(model_proto=model)
            pieces = [self.processor.id_to_piece(i) for i in range(self.processor.get_piece_size())]
        except (RuntimeError, UnicodeDecodeError) as error:
            raise UserError(f"not a SentencePiece model: {error}") from error
        if not pieces:
            raise UserError("not a SentencePiece model: it has no pieces")
        symbols: list[str | None] = []
        for i, piece in enumerate(pieces):
            is_special = self.processor.is_control(i) or self.processor.is_unknown(i)
            symbols.append(None if is_special else piece)
        self.symbols_by_id = symbols
        with_space = [i for i, piece in enumerate(pieces) if piece.split() != [piece]]
        self.open_ids = frozenset([self.processor.unk_id(), *with_space])
        has_bytes = any(self.processor.is_byte(i) for i in range(len(pieces)))
        self.characters: frozenset[str] | None = None  # those with a piece; None if every text has pieces
        if not has_bytes:
            self.characters = frozenset(piece for piece in self.symbols() if len(piece) == 1)
        self.files = {"spm.model": model}

    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        return self.processor.encode(list(lines), out_type=int, num_threads=1)

    def line_symbols(self, line: str) -> list[str | None]:
        return list(" ".join(self.processor.encode(line, out_type=str)).split())

    def can_give(self, symbol: str) -> bool:
        return super().can_give(symbol) or (self.characters is not None and self.characters.isdisjoint(symbol))

    def token_spans(self, line: str) -> list[tuple[int, int]]:
        spans = []
        for piece, start, end in self._pieces_with_spans(line):
            # If several pieces encode one character, the library gives the character to the last of them.
            if start == end and piece != _PIECE_SPACE:
                end = start + 1
            words = [word.span() for word in re.finditer(r"\S+", line[start:end])]
            if len(piece.split()) == len(words) != 1:
                spans += [(start + first, start + last) for first, last in words]
            else:  # also if a normalizer changed the text
                spans += [(start, end)] * len(piece.split())
        return spans

    def _pieces_with_spans(self, line: str) -> list[tuple[str, int, int]]:
        processor: Any = self.processor  # the types of one version of the library do not have the methods of another
        if hasattr(processor, "EncodeAsOffsetMapping"):
            encoded = processor.EncodeAsOffsetMapping(line)
            spans = zip(encoded["pieces"], encoded["offsets"], strict=True)
            return [(piece, start, end) for piece, (start, end) in spans]
        encoded = processor.EncodeAsImmutableProto(line)  # before SentencePiece 0.2.2
        return [(piece.piece, piece.begin, piece.end) for piece in encoded.pieces]

    def symbol_text(self, symbol: str) -> str:
        if self.processor.is_byte(self.processor.piece_to_id(symbol)):
            return self.processor.decode_pieces([symbol])
        return symbol.replace(_PIECE_SPACE, " ")

    def vocabulary_text(self) -> str:
        """Return the content of SentencePiece's .vocab file: one line for each id, with a piece, a tab and a score."""
        lines = []
        for i in range(self.processor.get_piece_size()):
            lines.append(f"{self.processor.id_to_piece(i)}\t{self.processor.get_score(i):g}\n")
        return "".join(lines)


def _byte_letters() -> dict[str, int]:
    """Return {character: byte} for the 256 characters that represent bytes in GPT-2's files.

    A printable byte is represented by its own character. The remaining bytes are represented by the characters U+0100,
    U+0101 and so on. The entries are in the order of GPT-2's ids: first the printable bytes, then the remaining ones.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    remaining = [byte for byte in range(256) if byte not in printable]
    for i, byte in enumerate(remaining):
        letters[chr(256 + i)] = byte
    return letters


def _read_gpt2_files(encoder_json: bytes, vocab_bpe: bytes) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return {bytes: id} of the ordinary tokens and {name: id} of the special tokens, such as <|endoftext|>.

    UserError is raised if the contents of the files are damaged or do not belong together. Also if the ids are not
    numbered from 0 in this order: single bytes, merges in the order of vocab.bpe, special tokens.
    """
    try:
        ids = json.loads(encoder_json)
        merges = [tuple(line.split()) for line in vocab_bpe.decode().split("\n")[1:-1]]
        letters = _byte_letters()
        merged_tokens = [left + right for left, right in merges]
        tokens = [*letters, *merged_tokens]
        ranks = {}
        for token in tokens:
            ranks[bytes(letters[letter] for letter in token)] = ids[token]
        special = {token: i for token, i in ids.items() if i >= len(tokens)}
        sorted_ids = sorted(ids.values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(
            f"encoder.json and vocab.bpe are not a byte-level BPE, or do not belong together: {error}"
        ) from error
    merged_ids = [ids[token] for token in merged_tokens]
    if merged_ids != list(range(len(letters), len(tokens))) or sorted_ids != list(range(len(ids))):
        raise UserError("encoder.json does not number the tokens in the order of vocab.bpe's merges")
    return ranks, special


class GPT2Tokenizer(Tokenizer):
    """A byte-level BPE like GPT-2's, with the same ids as fairseq's `--bpe gpt2`, from the contents of its two files.

    The symbol of id i is the decimal number i. The name of a special token in a text, such as <|endoftext|>, is encoded
    as ordinary text.

    The ids are computed by tiktoken. Unlike the original BPE, tiktoken merges two neighbors whenever their
    concatenation is a token, even if the pair is not listed in vocab.bpe. Both give the same ids if every token, taken
    as text, encodes to itself; a test verifies this for GPT-2.
    """

    kind = "gpt2"
    _PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

    def __init__(self, encoder_json: bytes, vocab_bpe: bytes) -> None:
        import tiktoken  # slow to import, and not needed if a build is finished

        ranks, special = _read_gpt2_files(encoder_json, vocab_bpe)
        self.encoding = tiktoken.Encoding("gpt2", pat_str=self._PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.files = {"encoder.json": encoder_json, "vocab.bpe": vocab_bpe}
        self.symbols_by_id = [str(i) for i in range(self.encoding.n_vocab)]

    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        return [self.encoding.encode_ordinary(line) for line in lines]

    def token_spans(self, line: str) -> list[tuple[int, int]]:
        character_of_byte: list[int] = []
        for position, character in enumerate(line):
            character_of_byte += [position] * len(character.encode())
        spans = []
        first_byte = 0
        for token in self.encoding.encode_ordinary(line):
            last_byte = first_byte + len(self.encoding.decode_single_token_bytes(token)) - 1
            spans.append((character_of_byte[first_byte], character_of_byte[last_byte] + 1))
            first_byte = last_byte + 1
        return spans

    def symbol_text(self, symbol: str) -> str:
        return self.encoding.decode_single_token_bytes(int(symbol)).decode("utf-8", errors="replace")


@contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Turn every error of Hugging Face's library in the `with` block into a UserError that begins with `problem`.

    The library has no exception class of its own: it raises plain Exceptions, and a panic in its Rust code is a
    BaseException. KeyboardInterrupt and SystemExit are raised unchanged.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {error}") from error


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's library (byte-level BPE, WordPiece, ...).

    The symbol of id i is the decimal number i, because tokens can contain characters that dict.txt cannot contain. The
    name of a special token in a text becomes <unk>. Truncation, padding and dropout are turned off.

    `tokenizer_json` is the content of a tokenizer.json, such as `lln-fairseq convert` writes. UserError is raised if it
    is something else, if an id is MAX_IDS or more, or if the library is not installed.
    """

    kind = "huggingface"
    _SPECIAL = (*SPECIAL_SYMBOLS, MASK, "[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            from tokenizers import Tokenizer as LibraryTokenizer  # an optional dependency
        except ModuleNotFoundError as error:
            raise UserError("tokenizer.json needs the package tokenizers: pip install 'lln-fairseq[hf]'") from error
        with _library_errors("not a tokenizer.json"):
            self.library = LibraryTokenizer.from_str(tokenizer_json.decode())
        self.library.no_truncation()
        self.library.no_padding()
        if hasattr(self.library.model, "dropout"):  # with BPE dropout, a text would get other ids every time
            self.library.model.dropout = None
        ids = self.library.get_vocab()
        largest = max(ids.values(), default=-1)
        if largest >= MAX_IDS:  # the list of all symbols would not fit into memory
            raise UserError(f"not a tokenizer.json: it has the id {largest}, but ids must be below {MAX_IDS}")
        added_tokens = self.library.get_added_tokens_decoder()
        special_ids = {i for i, token in added_tokens.items() if token.special}
        text_ids = {i for token, i in ids.items() if token not in self._SPECIAL} - special_ids
        self.symbols_by_id = [str(i) if i in text_ids else None for i in range(largest + 1)]
        self.files = {"tokenizer.json": tokenizer_json}

    def encode_ids(self, lines: Sequence[str]) -> list[list[int]]:
        with _library_errors("tokenizer.json cannot encode a line"):
            encodings = self.library.encode_batch(list(lines), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def encode_masked(self, left: str, right: str) -> tuple[list[int], int] | None:
        for token in (MASK, "[MASK]"):
            with _library_errors("tokenizer.json cannot encode a line"):
                encoding = self.library.encode(left + token + right, add_special_tokens=False)
            for place, (start, end) in enumerate(encoding.offsets):  # those of <mask> can include white space
                if encoding.ids[place] == self.library.token_to_id(token) and start <= len(left) < end:
                    return encoding.ids, place
        return None

    def token_spans(self, line: str) -> list[tuple[int, int]]:
        with _library_errors("tokenizer.json cannot encode a line"):
            encoding = self.library.encode_batch([line], add_special_tokens=False)[0]
        spans = []
        for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            if token == _PIECE_SPACE:  # the library gives the prefix of the first word the first character of the word
                end = start
            spans.append((start, end))
        return spans

    def symbol_text(self, symbol: str) -> str:
        token = self.library.id_to_token(int(symbol))
        if type(self.library.model).__name__ == "WordPiece":
            if token.startswith("##"):
                return token[2:]
            return f" {token}"
        if type(self.library.decoder).__name__ == "ByteLevel":
            return self.library.decode([int(symbol)])
        return token.replace("▁", " ")


TOKENIZERS: dict[str, type[Tokenizer]] = {
    "sentencepiece": SentencePieceTokenizer,
    "gpt2": GPT2Tokenizer,
    "huggingface": HuggingFaceTokenizer,
}
TOKENIZER_FILES = {  # in the order of the constructors' arguments
    "sentencepiece": ("spm.model",),
    "gpt2": ("encoder.json", "vocab.bpe"),
    "huggingface": ("tokenizer.json",),
}


def make_tokenizer(kind: str, files: Mapping[str, bytes]) -> Tokenizer:
    """Create a tokenizer of a kind in TOKENIZERS from the contents of its files; further files are ignored."""
    contents = [files[name] for name in TOKENIZER_FILES[kind]]
    return TOKENIZERS[kind](*contents)


def train_sentencepiece(
    lines: Iterable[str], vocab_size: int, model_type: str = "bpe", byte_fallback: bool = False, fold: bool = False
) -> bytes:
    """Train a SentencePiece model, and return the content of its model file.

    The same input gives the same bytes: training uses one thread and no random sampling, and the model contains no
    path.

    Args:
        lines: the text; it is read once. Lines of more than MAX_LINE bytes are skipped.
        vocab_size: the number of pieces, including SentencePiece's three special pieces.
        model_type: "bpe", "unigram" or "char". With "char", the pieces are single characters, and there may be fewer of
            them than `vocab_size`.
        byte_fallback: encode unseen characters, and the rarest ones (0.05 % of the text), as bytes, and keep repeated
            spaces. Use this for text with thousands of different characters. Without byte fallback, the vocabulary
            contains every character of the text.
        fold: ignore case and character variants (NFKC), so that a small text has more examples of each word. Without
            `fold`, text is not normalized.

    Raises:
        UserError: if SentencePiece cannot train, usually because the text is too small, or has too many different
            characters, for `vocab_size` pieces.
    """
    import sentencepiece

    model = io.BytesIO()
    lines_read = 0

    def counted_lines() -> Iterable[str]:
        nonlocal lines_read
        for line in lines:
            lines_read += 1
            if byte_fallback:
                # A piece with a no-break space would be a symbol with white space, which separates fields in dict.txt.
                line = _OTHER_SPACE.sub(" ", line)
            yield line

    coverage: dict[str, Any] = {"character_coverage": 1.0}
    if byte_fallback:
        coverage = {"character_coverage": 0.9995, "byte_fallback": True, "remove_extra_whitespaces": False}
    sentencepiece.set_random_generator_seed(1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(counted_lines()),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            **coverage,
            normalization_rule_name="nmt_nfkc_cf" if fold else "identity",
            num_threads=1,
            max_sentence_length=MAX_LINE,  # bytes; longer lines would be skipped silently
            minloglevel=3,
        )
    except (RuntimeError, OSError) as error:
        if lines_read == 0:
            raise UserError("SentencePiece cannot train: the text is empty") from error
        reason = str(error).rpartition("] ")[2] or error  # without the position in SentencePiece's source code
        raise UserError(f"SentencePiece cannot train {vocab_size} pieces on {lines_read} lines: {reason}") from error
    return model.getvalue()


def train_on_corpus(lines: Iterable[str], vocab_size: int, model_type: str) -> SentencePieceTokenizer:
    """Train a SentencePiece tokenizer with byte fallback on a large text, and print a status line.

    The lines are read once. At most TRAIN_CHARACTERS characters are used, sampled evenly from the lines. The remaining
    arguments are those of `train_sentencepiece`.
    """
    sample = sample_lines_evenly(lines, TRAIN_CHARACTERS)
    millions = sum(map(len, sample)) / 1e6
    print_status(f"training a SentencePiece model of {vocab_size} pieces on {millions:.1f} M characters")
    return SentencePieceTokenizer(train_sentencepiece(sample, vocab_size, model_type, byte_fallback=True))


def dictionary_text(symbols: Sequence[str], counts: Mapping[str, int], reserved: int = 0) -> str:
    """Return the content of dict.txt for the symbols of a tokenizer; see `format_dictionary` for the arguments.

    UserError is raised if a symbol occurs twice, is a special symbol or <mask>, is empty, or contains white space,
    since fairseq could not read it in a text.
    """
    taken = {*SPECIAL_SYMBOLS, MASK}
    for symbol in symbols:
        if symbol in taken or len(symbol.split()) != 1 or symbol != symbol.strip():
            raise UserError(
                f"the symbol {symbol!r} cannot be in a fairseq dictionary: it is special, occurs twice, or is not a "
                "single word"
            )
        taken.add(symbol)
    return format_dictionary(symbols, counts, reserved)


def load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
