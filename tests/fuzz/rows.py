"""Rows of GLUE's files and of the demo's: random bytes and cells, against a reader of three lines."""

import io
import random
from functools import partial
from pathlib import Path

from data_prep.demo import language_model_lines, read_snippets, sentiment_task
from data_prep.glue import Source
from data_prep.glue_tasks import GLUE_TASKS
from lln_fairseq.data.archives import loose_files
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.text import MAX_LINE, SPLITS, clean, read_lines, split_of
from tests.fuzz._damage import damaged

PIECES = (
    "film", "story", " ", "  ", '"', "'", "''", "&amp;", "&not", "&#0;", "&#55296;", "\r",
    "\x00", "\x0b", "\x1c", "\x85",
    "\u2028", "\u00a0", "\ufeff", "\u0301", "é", "中", "🙂", "\\", ",", "0", "-1", "nan", "1e9", "</s>", "<mask>",
)  # fmt: skip


def attack(rng: random.Random, folder: Path) -> str:
    """One file."""
    return rng.choice((glue, glue, demo, demo, lines))(rng, folder)


def text(rng: random.Random, longest: int = 6) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, longest)))


def label(rng: random.Random, labels: tuple[str, ...]) -> str:
    if rng.random() < 0.02:
        return text(rng)
    return rng.choice(labels) if labels else f"{rng.uniform(0, 5):.3f}"


def glue(rng: random.Random, folder: Path) -> str:
    """A split of a task: the cells come back stripped, in their order, or the file is refused."""
    task = GLUE_TASKS[rng.choice(list(GLUE_TASKS))]
    split = rng.choice(("train", "test"))
    columns = [*task.inputs, *(["index"] if rng.random() < 0.5 else []), *([task.label] if split == "train" else [])]
    rng.shuffle(columns)
    columns = list(task.header.get(split, columns))
    rows = [
        [label(rng, task.labels) if c == task.label else text(rng) for c in columns] for _ in range(rng.randint(1, 8))
    ]
    end = rng.choice(("\n", "\r\n"))
    table = rows if split in task.header else [columns, *rows]
    whole = ("\ufeff" if rng.random() < 0.2 else "") + end.join("\t".join(row) for row in table)
    data = (whole + rng.choice(("", end, end * 3))).encode()
    sound = rng.random() < 0.6
    name = task.files[split]
    files = {task.files["train"]: folder / "train", task.files["valid"]: folder / "valid", name: folder / split}
    for path in files.values():
        path.write_bytes(b"-")
    (folder / split).write_bytes(data if sound else damaged(rng, data) or b"-")
    try:
        found = Source(loose_files(files, "here"), task).rows(split)
    except DataError:
        return "refused"
    if not sound:
        return "read"
    inputs = [[row[columns.index(column)].strip() for row in rows] for column in task.inputs]
    # a "\r" that happens to stand before "\n", or at the end of the file, belongs to the end of its line
    ends = [data.startswith(whole.encode() + end.encode()) if row is rows[-1] else True for row in rows]
    seen = [[*row[:-1], row[-1].removesuffix("\r")] if end == "\n" or not ended else row
            for row, ended in zip(rows, ends, strict=True)]  # fmt: skip
    kept = [i for i in range(len(rows)) if len(columns) > 1 or any(map(any, seen[i:]))]
    assert [list(texts) for texts in found.inputs] == [[texts[i] for i in kept] for texts in inputs], "other cells"
    return "same"


def demo(rng: random.Random, folder: Path) -> str:
    """A file of snippets: every text comes out clean, and nothing gets lost on the way to the splits."""
    rows = [(f"{rng.uniform(-4, 4):.2f}", text(rng)) for _ in range(rng.randint(1, 10))]
    data = rng.choice(("\n", "\r\n")).join(f"{i}\t{score}\t{words}" for i, (score, words) in enumerate(rows)).encode()
    sound = rng.random() < 0.6
    try:
        snippets = read_snippets(data if sound else damaged(rng, data), "here")
    except DataError:
        return "refused"
    if sound:
        assert [(f"{s.score:.2f}", s.text) for s in snippets] == [(score, clean(words)) for score, words in rows]
    for snippet in snippets:
        assert not set(snippet.text) & set("\t\n\r"), "a character that ends a cell or a line"
    corpus, left_out = language_model_lines(snippets)
    assert sum(map(len, corpus.values())) + sum(left_out.values()) == len(snippets)
    task, counts = sentiment_task(snippets)
    assert sum(map(len, task.values())) + sum(counts["left_out"].values()) == len(snippets)
    assert all(split_of(line) == split for split in SPLITS for line in corpus[split])
    return "same" if sound else "read"


def lines(rng: random.Random, folder: Path) -> str:
    """Random bytes as text: as Python decodes them, or refused; a line without end is refused before it is read."""
    if rng.random() < 0.02:
        data = b"word " * (MAX_LINE // 5 + 2)
    elif rng.random() < 0.5:
        data = "".join(text(rng) + rng.choice(("", "\n", "\r\n")) for _ in range(9)).encode()
    else:
        data = rng.randbytes(rng.randint(1, 60))
    reader = partial(read_lines, io.BytesIO(data), "here")
    try:
        found = list(reader())
    except DataError:
        assert len(data) > MAX_LINE or not is_utf8(data), "text is refused"
        return "refused"
    expected = data.decode().removeprefix("\ufeff").removesuffix("\n").split("\n") if data else []
    assert found == [line.removesuffix("\r") for line in expected], "other lines"
    return "same"


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
