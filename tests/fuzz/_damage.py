"""What can happen to bytes: the changes that the attacks on files share."""

import random


def flip(rng: random.Random, data: bytes) -> bytes:
    """One to four bits are other ones."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes) -> bytes:
    """The end is missing."""
    return data[: rng.randrange(len(data))]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    """A number of one to eight bytes is random, zero or as large as it can be."""
    size, start = rng.choice((1, 2, 4, 8)), rng.randrange(len(data))
    number = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size, b"\xff" * (size - 1) + b"\x7f"))
    return (data[:start] + number + data[start + size :])[: len(data)]


def insert(rng: random.Random, data: bytes) -> bytes:
    """Some bytes are there that do not belong there."""
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.randbytes(rng.randint(1, 20)) + data[start:]


def remove(rng: random.Random, data: bytes) -> bytes:
    """Some bytes are missing in the midst."""
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randint(1, 20) :]


DAMAGE = (flip, flip, cut, overwrite, insert, remove)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """One of these happened to `data`, which is not empty."""
    return rng.choice(DAMAGE)(rng, data)
