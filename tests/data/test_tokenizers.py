"""The SentencePiece tokenizer and fairseq's dict.txt."""

import sys

import pytest
from fairseq.data import Dictionary

from data_prep.train_tokenizer import main
from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.tokenizers import (
    SentencePieceTokenizer,
    dictionary_text,
    load_sentencepiece,
    make_tokenizer,
    train_sentencepiece,
)
from lln_fairseq.data.vocabulary import load_vocabulary
from tests.data_prep.conftest import decode, encode_line

LINES = [f"The {a} {b} isn't “{c}” – é½ {a}{c}." for a in ("film", "plot") for b in ("that", "we") for c in "xyz"] * 3


def test_training_is_deterministic_and_decoding_exact():
    model = train_sentencepiece(LINES, 60)
    assert model == train_sentencepiece(LINES, 60)
    tokenizer = SentencePieceTokenizer(model)
    assert len(tokenizer.symbols()) == 60 - 3
    assert not set(tokenizer.symbols()) & {"<s>", "</s>", "<unk>"}
    for line in LINES:
        assert decode(tokenizer, encode_line(tokenizer, line)) == line
        assert set(encode_line(tokenizer, line)) <= set(tokenizer.symbols())
    assert len(tokenizer.vocabulary_text().splitlines()) == 60


def test_a_folded_model_does_not_see_case():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(LINES, 60, fold=True))
    symbols = encode_line(tokenizer, "THE ﬁlm")  # with the ligature
    assert symbols == encode_line(tokenizer, "the film")
    assert "<unk>" not in symbols
    assert decode(tokenizer, symbols) == "the film"


def test_long_lines_are_not_dropped_from_training():
    tokenizer = SentencePieceTokenizer(train_sentencepiece([*LINES, "ab " * 5000 + "Ω"], 60))
    assert any("Ω" in symbol for symbol in tokenizer.symbols())


@pytest.mark.parametrize("vocab_size", [-1, 0, 5, 100_000])
def test_impossible_vocabulary(vocab_size, capfd):
    with pytest.raises(DataError, match=f"cannot train {vocab_size} pieces"):
        train_sentencepiece(LINES, vocab_size)
    assert capfd.readouterr() == ("", "")


def test_not_a_model():
    with pytest.raises(DataError, match="not a SentencePiece model"):
        SentencePieceTokenizer(b"nonsense")


def test_a_model_whose_pieces_are_no_text_or_that_has_none():
    model = train_sentencepiece(LINES, 60)
    for spoilt in (model.replace("é".encode(), b"\xc3(", 1), b""):
        with pytest.raises(DataError, match=r"not a SentencePiece model: ('utf-8' codec|it has no pieces)"):
            SentencePieceTokenizer(spoilt)


def test_a_tokenizer_json_that_is_none_and_a_missing_package(monkeypatch):
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        make_tokenizer("huggingface", {"tokenizer.json": b"{}"})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"needs the package tokenizers: pip install 'lln-fairseq\[hf\]'"):
        make_tokenizer("huggingface", {"tokenizer.json": b"{}"})


SPOILT = {
    "an id that needs 30 GB": (lambda c: c["model"]["vocab"].update(b=1 << 31), "has the id 2147483648, and"),
    "what it panics of": (lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
                          "Cannot parse precompiled_charsmap"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_tokenizer_json_with(name):
    change, message = SPOILT[name]
    ids = {"<unk>": 0, "a": 1}
    content = tokenizer_json.document(ids, {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"})
    change(content)
    with pytest.raises(DataError, match=rf"not a tokenizer\.json: .*{message}"):
        make_tokenizer("huggingface", {"tokenizer.json": tokenizer_json.as_bytes(content)})


def test_a_directory_with_a_tokenizer_comes_before_a_manifest_above_it(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "spm.model").write_bytes(train_sentencepiece(LINES, 60))
    assert load_vocabulary(str(tmp_path / "model")).tokenizer.kind == "sentencepiece"
    (tmp_path / "model" / "spm.model").unlink()
    with pytest.raises(DataError, match=r"manifest\.json is damaged or names no tokenizer"):
        load_vocabulary(str(tmp_path / "model"))


def test_dictionary_gives_symbol_i_the_id_4_plus_i(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text(dictionary_text(["▁b", "▁a", "c"], {"c": 7}, reserved=1), encoding="utf-8")
    dictionary = Dictionary.load(str(path))
    assert [dictionary.index(symbol) for symbol in ("▁b", "▁a", "c")] == [4, 5, 6]
    assert dictionary.count[6] == 7
    dictionary.add_symbol("<mask>")
    assert len(dictionary) == 8


@pytest.mark.parametrize("symbols", [["a", "a"], ["<s>"], ["<mask>"], ["a b"], [""], ["\u00a0"]])
def test_dictionary_refuses_what_fairseq_cannot_read(symbols):
    with pytest.raises(DataError, match="cannot stand in a fairseq dictionary"):
        dictionary_text(symbols, {})


def test_command(tmp_path, capfd):
    (tmp_path / "text").write_text("\n".join(LINES), encoding="utf-8")
    arguments = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--vocab-size", "310"]
    assert main(arguments) == 0
    tokenizer = load_sentencepiece(tmp_path / "out/spm.model")
    assert decode(tokenizer, encode_line(tokenizer, "é ж")) == "é ж"
    capfd.readouterr()
    assert main(arguments) == 1
    assert "out/spm.model" in capfd.readouterr().err


def test_the_texts_of_a_lines_symbols_make_the_line(gpt2):
    line = "the film's story, naïve plots"
    for tokenizer in (
        load_vocabulary(str(gpt2)).tokenizer,
        SentencePieceTokenizer(train_sentencepiece([line] * 3, 45)),
    ):
        text = "".join(map(tokenizer.symbol_text, encode_line(tokenizer, line)))
        assert text.replace("��", "ï").strip() == line
    spelt = SentencePieceTokenizer(train_sentencepiece(["a film and a story"] * 3, 280, byte_fallback=True))
    symbols = encode_line(spelt, "a ï")
    assert [spelt.symbol_text(symbol) for symbol in symbols[-2:]] == ["�", "�"]
