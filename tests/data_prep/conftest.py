"""Small data in the formats of the real ones, made here: the tests of data preparation need no network."""

import io
import itertools
import json
import os
import random
import signal
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import regex

from data_prep import demo
from lln_fairseq.data.files import sha256_of
from lln_fairseq.data.published_files import PipSource, Published
from lln_fairseq.data.tokenizers import GPT2Tokenizer, Tokenizer, _byte_letters
from lln_fairseq.data.vocabulary import Vocabulary

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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of published files; nothing of the user's is seen or changed."""
    monkeypatch.setenv("LLN_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive in the place of the demo's."""
    # Every other file repeats movie sentences, in other letters: they must not leak into another split.
    repeated = [(0.0, text.upper() + "!!") for _, text in MOVIES[:60]]
    goods = fake_rows(80, seed=2) + repeated
    paper = fake_rows(80, seed=3) + fake_rows(5, seed=3)
    posts = fake_rows(80, seed=4) + repeated
    contents = map(snippet_file, (MOVIES, goods, paper, posts))
    inner = tar_gz(dict(zip(demo.MEMBERS, contents, strict=True)))
    path = tmp_path / "given.tar.gz"
    path.write_bytes(tar_gz({"setup.py": b"raise SystemExit('never run')", demo.INNER: inner}))
    pip = PipSource("pkg", "1", "pkg-1.tar.gz")
    monkeypatch.setattr(demo, "ARCHIVE", Published("pkg-1.tar.gz", sha256_of(path), pip=pip))
    return path


def tree(out: Path) -> dict[str, bytes]:
    """Every file below `out`."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def small_gpt2(folder: Path, text: str, merges: int = 300) -> Path:
    """A directory with encoder.json, vocab.bpe and dict.txt of a byte-level BPE learnt from `text`."""
    letters = [letter for letter, _ in sorted(_byte_letters().items())]
    byte_letter = {byte: letter for letter, byte in _byte_letters().items()}
    words = [[byte_letter[b] for b in word.encode()] for word in regex.findall(GPT2Tokenizer._PATTERN, text)]
    learnt: list[tuple[str, str]] = []
    while len(learnt) < merges:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        learnt.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    tokens = [*_byte_letters(), *map("".join, learnt), "<|endoftext|>"]
    assert len(set(tokens)) == len(tokens) == len(letters) + merges + 1
    folder.mkdir()
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("#version\n" + "".join(f"{a} {b}\n" for a, b in learnt), encoding="utf-8")
    order = random.Random(0).sample(range(len(tokens)), len(tokens))  # the real one is not in order either
    (folder / "dict.txt").write_text("".join(f"{i} 1\n" for i in order) + "madeupword0000 0\n")
    return folder


def encode_line(tokenizer: Tokenizer, line: str) -> list[str]:
    """The symbols of one line of text."""
    return [tokenizer.symbols_by_id[i] or "<unk>" for i in tokenizer.encode_ids([line])[0]]


def decode(tokenizer: Tokenizer, symbols: list[str]) -> str:
    """The text of these symbols."""
    if isinstance(tokenizer, GPT2Tokenizer):
        return tokenizer.encoding.decode([int(symbol) for symbol in symbols])
    return tokenizer.processor.decode_pieces(symbols)


def text_of(vocabulary: Vocabulary, ids: np.ndarray) -> str:
    """The text of one sample; fairseq's special symbols and madeup words are left out."""
    known = set(vocabulary.tokenizer.symbols())
    symbols = [vocabulary.symbols[i - 4] for i in ids.tolist() if i >= 4]
    return decode(vocabulary.tokenizer, [symbol for symbol in symbols if symbol in known])


TEXT = (
    "It isn't the film's story\u00a0– we've seen 1234 cafés, naïve  plots and “quotes”; they'll say: 你好 🙂!\n\n" * 3
)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gpt2(tmp_path_factory.mktemp("bpe") / "gpt2", TEXT + " ".join(WORDS + GOOD + BAD) * 2, merges=150)


def killed_everywhere(build: Callable[[], object], out: Path) -> None:
    """Run build() in child processes that are killed (SIGKILL) before or after their n-th rename, n = 1, 2, ..., each
    going on from what the last has left, until one comes through; then once more undisturbed."""
    replace = os.replace
    for step in range(200):
        child = os.fork()
        if child == 0:
            left = step // 2 % 5 + 1

            def killing(source: Path, target: Path, after: int = step % 2) -> None:
                nonlocal left
                left -= 1
                if left and not after:
                    return replace(source, target)
                if after:
                    replace(source, target)
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

            os.replace = killing
            try:
                build()
            finally:
                os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
    else:
        raise AssertionError("never came through")
    assert step > 5
    build()
    assert not list(out.rglob("*.part"))
