"""SentencePiece models: damaged, cut, or another protobuf altogether."""

import random
from functools import cache
from pathlib import Path

from lln_fairseq.data.encode import encode_block
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lln_fairseq.data.vocabulary import load_vocabulary, new_vocabulary
from tests.fuzz._damage import damaged

WORDS = ["the", "film", "é", "story", "中", "isn't", "“good”", "and", "it", "was", "not", "🙂", "bad", "at", "1234"]
LINES = ["the film isn't good", "", "never seen: ж\u00a0🙃  two  spaces", "\x00\t", "a" * 300]


@cache
def models() -> tuple[bytes, ...]:
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=6)) for _ in range(200)]
    sorts = (("bpe", 60, False), ("unigram", 40, False), ("bpe", 310, True), ("unigram", 290, True))
    return tuple(train_sentencepiece(lines, size, sort, fallback) for sort, size, fallback in sorts)


@cache
def identities() -> frozenset[str]:
    return frozenset(new_vocabulary(SentencePieceTokenizer(model)).identity for model in models())


def varint(number: int) -> bytes:
    low = bytes([number & 0x7F | (0x80 if number > 0x7F else 0)])
    return low + (varint(number >> 7) if number > 0x7F else b"")


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def message(rng: random.Random, depth: int = 0) -> bytes:
    """A protobuf of random fields."""
    parts = []
    for _ in range(rng.randint(0, 5)):
        number = rng.randint(1, 5)
        if depth < 3 and rng.random() < 0.5:
            parts.append(field(number, message(rng, depth + 1)))
        elif rng.random() < 0.5:
            parts.append(field(number, rng.randbytes(rng.randint(0, 6))))
        else:
            parts.append(varint(number << 3) + varint(rng.getrandbits(rng.choice((3, 31, 63)))))
    return b"".join(parts)


def piece(rng: random.Random) -> bytes:
    """One more entry of a model's list of pieces: text, score, type."""
    text = rng.choice(
        (b"", b"film", b"\xff\xfe", b" ", "\u00a0".encode(), b"<0x41>", b"<s>", b"<mask>", rng.randbytes(3))
    )
    kind = varint(3 << 3) + varint(rng.choice((1, 2, 3, 4, 5, 6, 7, 99)))
    score = varint(2 << 3 | 5) + rng.choice((bytes(4), rng.randbytes(4), b"\x00\x00\xc0\x7f"))
    return field(1, field(1, text) + score + kind)


def attack(rng: random.Random, folder: Path) -> str:
    """One model: refused in one line, or it encodes, every id has a symbol, and its identity is its own."""
    model = rng.choice(models())
    spoilt = rng.choice(
        (
            lambda: damaged(rng, model),
            lambda: damaged(rng, model),
            lambda: model + message(rng),
            lambda: model + piece(rng),
            lambda: piece(rng) + model,
            lambda: message(rng),
            lambda: b"".join(piece(rng) for _ in range(9)),
            lambda: rng.randbytes(rng.randint(0, 50)),
        )
    )()
    path = folder / "spm.model"
    path.write_bytes(spoilt)
    try:
        vocabulary = load_vocabulary(str(path))
        ids, lengths = encode_block(vocabulary.tokenizer, vocabulary.table, LINES)
    except DataError:
        return "refused"
    assert lengths.sum() == len(ids), "other lengths"
    assert 0 <= ids.min() <= ids.max() < vocabulary.size, "an id that has no symbol"
    assert spoilt in models() or vocabulary.identity not in identities(), "the identity of another model"
    return "used"
