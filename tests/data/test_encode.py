"""Encoding: the ids of fairseq's own GPT-2 encoder, in one process or several, as a stream."""

import random
import sys

import numpy as np
import pytest
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

from lln_fairseq.data import encode
from lln_fairseq.data.download import cache_directory
from lln_fairseq.data.encode import ParallelEncoder, split_into_blocks
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.vocabulary import load_vocabulary
from tests.data_prep.conftest import TEXT, WORDS, decode, encode_line, text_of

# What the real GPT-2 files are needed for uses those of the user's cache, from before the tests replace it.
REAL = cache_directory()
PIECES = ["'s", "'LL", "'", " ", "  ", "\t", "\r", "\n", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\x00", "\x7f"]
PIECES += [
    "é",
    "e\u0301",
    "ß",
    "你好",
    "🙂",
    "👩\u200d👩\u200d👧",
    "🇩🇪",
    "\u202e",
    "\ufeff",
    "\U0010ffff",
    "١٢",
    "½",
    "²",
    "_",
]
PIECES += ["<|endoftext|>", "<s>", "@-@", "https://x.y/?a=b", "don't", "1234567", "aaaaaaaa", "ſ", "İ", "…", "—"]


def random_texts(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choice([*PIECES, *WORDS, *TEXT]) for _ in range(rng.randrange(30)))


def every_character(step=1):
    """Each code point but surrogates (which no UTF-8 text holds) among letters, digits, spaces and signs."""
    for start in range(0, sys.maxunicode + 1, 64 * step):
        codes = [c for c in range(start, start + 64) if not 0xD800 <= c < 0xE000]
        yield "".join(f"a{chr(c)}1{chr(c)} {chr(c)}!  {chr(c)}{chr(c)} " for c in codes)


def assert_same_as_fairseq(folder, texts):
    tokenizer = load_vocabulary(str(folder)).tokenizer
    theirs = get_encoder(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    for text in texts:
        ids = tokenizer.encode_ids([text])[0]
        assert ids == theirs.encode(text), repr(text)
        assert decode(tokenizer, encode_line(tokenizer, text)) == text


def test_gpt2_ids_are_those_of_fairseq(gpt2):
    assert_same_as_fairseq(gpt2, [*PIECES, "", TEXT, *random_texts(300), *every_character(step=64)])


@pytest.mark.exhaustive
def test_published_gpt2_ids_are_those_of_fairseq():
    if not all((REAL / name).is_file() for name in ("encoder.json", "vocab.bpe", "dict.txt")):
        pytest.skip(f"no GPT-2 files in {REAL}; data_prep.wikitext103 --tokenizer gpt2 fetches them")
    assert_same_as_fairseq(REAL, [*PIECES, "", TEXT, *random_texts(1000), *every_character(step=8)])
    vocabulary = load_vocabulary(str(REAL))
    theirs = get_encoder(str(REAL / "encoder.json"), str(REAL / "vocab.bpe"))
    # every token encodes to itself: with that, tiktoken's rule and GPT-2's give the same for any text
    assert all(theirs.bpe(token) == token for token in theirs.encoder if token != "<|endoftext|>")
    assert vocabulary.size + 1 == 50265  # with <mask>: what stock RoBERTa has


def test_blocks_hold_the_ids_of_each_line_in_order(gpt2, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 60)
    vocabulary = load_vocabulary(str(gpt2))
    lines = [line.replace("\n", " ") for line in random_texts(300)] + [""]
    with ParallelEncoder(vocabulary, workers=1) as encoder:
        inline = list(encoder.blocks(lines))
    assert len(inline) > 10
    ids, lengths = (np.concatenate(parts) for parts in zip(*inline, strict=True))
    assert lengths.sum() == len(ids)
    for line, sample in zip(lines, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        assert sample[-1] == 2
        assert text_of(vocabulary, sample[:-1]) == line
    assert list(encoder.blocks([])) == []

    taken = 0

    def counted():
        nonlocal taken
        for line in lines:
            taken += 1
            yield line

    with ParallelEncoder(vocabulary, workers=2) as encoder:
        blocks = encoder.blocks(counted())
        parallel = [next(blocks)]
        assert taken < len(lines) / 2  # a stream: not all is read before the first comes out
        parallel += blocks
        for ours, theirs in zip(parallel, inline, strict=True):
            assert np.array_equal(ours[0], theirs[0])
            assert np.array_equal(ours[1], theirs[1])
        for process in encoder._pool._processes.values():
            process.kill()
        with pytest.raises(DataError, match="was killed"):
            list(encoder.blocks(lines))


def test_cut_keeps_every_line(monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_CHARACTERS", 5)
    assert list(split_into_blocks(["abc", "d", "", "efghijk", "l"])) == [["abc", "d"], ["", "efghijk"], ["l"]]
    assert list(split_into_blocks([])) == []
