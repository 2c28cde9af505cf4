"""What --tokenizer takes, and that tokenizers which differ are told apart."""

import json
import shutil

import numpy as np
import pytest

from lln_fairseq.data import vocabulary
from lln_fairseq.data.files import sha256_bytes
from lln_fairseq.data.published_files import Published
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lln_fairseq.data.vocabulary import Vocabulary, load_vocabulary, new_vocabulary
from tests.data_prep.conftest import TEXT, WORDS, text_of

LINES = [TEXT.replace("\n", " "), " ".join(WORDS)] * 5


@pytest.fixture(scope="module")
def model():
    return train_sentencepiece(LINES, 350, byte_fallback=True)


@pytest.fixture
def prepared(tmp_path, model):
    """A directory as the programs leave it."""
    ours = new_vocabulary(SentencePieceTokenizer(model))
    out = tmp_path / "prepared"
    (out / "lm").mkdir(parents=True)
    (out / "spm.model").write_bytes(model)
    counts = np.arange(ours.size)
    (out / "lm/dict.txt").write_text(ours.with_counts(counts).dictionary, encoding="utf-8")
    (out / "manifest.json").write_text(json.dumps({"tokenizer": ours.record(folder="lm/")}))
    return out


def test_all_ways_to_name_the_same_one(tmp_path, prepared, model):
    (tmp_path / "m.model").write_bytes(model)
    given = [prepared, prepared / "lm", tmp_path / "m.model"]
    loaded = [load_vocabulary(str(path)) for path in given]
    assert len({v.identity for v in loaded}) == 1
    assert len({tuple(v.table) for v in loaded}) == 1
    assert loaded[0].dictionary == (prepared / "lm/dict.txt").read_text(encoding="utf-8")


def test_gpt2_by_name_comes_from_the_published_files(gpt2, cache, monkeypatch):
    shutil.copytree(gpt2, cache)
    files = {name: Published(name, sha256_bytes((gpt2 / name).read_bytes())) for name in vocabulary.GPT2_FILES}
    monkeypatch.setattr(vocabulary, "GPT2_FILES", files)
    assert load_vocabulary("gpt2").identity == load_vocabulary(str(gpt2)).identity


def test_others_have_another_identity(tmp_path, gpt2, prepared):
    first = load_vocabulary(str(gpt2))
    other = shutil.copytree(gpt2, tmp_path / "other")
    lines = (other / "dict.txt").read_text().splitlines(keepends=True)
    (other / "dict.txt").write_text("".join([lines[1], lines[0], *lines[2:]]))
    assert len({v.identity for v in map(load_vocabulary, map(str, (gpt2, other, prepared)))}) == 3
    assert (first.table != load_vocabulary(str(other)).table).sum() == 2


def test_what_does_not_fit_is_refused(tmp_path, gpt2, prepared):
    other = shutil.copytree(gpt2, tmp_path / "other")
    whole = (other / "dict.txt").read_text()
    for text, message in (
        (whole.partition("\n")[2], r"dict\.txt: .* lacks '\d+' \(1 missing\)"),
        (whole + whole, "occurs twice"),
    ):
        (other / "dict.txt").write_text(text)
        with pytest.raises(DataError, match=message):
            load_vocabulary(str(other))
    (other / "vocab.bpe").write_text("#version\nq q\n")
    with pytest.raises(DataError, match="belong together"):
        load_vocabulary(str(other))
    (prepared / "lm/dict.txt").write_text((prepared / "lm/dict.txt").read_text().replace("film 1", "fil_ 1"))
    text = (prepared / "lm/dict.txt").read_text().splitlines()
    (prepared / "lm/dict.txt").write_text("\n".join([text[1], text[0], *text[2:]]) + "\n")
    with pytest.raises(DataError, match="is not the dictionary that"):
        load_vocabulary(str(prepared))
    (prepared / "spm.model").write_bytes(b"other")
    with pytest.raises(DataError, match=r"spm\.model is not the file that"):
        load_vocabulary(str(prepared))
    (prepared / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="names no tokenizer"):
        load_vocabulary(str(prepared))
    for given, message in ((tmp_path / "none", "no such file"), (tmp_path, "holds neither")):
        with pytest.raises(DataError, match=message):
            load_vocabulary(str(given))


def test_manifest_reads_only_regular_tokenizer_files_beside_it(prepared, monkeypatch):
    path = prepared / "manifest.json"
    record = json.loads(path.read_text())["tokenizer"]

    with_outside_file = {**record, "files": {**record["files"], "../outside": ""}}
    path.write_text(json.dumps({"tokenizer": with_outside_file}))
    assert load_vocabulary(str(prepared)).identity == record["identity"]  # "../outside" is not read

    for name in ("../prepared/lm/dict.txt", str(prepared / "lm/dict.txt"), "spm.model"):
        path.write_text(json.dumps({"tokenizer": {**record, "dictionary": {"file": name}}}))
        with pytest.raises(DataError, match=r"names '.*: expected dict\.txt, or FOLDER/dict\.txt, beside it"):
            load_vocabulary(str(prepared))

    path.write_text(json.dumps({"tokenizer": record}))
    monkeypatch.setattr(vocabulary, "MAX_FILE", 1 << 20)
    (prepared / "lm/dict.txt").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(DataError, match=r"cannot read .*dict\.txt: it is larger than 1 MiB"):
        load_vocabulary(str(prepared))

    (prepared / "lm/dict.txt").unlink()
    (prepared / "lm/dict.txt").symlink_to("/dev/null")
    with pytest.raises(DataError, match=r"cannot read .*dict\.txt: it is not a regular file"):
        load_vocabulary(str(prepared))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("word", r"dict\.txt: dict\.txt, line 1: expected a symbol and its count, found 'word"),
        ("<unk> 1", "line 1: the symbol '<unk>' occurs twice"),
        ("\udcff 1", "is not UTF-8"),
    ],
)
def test_a_dictionary_that_fairseq_cannot_read(tmp_path, gpt2, line, message):
    other = shutil.copytree(gpt2, tmp_path / "other")
    text = f"{line}\n{(other / 'dict.txt').read_text()}"
    (other / "dict.txt").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message):
        load_vocabulary(str(other))


def test_tokens_that_are_not_numbered_in_a_row(tmp_path, gpt2):
    other = shutil.copytree(gpt2, tmp_path / "other")
    for number in (2**31, "9", -1):
        tokens = json.loads((gpt2 / "encoder.json").read_text())
        tokens["<|endoftext|>"] = number
        (other / "encoder.json").write_text(json.dumps(tokens))
        with pytest.raises(DataError, match=r"does not number the tokens|belong together"):
            load_vocabulary(str(other))


def test_byte_fallback_keeps_every_text_and_no_symbol_has_white_space(model):
    ours = new_vocabulary(SentencePieceTokenizer(model))
    assert all(len(symbol.split()) == 1 for symbol in ours.symbols)
    for line in [*LINES, "never seen: ж\u00a0\t🙃  two  spaces"]:
        ids = ours.table[ours.tokenizer.encode_ids([line])[0]]
        assert 3 not in ids
        assert text_of(ours, ids) == line


def test_a_tokenizer_that_writes_a_special_symbol_as_text():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(["the film isn't new"] * 9, 20))
    dictionary = new_vocabulary(tokenizer).dictionary
    tokenizer.symbols_by_id[2] = "</s>"  # as with a damaged model, in which it is no control symbol
    with pytest.raises(DataError, match="it lacks '</s>'"):
        Vocabulary(tokenizer, dictionary)
