"""Test WikiText-103 with a small directory or archive: contents, fairseq's task, bad input."""

import io
import lzma
import random
import re
import zipfile

import pytest
from fairseq.data import indexed_dataset
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from data_prep import wikitext103
from data_prep.published_files import Published
from lln_fairseq.errors import UserError
from lln_fairseq.files import sha256_of
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import BAD, GOOD, WORDS, files_without_manifest, read_files, text_of

SPLITS = ("train", "valid", "test")


def articles(count, seed):
    """Yield the lines of articles, a heading and three paragraphs each."""
    rng = random.Random(seed)
    for i in range(count):
        yield from (" \n", f" = Article {seed}{i} = \n", " \n")
        for _ in range(3):
            yield " " + " ".join(rng.choices([*WORDS, *GOOD, *BAD, "é\u00a0½"], k=12)) + " . \n"


TEXTS = {
    "train": "".join(articles(30, seed=1)),
    "valid": "".join(articles(4, seed=2)),
    "test": "".join(articles(4, seed=3)),
}


def stripped_lines(text):
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


EXPECTED_LINES = {split: stripped_lines(text) for split, text in TEXTS.items()}


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    for split, text in TEXTS.items():
        (directory / f"wiki.{split}.raw").write_text(text, encoding="utf-8")
    return directory


@pytest.fixture
def build(tmp_path, gpt2, source):
    """A function that builds the data, by default from `source` with GPT-2's tokenizer into tmp_path / "out"."""

    def call(out=tmp_path / "out", **options):
        defaults = {"tokenizer": str(gpt2), "source": source, "workers": 1}
        return wikitext103.build_wikitext(out, **{**defaults, **options})

    return call


def decoded_lines(out, split):
    vocabulary = load_vocabulary(str(out))
    dataset = indexed_dataset.make_dataset(str(out / split), impl="mmap")
    return [text_of(vocabulary, dataset[i][:-1].numpy()) for i in range(len(dataset))]


@pytest.mark.parametrize("tokenizer", ["gpt2", "sentencepiece-bpe", "sentencepiece-unigram", "sentencepiece-char"])
def test_data_decode_to_lines_and_load_in_fairseq(tmp_path, build, gpt2, tokenizer):
    out = tmp_path / "out"
    options = {} if tokenizer == "gpt2" else {"tokenizer": tokenizer, "vocab_size": 310}

    content = build(**options)

    assert set(read_files(out)) == {*content["files"], "manifest.json"}
    config = MaskedLMConfig(data=str(out), tokens_per_sample=128, sample_break_mode="complete_doc", seed=1)
    task = MaskedLMTask.setup_task(config)
    for split in SPLITS:
        assert decoded_lines(out, split) == EXPECTED_LINES[split]
        assert content["datasets"][split]["samples"] == len(EXPECTED_LINES[split])
        assert content["datasets"][split]["unknown"] == 0
        task.load_dataset(split)
        dataset = task.datasets[split]
        assert 0 < max(int(dataset.num_tokens(i)) for i in range(len(dataset))) <= 128
    if tokenizer == "gpt2":
        assert (out / "dict.txt").read_bytes() == (gpt2 / "dict.txt").read_bytes()
    else:
        assert len(task.dictionary) % 8 == 0  # with <mask>
        tokens = content["datasets"]["train"]["tokens"] - len(EXPECTED_LINES["train"])
        assert sum(task.dictionary.count[4:-1]) == tokens


@pytest.fixture
def published_zip(tmp_path):
    """A zip archive with the name of the published one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for split, text in TEXTS.items():
            archive.writestr(f"wikitext-103-raw/wiki.{split}.raw", text)
    path = tmp_path / wikitext103.ARCHIVE.name
    path.write_bytes(buffer.getvalue())
    return path


def test_published_name_requires_published_content(tmp_path, build, published_zip):
    with pytest.raises(UserError, match=r"has \d+ bytes, expected 191984949"):
        build(out=tmp_path / "zip", source=published_zip)


def test_published_archive_gives_same_data(tmp_path, build, published_zip, monkeypatch):
    build()
    monkeypatch.setattr(wikitext103, "ARCHIVE", Published(published_zip.name, sha256_of(published_zip)))
    monkeypatch.setenv("LLN_DATA_CACHE", str(tmp_path))

    content = build(out=tmp_path / "zip", source=None)

    assert content["sources"][0]["published"]
    assert files_without_manifest(tmp_path / "zip") == files_without_manifest(tmp_path / "out")


def test_compressed_files_give_same_data(tmp_path, build, source):
    build()
    for split, text in TEXTS.items():
        (source / f"wiki.{split}.raw").unlink()
        (source / f"wiki.{split}.raw.xz").write_bytes(lzma.compress(text.encode()))

    build(out=tmp_path / "xz")

    assert files_without_manifest(tmp_path / "xz") == files_without_manifest(tmp_path / "out")


def test_limit_mb_truncates_train(tmp_path, build):
    build(limit_mb=0.002)

    lines = decoded_lines(tmp_path / "out", "train")
    assert lines == EXPECTED_LINES["train"][: len(lines)]
    assert len("".join(TEXTS["train"].splitlines(keepends=True)[: len(lines)]).encode()) <= 2000
    assert decoded_lines(tmp_path / "out", "valid") == EXPECTED_LINES["valid"]


@pytest.mark.parametrize(
    ("limit", "message"), [(0.000001, "no text within --limit-mb"), (-1, "more than 0"), (float("inf"), "finite")]
)
def test_limit_mb_without_text_is_rejected(tmp_path, build, limit, message):
    with pytest.raises(UserError, match=message):
        build(out=tmp_path / "none", limit_mb=limit)


def test_finished_data_are_kept(build, monkeypatch):
    content = build()
    monkeypatch.setattr(wikitext103, "write_wikitext", None)  # would raise if it were called

    assert build() == content


def test_changed_settings_are_rejected(build, source):
    build()

    with pytest.raises(UserError, match=r"limit_mb = None, not 1.*--overwrite"):
        build(limit_mb=1)
    with pytest.raises(UserError, match=r"another tokenizer: .*--overwrite"):
        build(tokenizer="sentencepiece-bpe")
    with (source / "wiki.valid.raw").open("a") as file:
        file.write("more")
    with pytest.raises(UserError, match=r"other files \(wiki.valid.raw\): .*--overwrite"):
        build()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"wiki\.valid\.raw has no text"),
        (b" \n \n", r"wiki\.valid\.raw has no text"),
        (b"good\nbad \xff\n", r"wiki\.valid\.raw, line 2: not UTF-8"),
        (None, r"has no wiki\.valid\.raw"),
    ],
)
def test_bad_input_is_one_line(tmp_path, source, content, message, capfd, gpt2):
    (source / "wiki.valid.raw").unlink()
    if content is not None:
        (source / "wiki.valid.raw").write_bytes(content)

    code = wikitext103.main(["--out", str(tmp_path / "out"), "--source", str(source), "--tokenizer", str(gpt2)])

    err = capfd.readouterr().err.splitlines()
    assert (code, len(err)) == (1, 1)
    assert re.search(message, err[0])
    assert not (tmp_path / "out").exists()


def test_articles_are_separated_by_one_blank_line(tmp_path, build, source):
    section = "\n = = Section = = \n \n Some text = more text = \n = not a title = \n"
    text = TEXTS["train"].replace(" \n = Article 15 = \n", f"{section} \n = Article 15 = \n")
    (source / "wiki.train.raw").write_text(text, encoding="utf-8")

    build(articles=True)

    lines = decoded_lines(tmp_path / "out", "train")
    titles = [number for number, line in enumerate(lines) if line.startswith("= Article")]
    assert [number for number, line in enumerate(lines) if not line] == [number - 1 for number in titles]
    assert len(titles) == 30
    assert [line for line in lines if line] == [line.strip() for line in text.splitlines() if line.strip()]
    with pytest.raises(UserError, match="was built with articles = True, not None"):
        build()


def test_articles_need_titles(build, source):
    (source / "wiki.valid.raw").write_text("a text\n\nanother text\n")
    with pytest.raises(UserError, match=r"wiki\.valid\.raw has no title, a line `= Title =`"):
        build(articles=True)
