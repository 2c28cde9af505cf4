"""Tokenizers encode text reversibly, reject damaged files, and make dictionaries that fairseq can read."""

import random
import sys

import pytest
from fairseq.data import Dictionary
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.errors import UserError
from lln_fairseq.text.tokenizers import (
    SentencePieceTokenizer,
    dictionary_text,
    load_sentencepiece,
    make_tokenizer,
    train_sentencepiece,
)
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import decode, encode_line, small_gpt2

LINES = [f"The {a} {b} isn't “{c}” – é½ {a}{c}." for a in ("film", "plot") for b in ("that", "we") for c in "xyz"] * 3


def test_training_is_deterministic():
    assert train_sentencepiece(LINES, 60) == train_sentencepiece(LINES, 60)


def test_trained_tokenizer_has_the_requested_size_without_special_pieces():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(LINES, 60))

    assert len(tokenizer.symbols()) == 60 - 3
    assert not set(tokenizer.symbols()) & {"<s>", "</s>", "<unk>"}
    assert len(tokenizer.vocabulary_text().splitlines()) == 60


def test_decoding_restores_the_line():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(LINES, 60))

    for line in LINES:
        assert decode(tokenizer, encode_line(tokenizer, line)) == line
        assert set(encode_line(tokenizer, line)) <= set(tokenizer.symbols())


def test_folded_model_ignores_case():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(LINES, 60, fold=True))

    symbols = encode_line(tokenizer, "THE ﬁlm")  # with the ligature fi

    assert symbols == encode_line(tokenizer, "the film")
    assert "<unk>" not in symbols
    assert decode(tokenizer, symbols) == "the film"


def test_long_lines_are_used_for_training():
    tokenizer = SentencePieceTokenizer(train_sentencepiece([*LINES, "ab " * 5000 + "Ω"], 60))

    assert any("Ω" in symbol for symbol in tokenizer.symbols())


@pytest.mark.parametrize("vocab_size", [-1, 0, 5, 100_000])
def test_impossible_vocabulary_size_raises(vocab_size, capfd):
    with pytest.raises(UserError, match=f"cannot train {vocab_size} pieces"):
        train_sentencepiece(LINES, vocab_size)
    assert capfd.readouterr() == ("", "")


def test_empty_text_has_no_vocabulary():
    with pytest.raises(UserError, match="SentencePiece cannot train: the text is empty"):
        train_sentencepiece([], 10)


def test_file_that_is_not_a_sentencepiece_model_raises(tmp_path):
    (tmp_path / "file").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"/file: not a SentencePiece model"):
        load_sentencepiece(tmp_path / "file")


def test_sentencepiece_model_without_pieces_raises():
    with pytest.raises(UserError, match="not a SentencePiece model: it has no pieces"):
        SentencePieceTokenizer(b"")


def test_sentencepiece_model_with_a_piece_that_is_not_utf8_raises():
    model = train_sentencepiece(LINES, 60).replace("é".encode(), b"\xc3(", 1)

    with pytest.raises(UserError, match="not a SentencePiece model: 'utf-8' codec"):
        SentencePieceTokenizer(model)


def test_file_that_is_not_a_tokenizer_json_raises():
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        make_tokenizer("huggingface", {"tokenizer.json": b"{}"})


def test_missing_package_tokenizers_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(UserError, match=r"needs the package tokenizers: pip install 'lln-fairseq\[hf\]'"):
        make_tokenizer("huggingface", {"tokenizer.json": b"{}"})


def make_word_level_document():
    """Return the content of a tokenizer.json with two tokens."""
    ids = {"<unk>": 0, "a": 1}
    return tokenizer_json.document(ids, {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"})


def test_tokenizer_json_with_a_huge_id_raises():
    """Its list of symbols would need 30 GB."""
    content = make_word_level_document()
    content["model"]["vocab"]["b"] = 1 << 31

    with pytest.raises(UserError, match=r"not a tokenizer\.json: it has the id 2147483648, but"):
        make_tokenizer("huggingface", {"tokenizer.json": tokenizer_json.as_bytes(content)})


def test_tokenizer_json_on_which_the_library_panics_raises():
    content = make_word_level_document()
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}

    with pytest.raises(UserError, match=r"not a tokenizer\.json: .*Cannot parse precompiled_charsmap"):
        make_tokenizer("huggingface", {"tokenizer.json": tokenizer_json.as_bytes(content)})


def make_byte_level_bpe():
    """Return a tokenizer.json without merges, whose post-processor cuts white space off the offsets, as RoBERTa's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def make_word_piece():
    """Return an uncased tokenizer.json, which also removes accents."""
    words = ["[UNK]", "the", "film", "caf", "##e", "a", "##fe", "c", *"“”", "你", "好"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def make_unigram():
    """Return a tokenizer.json with SentencePiece's pieces, of which one is a prefix."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -1.0), ("▁film", -1.0), *((letter, -2.0) for letter in "acefé")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


@pytest.fixture(scope="module")
def span_tokenizers(tmp_path_factory):
    """Return tokenizers of all kinds by name."""
    tokenizers = {
        "sentencepiece": SentencePieceTokenizer(train_sentencepiece(LINES, 60)),
        "folded": SentencePieceTokenizer(train_sentencepiece(LINES, 60, fold=True)),
        "bytes": SentencePieceTokenizer(train_sentencepiece(LINES, 310, byte_fallback=True)),
        "gpt2": load_vocabulary(
            str(small_gpt2(tmp_path_factory.mktemp("spans") / "gpt2", " ".join(LINES), merges=20))
        ).tokenizer,
    }
    for make in (make_byte_level_bpe, make_word_piece, make_unigram):
        files = {"tokenizer.json": make().to_str().encode()}
        tokenizers[make.__name__.removeprefix("make_")] = make_tokenizer("huggingface", files)
    return tokenizers


SPAN_TOKENIZERS = ("sentencepiece", "folded", "bytes", "gpt2", "byte_level_bpe", "word_piece", "unigram")
NORMALIZING = ("folded", "word_piece", "unigram")


@pytest.mark.parametrize("name", SPAN_TOKENIZERS)
def test_spans_of_tokens_cover_the_line_in_order(name, span_tokenizers):
    tokenizer = span_tokenizers[name]
    generator = random.Random(0)
    parts = [*"abctheilmf", " ", "  ", " film", "\t", "\u3000", "é", "É", "ﬁ", "½", "你好", "😀", "👩‍👧", "İ"]
    for _ in range(300):
        line = "".join(generator.choices(parts, k=generator.randrange(12))).strip()
        symbols = tokenizer.line_symbols(line)
        spans = tokenizer.token_spans(line)

        assert len(spans) == len(symbols)
        assert spans == sorted(spans, key=lambda span: span[0])
        covered = set()
        for symbol, (start, end) in zip(symbols, spans, strict=True):
            assert 0 <= start <= end <= len(line)
            covered.update(range(start, end))
            text = tokenizer.symbol_text(symbol) if symbol else "�"
            if text.isascii() and name not in NORMALIZING:
                assert line[start:end].strip() == text.strip()
        lost = [character for position, character in enumerate(line) if position not in covered]
        assert not "".join(lost).replace("\u200d", "").strip()  # normalizers delete the joiner


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("sentencepiece", "the  film", ["th", "e", "film"]),
        ("folded", "THE ﬁlm", ["THE", "ﬁlm"]),
        ("bytes", "你 é", ["", "你", "你", "你", "é"]),
        ("gpt2", "é你", ["é", "é", "你", "你", "你"]),
        ("byte_level_bpe", "é 你", ["", "é", "é", "", "你", "你", "你"]),
        ("word_piece", "“The  CAFÉ”你好", ["“", "The", "CAF", "É", "”", "你", "好"]),
        ("word_piece", "café cafe\u0301", ["caf", "é", "caf", "e"]),
        ("unigram", "你 ﬁlm", ["", "你", "ﬁlm"]),
    ],
)
def test_span_is_the_text_of_the_token(name, line, expected, span_tokenizers):
    spans = span_tokenizers[name].token_spans(line)
    assert [line[start:end].strip() for start, end in spans] == expected


def test_tokenizer_in_a_directory_precedes_a_manifest_above_it(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "spm.model").write_bytes(train_sentencepiece(LINES, 60))

    assert load_vocabulary(str(tmp_path / "model")).tokenizer.kind == "sentencepiece"
    (tmp_path / "model" / "spm.model").unlink()
    with pytest.raises(UserError, match=r"manifest\.json names no tokenizer"):
        load_vocabulary(str(tmp_path / "model"))


def test_symbol_i_of_the_dictionary_has_id_4_plus_i(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text(dictionary_text(["▁b", "▁a", "c"], {"c": 7}, reserved=1), encoding="utf-8")

    dictionary = Dictionary.load(str(path))

    assert [dictionary.index(symbol) for symbol in ("▁b", "▁a", "c")] == [4, 5, 6]
    assert dictionary.count[6] == 7
    dictionary.add_symbol("<mask>")
    assert len(dictionary) == 8


@pytest.mark.parametrize("symbols", [["a", "a"], ["<s>"], ["<mask>"], ["a b"], [""], ["\u00a0"]])
def test_symbol_that_fairseq_cannot_read_raises(symbols):
    with pytest.raises(UserError, match="cannot be in a fairseq dictionary"):
        dictionary_text(symbols, {})


def test_symbol_text_of_a_single_byte_is_the_replacement_character():
    model = train_sentencepiece(["a film and a story"] * 3, 280, byte_fallback=True)
    tokenizer = SentencePieceTokenizer(model)

    symbols = encode_line(tokenizer, "a ï")

    assert [tokenizer.symbol_text(symbol) for symbol in symbols[-2:]] == ["�", "�"]
