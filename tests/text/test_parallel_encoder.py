"""Text is encoded with the ids of fairseq's GPT-2 encoder, in one or several processes, as a stream."""

import random
import sys

import numpy as np
import pytest
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

from data_prep.download import cache_directory
from lln_fairseq.errors import UserError
from lln_fairseq.text import parallel_encoder
from lln_fairseq.text.parallel_encoder import ParallelEncoder, split_into_blocks
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import TEXT, WORDS, decode, encode_line, text_of

USER_CACHE = cache_directory()  # read before the tests replace it; it may hold the real GPT-2 files
SPACES = [" ", "  ", "\t", "\r", "\n", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\x00", "\x7f"]
LETTERS = ["é", "e\u0301", "ß", "你好", "🙂", "👩\u200d👩\u200d👧", "🇩🇪", "\u202e", "\ufeff", "\U0010ffff", "ſ", "İ"]
PIECES = ["'s", "'LL", "'", *SPACES, *LETTERS, "١٢", "½", "²", "_", "…", "—"]
PIECES += ["<|endoftext|>", "<s>", "@-@", "https://x.y/?a=b", "don't", "1234567", "aaaaaaaa"]


def random_texts(count):
    """Yield texts of random pieces, words and characters."""
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choice([*PIECES, *WORDS, *TEXT]) for _ in range(rng.randrange(30)))


def texts_with_all_characters(step):
    """Yield texts with 64 consecutive characters each, between letters, digits, spaces and signs; one text of `step`.

    Surrogates are left out, which no UTF-8 text contains.
    """
    for start in range(0, sys.maxunicode + 1, 64 * step):
        characters = [chr(code) for code in range(start, start + 64) if not 0xD800 <= code < 0xE000]
        yield "".join(f"a{c}1{c} {c}!  {c}{c} " for c in characters)


def assert_same_ids_as_fairseq(directory, texts):
    tokenizer = load_vocabulary(str(directory)).tokenizer
    fairseq_encoder = get_encoder(str(directory / "encoder.json"), str(directory / "vocab.bpe"))
    for text in texts:
        ids = tokenizer.encode_ids([text])[0]
        assert ids == fairseq_encoder.encode(text), repr(text)
        assert decode(tokenizer, encode_line(tokenizer, text)) == text


def test_gpt2_ids_are_those_of_fairseq(gpt2):
    assert_same_ids_as_fairseq(gpt2, [*PIECES, "", TEXT, *random_texts(100), *texts_with_all_characters(step=256)])


@pytest.fixture
def published_gpt2():
    """Return the directory of the published GPT-2 files, if the user has downloaded them."""
    if not all((USER_CACHE / name).is_file() for name in ("encoder.json", "vocab.bpe", "dict.txt")):
        pytest.skip(f"no GPT-2 files in {USER_CACHE}; data_prep.wikitext103 --tokenizer gpt2 downloads them")
    return USER_CACHE


@pytest.mark.exhaustive
def test_published_gpt2_ids_are_those_of_fairseq(published_gpt2):
    texts = [*PIECES, "", TEXT, *random_texts(1000), *texts_with_all_characters(step=8)]

    assert_same_ids_as_fairseq(published_gpt2, texts)


@pytest.mark.exhaustive
def test_every_published_gpt2_token_encodes_to_itself(published_gpt2):
    """Given that, the merge rules of tiktoken and GPT-2 give the same ids for every text."""
    encoder = get_encoder(str(published_gpt2 / "encoder.json"), str(published_gpt2 / "vocab.bpe"))

    assert all(encoder.bpe(token) == token for token in encoder.encoder if token != "<|endoftext|>")


@pytest.mark.exhaustive
def test_published_gpt2_size_is_that_of_roberta(published_gpt2):
    assert load_vocabulary(str(published_gpt2)).size + 1 == 50265  # with <mask>


LINES = [line.replace("\n", " ") for line in random_texts(300)] + [""]


@pytest.fixture
def vocabulary(gpt2, monkeypatch):
    """Return a GPT-2 vocabulary; encoding uses small blocks."""
    monkeypatch.setattr(parallel_encoder, "BLOCK_CHARACTERS", 60)
    return load_vocabulary(str(gpt2))


def encode_inline(vocabulary):
    with ParallelEncoder(vocabulary, workers=1) as encoder:
        return list(encoder.blocks(LINES))


def test_blocks_hold_the_ids_of_each_line_in_order(vocabulary):
    blocks = encode_inline(vocabulary)

    assert len(blocks) > 10
    ids, lengths = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    assert lengths.sum() == len(ids)
    for line, sample in zip(LINES, np.split(ids, np.cumsum(lengths)[:-1]), strict=True):
        assert sample[-1] == 2
        assert text_of(vocabulary, sample[:-1]) == line


def test_no_lines_give_no_blocks(vocabulary):
    assert list(ParallelEncoder(vocabulary, workers=1).blocks([])) == []


def test_two_processes_stream_the_same_blocks_and_report_a_killed_process(vocabulary):
    lines_read = 0

    def counted_lines():
        nonlocal lines_read
        for line in LINES:
            lines_read += 1
            yield line

    with ParallelEncoder(vocabulary, workers=2) as encoder:
        blocks = encoder.blocks(counted_lines())
        parallel = [next(blocks)]
        assert lines_read < len(LINES) / 2  # the first block comes before all lines have been read
        parallel += blocks
        for block, expected in zip(parallel, encode_inline(vocabulary), strict=True):
            assert np.array_equal(block[0], expected[0])
            assert np.array_equal(block[1], expected[1])

        for process in encoder._pool._processes.values():
            process.kill()
        with pytest.raises(UserError, match="was killed"):
            list(encoder.blocks(LINES))


def test_split_into_blocks_keeps_every_line(monkeypatch):
    monkeypatch.setattr(parallel_encoder, "BLOCK_CHARACTERS", 5)

    assert list(split_into_blocks(["abc", "d", "", "efghijk", "l"])) == [["abc", "d"], ["", "efghijk"], ["l"]]
    assert list(split_into_blocks([])) == []
