"""Tokenizers behind one interface: a line of text to the symbols of a fairseq dictionary and back.

Implemented: SentencePiece, trained here. A further tokenizer is one more subclass of Tokenizer.
"""

import io
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from data_prep.command import DataError

# What fairseq's Dictionary always puts first, in this order; never written to dict.txt.
FAIRSEQ_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"  # the masked_lm and sentence_prediction tasks append it themselves


class Tokenizer(ABC):
    """What the programs need of a tokenizer. Symbols hold no white space; one that is not in `symbols()` is <unk>."""

    @abstractmethod
    def symbols(self) -> list[str]:
        """All symbols of the vocabulary in the order of dict.txt, without fairseq's special ones."""

    @abstractmethod
    def encode(self, line: str) -> list[str]:
        """The symbols of one line of text."""

    @abstractmethod
    def decode(self, symbols: Sequence[str]) -> str:
        """The text of these symbols: decode(encode(line)) == line for clean text with known characters."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file, used by the SentencePiece library (fairseq: `--bpe sentencepiece`)."""

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor  # here: a finished run must not pay for the import

        try:
            self.processor = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"not a SentencePiece model: {error}") from error

    def symbols(self) -> list[str]:
        processor = self.processor
        ids = range(processor.get_piece_size())
        return [processor.id_to_piece(i) for i in ids if not processor.is_control(i) and not processor.is_unknown(i)]

    def encode(self, line: str) -> list[str]:
        return self.processor.encode(line, out_type=str)

    def decode(self, symbols: Sequence[str]) -> str:
        return self.processor.decode_pieces(list(symbols))

    def vocabulary_text(self) -> str:
        """The text of SentencePiece's .vocab file: piece, tab, score, one a line in the order of the ids."""
        ids = range(self.processor.get_piece_size())
        return "".join(f"{self.processor.id_to_piece(i)}\t{self.processor.get_score(i):g}\n" for i in ids)


def train_sentencepiece(lines: Sequence[str], vocab_size: int) -> bytes:
    """Train a byte-pair SentencePiece model on `lines`; the same lines and size give the same bytes.

    For that: one thread, no sampling of the input, no path in the model (text and model pass through memory), and
    byte-pair merges, which count and do not do floating-point EM. Every character of `lines` is in the vocabulary
    and no normalisation is applied, so the text survives encoding and decoding. `vocab_size` counts SentencePiece's
    three special pieces. Raises DataError where the text is too small, or has too many characters, for it.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(list(lines)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            num_threads=1,
            max_sentence_length=1 << 24,  # bytes; longer lines would be left out silently
            minloglevel=3,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("] ")[2] or error  # without the place in SentencePiece's sources
        raise DataError(f"SentencePiece cannot train {vocab_size} pieces on {len(lines)} lines: {reason}") from error
    return model.getvalue()


def count_symbols(tokenizer: Tokenizer, lines: Iterable[str]) -> Counter[str]:
    """How often each symbol occurs in `lines`."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(tokenizer.encode(line))
    return counts


def dictionary_text(symbols: Sequence[str], counts: Mapping[str, int], reserved: int = 0, multiple: int = 8) -> str:
    """The text of fairseq's dict.txt: "symbol count" lines in the given order, so that symbol i has id 4 + i.

    "madeupword" symbols fill up until 4 special symbols + lines + `reserved` symbols that a task adds later is a
    multiple of `multiple` (what tensor cores like). Raises DataError for symbols that fairseq could not read back.
    """
    taken = {*FAIRSEQ_SPECIAL, MASK}
    for symbol in symbols:
        if symbol in taken or len(symbol.split()) != 1 or symbol != symbol.strip():
            raise DataError(f"the symbol {symbol!r} cannot stand in a fairseq dictionary (reserved, twice, or a space)")
        taken.add(symbol)
    padding = -(len(FAIRSEQ_SPECIAL) + len(symbols) + reserved) % multiple
    filler = [f"madeupword{i:04d}" for i in range(padding)]
    return "".join(f"{symbol} {counts.get(symbol, 0)}\n" for symbol in [*symbols, *filler])


def load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    """The tokenizer of a model file. Raises DataError where it is none."""
    return SentencePieceTokenizer(path.read_bytes())
