"""Vocabularies are loaded from everything that --tokenizer accepts, and different ones have different identities."""

import json
import shutil

import numpy as np
import pytest

from lln_fairseq.errors import UserError
from lln_fairseq.text.parallel_encoder import encode_block
from lln_fairseq.text.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lln_fairseq.text.vocabulary import Vocabulary, load_vocabulary, new_vocabulary
from tests.data_prep.conftest import TEXT, WORDS, text_of
from tests.text_runs import fairseq_dictionary

LINES = [TEXT.replace("\n", " "), " ".join(WORDS)] * 5


@pytest.fixture(scope="module")
def model():
    return train_sentencepiece(LINES, 350, byte_fallback=True)


@pytest.fixture
def prepared(tmp_path, model):
    """Return a directory as the data programs write it, with dict.txt in the subdirectory lm."""
    new = new_vocabulary(SentencePieceTokenizer(model))
    out = tmp_path / "prepared"
    (out / "lm").mkdir(parents=True)
    (out / "spm.model").write_bytes(model)
    counts = np.arange(new.size)
    (out / "lm/dict.txt").write_text(new.with_counts(counts).dictionary, encoding="utf-8")
    (out / "manifest.json").write_text(json.dumps({"tokenizer": new.record(directory="lm/")}))
    return out


@pytest.fixture
def gpt2_copy(gpt2, tmp_path):
    """Return a copy of the GPT-2 files, which a test may change."""
    return shutil.copytree(gpt2, tmp_path / "copy")


def test_directory_subdirectory_and_model_file_give_the_same_vocabulary(tmp_path, prepared, model):
    (tmp_path / "m.model").write_bytes(model)

    loaded = [load_vocabulary(str(source)) for source in (prepared, prepared / "lm", tmp_path / "m.model")]

    assert len({v.identity for v in loaded}) == 1
    assert len({tuple(v.table) for v in loaded}) == 1
    assert loaded[0].dictionary == (prepared / "lm/dict.txt").read_text(encoding="utf-8")


def test_different_vocabularies_have_different_identities(gpt2, gpt2_copy, prepared):
    lines = (gpt2_copy / "dict.txt").read_text().splitlines(keepends=True)
    (gpt2_copy / "dict.txt").write_text("".join([lines[1], lines[0], *lines[2:]]))

    original, swapped, sentencepiece = (load_vocabulary(str(path)) for path in (gpt2, gpt2_copy, prepared))

    assert len({original.identity, swapped.identity, sentencepiece.identity}) == 3
    assert (original.table != swapped.table).sum() == 2


def test_dictionary_without_most_symbols_of_the_tokenizer_raises(gpt2_copy):
    path = gpt2_copy / "dict.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 3]))

    with pytest.raises(UserError, match=r"dict\.txt: .* lacks '\d+' \(\d+ of \d+ missing"):
        load_vocabulary(str(gpt2_copy))


def test_gpt2_files_that_do_not_belong_together_raise(gpt2_copy):
    (gpt2_copy / "vocab.bpe").write_text("#version\nq q\n")

    with pytest.raises(UserError, match="belong together"):
        load_vocabulary(str(gpt2_copy))


def test_dictionary_that_does_not_match_the_manifest_raises(prepared):
    path = prepared / "lm/dict.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")

    with pytest.raises(UserError, match="is not the dictionary that"):
        load_vocabulary(str(prepared))


def test_model_that_does_not_match_the_manifest_raises(prepared):
    (prepared / "spm.model").write_bytes(b"other")

    with pytest.raises(UserError, match=r"spm\.model is not the file that"):
        load_vocabulary(str(prepared))


def test_manifest_without_a_tokenizer_raises(prepared):
    (prepared / "manifest.json").write_text("{}")

    with pytest.raises(UserError, match="names no tokenizer"):
        load_vocabulary(str(prepared))


def test_missing_tokenizer_raises(tmp_path):
    with pytest.raises(UserError, match="no such tokenizer: "):
        load_vocabulary(str(tmp_path / "none"))
    with pytest.raises(UserError, match="has neither"):
        load_vocabulary(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("word", r"dict\.txt: dict\.txt, line 1: expected a symbol and its count, found 'word"),
        ("<unk> 1", "line 1: the symbol '<unk>' occurs twice"),
        ("\udcff 1", "is not UTF-8"),
    ],
)
def test_dictionary_that_fairseq_cannot_read_raises(gpt2_copy, line, message):
    text = f"{line}\n{(gpt2_copy / 'dict.txt').read_text()}"
    (gpt2_copy / "dict.txt").write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(UserError, match=message):
        load_vocabulary(str(gpt2_copy))


@pytest.mark.parametrize("token_id", [2**31, "9", -1])
def test_gpt2_tokens_that_are_not_numbered_consecutively_raise(gpt2_copy, token_id):
    tokens = json.loads((gpt2_copy / "encoder.json").read_text())
    tokens["<|endoftext|>"] = token_id
    (gpt2_copy / "encoder.json").write_text(json.dumps(tokens))

    with pytest.raises(UserError, match=r"does not number the tokens|belong together"):
        load_vocabulary(str(gpt2_copy))


def test_byte_fallback_encodes_every_text(model):
    new = new_vocabulary(SentencePieceTokenizer(model))

    for line in [*LINES, "never seen: ж\u00a0\t🙃  two  spaces"]:
        ids = new.table[new.tokenizer.encode_ids([line])[0]]
        assert 3 not in ids
        assert text_of(new, ids) == line


def test_symbols_contain_no_white_space(model):
    new = new_vocabulary(SentencePieceTokenizer(model))

    assert all(len(symbol.split()) == 1 for symbol in new.symbols)


def test_tokenizer_with_a_special_symbol_as_text_raises():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(["the film isn't new"] * 9, 20))
    dictionary = new_vocabulary(tokenizer).dictionary
    tokenizer.symbols_by_id[2] = "</s>"  # as in a damaged model that does not mark it as a control symbol

    with pytest.raises(UserError, match="it lacks '</s>'"):
        Vocabulary(tokenizer, dictionary)


FOREIGN = ["the film É and É", "Éva saw 東京 and 京都", "東 京 東京", "a\u00a0film", "\u3000", "ÉÀ\u00a0É films"]


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "char"])
def test_ids_are_those_of_fairseq_preprocess(model_type, tmp_path, caplog):
    """Text without a piece has a symbol of its own, white space separates symbols, and unused pieces have none."""
    lines = [*LINES, *FOREIGN]
    data = train_sentencepiece([*LINES, "qx qx qx"], 58, model_type)
    tokenizer = SentencePieceTokenizer(data)
    dictionary = fairseq_dictionary(tokenizer, lines, tmp_path / "dict.txt")
    (tmp_path / "spm.model").write_bytes(data)

    vocabulary = load_vocabulary(str(tmp_path))

    unseen = ["É 東京 京 東東 ÉÀÉ", "qx film", "京\u00a0都東京", "\u00a0É"]
    ids, lengths = encode_block(vocabulary, [*lines, *unseen])
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    for line, row in zip([*lines, *unseen], rows, strict=True):
        pieces = " ".join(tokenizer.processor.encode(line, out_type=str))
        assert row.tolist() == dictionary.encode_line(pieces, add_if_not_exist=False).tolist(), line
        assert len(tokenizer.token_spans(line)) == len(row) - 1
    text_ids = set(np.concatenate(rows[: len(lines)]))
    assert {dictionary.index("É"), dictionary.index("東京")} < text_ids
    assert 3 not in text_ids
    missing = len(vocabulary.missing)
    assert missing >= 1  # at least "q"
    known = len(tokenizer.symbols())
    assert f"dict.txt lacks {missing} of the tokenizer's {known} symbols, such as" in caplog.text


def test_dictionary_of_another_tokenizer_is_rejected(tmp_path):
    """Half of the pieces may be missing, unless dict.txt has symbols that no text has with this tokenizer."""
    tokenizer = SentencePieceTokenizer(train_sentencepiece(LINES, 60))
    other = SentencePieceTokenizer(train_sentencepiece(LINES, 80))
    symbols = tokenizer.symbols()
    half = len(symbols) // 2

    def dictionary(symbols):
        return "".join(f"{symbol} 1\n" for symbol in symbols)

    assert len(Vocabulary(tokenizer, dictionary([*symbols[half:], "É", "madeupword0000"])).missing) == half
    with pytest.raises(UserError, match=rf"it lacks .* \({half + 2} of {len(symbols)} missing; at most 50% may be\)"):
        Vocabulary(tokenizer, dictionary(symbols[half + 2 :]))
    others = [symbol for symbol in other.symbols() if symbol != symbols[0]]
    with pytest.raises(UserError, match=rf"{len(set(others) - set(symbols))} of its {len(others)} symbols are not"):
        Vocabulary(tokenizer, dictionary(others))
