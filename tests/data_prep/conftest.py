"""A small archive in the format of the real one, made here: the tests of data preparation need no network."""

import io
import random
import tarfile
from pathlib import Path

import pytest

from data_prep.demo import DemoSource
from data_prep.fetch import Sdist, sha256_of

VOCAB_SIZE = 150
GOOD, BAD = ["wonderful", "superb", "touching", "delightful"], ["dreadful", "tedious", "clumsy", "hollow"]
WORDS = ["film", "story", "actor", "scene", "camera", "music", "script", "audience", "ending", "director", "comedy"]


def tar_gz(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    """A tar.gz of these members; `links` are symbolic links to other names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def snippet_file(rows: list[tuple[float, str]]) -> bytes:
    """As the real files: id, score, text, tabs between, CRLF at the ends, none after the last row."""
    return "\r\n".join(f"{i}\t{score}\t{text}" for i, (score, text) in enumerate(rows, 1)).encode()


def fake_rows(count: int, seed: int) -> list[tuple[float, str]]:
    """Sentences whose score follows from a word in them, every seventh neutral."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        mood, sign = (GOOD, 1) if rng.random() < 0.5 else (BAD, -1)
        text = " ".join([*rng.sample(WORDS, 5), rng.choice(mood), f"{seed}{i}."])
        rows.append((0.3 if i % 7 == 0 else sign * rng.uniform(0.6, 3.9), text))
    return rows


MOVIES = [
    *fake_rows(200, seed=1),
    (2.0, "A  ''double''\u00a0quoted &amp; cafe\u0301 film."),
    (1.0, "Told twice, gladly!"),
    (0.8, "told twice gladly"),  # the same sentence, written otherwise: one row of score 0.9
    (3.0, "Loved and hated."),
    (-3.0, "Loved and hated."),  # the mean is 0: neutral
    (0.5, "Exactly on the border of the neutral zone."),
    (-1.0, "  "),
]


def write_archive(path: Path, files: dict[str, bytes], **options: dict[str, str]) -> DemoSource:
    """Write a nested archive with these snippet files (the first are the movies); return what describes it."""
    inner = tar_gz({**{f"in/{name}": content for name, content in files.items()}, "../../escape.txt": b"x"}, **options)
    outer = {"/tmp/absolute.txt": b"x", "pkg-1/setup.py": b"raise SystemExit('never run')", "pkg-1/inner.tar.gz": inner}
    path.write_bytes(tar_gz(outer))
    movies, *others = (f"in/{name}" for name in files)
    sdist = Sdist(project="pkg", version="1", filename="pkg-1.tar.gz", sha256=sha256_of(path))
    return DemoSource(sdist, inner="pkg-1/inner.tar.gz", movies=movies, others=tuple(others), expected={})


@pytest.fixture
def files() -> dict[str, bytes]:
    # Every other file repeats movie sentences, in other letters: they must not leak into another split.
    repeated = [(0.0, text.upper() + "!!") for _, text in MOVIES[:60]]
    return {
        "movies.txt": snippet_file(MOVIES),
        "goods.txt": snippet_file(fake_rows(80, seed=2) + repeated),
        "paper.txt": snippet_file(fake_rows(80, seed=3) + fake_rows(5, seed=3)),
        "posts.txt": snippet_file(fake_rows(80, seed=4) + repeated),
    }


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "given.tar.gz"


@pytest.fixture
def source(archive: Path, files: dict[str, bytes]) -> DemoSource:
    return write_archive(archive, files)
