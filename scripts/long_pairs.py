"""Write long pairs of texts as TSV rows, and print the commands that train a softmax teacher on them.

    python -m scripts.long_pairs qnli16 --out runs/long_pairs

QNLI asks whether a sentence answers a question. In qnli4, qnli16 and qnli64, that sentence is hidden among those of 3,
15 and 63 other questions, in random order. QQP asks whether two questions mean the same. In qqp4, each of them is
hidden among three others. The labels stay the same, so a model must find the own texts first. `train` and `test` are
the first and the last rows of GLUE's training file, because the labels of its test sets are not published. `valid` is
the dev set.

A teacher of long rows starts from that of shorter ones: qnli, qnli4, qnli16, qnli64, and qqp, qqp4. The program writes
OUT/TASK/{train,valid,test}.tsv for the task and all shorter ones. The commands fine-tune all-MiniLM-L6-v2; the teacher
is OUT/TASK/teacher/checkpoint_last.pt.
"""

import argparse
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.download import fetch_tree
from data_prep.glue import GlueSource
from data_prep.glue_tasks import GLUE_TASKS
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.terminal import program_parser
from lln_fairseq.text.rows import TextRows
from lln_fairseq.text.table_files import QUOTED
from lln_fairseq.training.recipes import format_override
from scripts.train_tasks import run_override, train_words

HIDDEN = {"QNLI": (1,), "QQP": (0, 1)}  # the indices of the texts that are hidden
POSITIONS = 1024  # tokens of the longest row, except in qnli64


@dataclass(frozen=True)
class Task:
    """The rows of a task, and how its teacher is trained.

    Attributes:
        glue: the GLUE task.
        sentences: of which a hidden text consists; 1 hides nothing.
        train: rows from the start of the training file.
        test: rows from its end.
        start: the task whose teacher is trained further; None starts from the encoder.
        epochs: of the training.
        batch_size: rows that are computed at once; an update has 32.
        positions: tokens of the longest row.
    """

    glue: str
    sentences: int
    train: int = 7000
    test: int = 1000
    start: str | None = None
    epochs: int = 1
    batch_size: int = 16
    positions: int = POSITIONS


TASKS = {
    "qnli": Task("QNLI", sentences=1, train=6000, test=2400, epochs=2, batch_size=32),
    "qnli4": Task("QNLI", sentences=4, start="qnli"),
    "qnli16": Task("QNLI", sentences=16, start="qnli4", batch_size=4),
    "qnli64": Task("QNLI", sentences=64, start="qnli16", batch_size=8, positions=2816),
    "qqp": Task("QQP", sentences=1, train=6000, test=2400, epochs=2, batch_size=32),
    "qqp4": Task("QQP", sentences=4, start="qqp"),
}


def select_rows(source: GlueSource, task: Task) -> dict[str, TextRows]:
    """Return the rows of train, valid and test, with their texts hidden and always in the same way."""
    labeled = unquote(source.read_rows("train"))
    count = len(labeled)
    if task.train + task.test > count:
        raise UserError(f"{source.tree.where} has {count} rows for training: {task.train + task.test} are needed")
    rows = {
        "train": part_of(labeled, slice(0, task.train)),
        "valid": unquote(source.read_rows("valid")),
        "test": part_of(labeled, slice(count - task.test, count)),
    }
    if task.sentences > 1:
        for seed, split in enumerate(rows):
            rows[split] = add_distractors(rows[split], task.sentences, seed, HIDDEN[task.glue])
    return rows


def unquote(rows: TextRows) -> TextRows:
    """Return the rows without the CSV quotes around some of QQP's questions, which data_prep.tsv refuses."""
    inputs: tuple[list[str], ...] = tuple([] for _ in rows.inputs)
    for texts, unquoted in zip(rows.inputs, inputs, strict=True):
        for text in texts:
            if QUOTED.fullmatch(text) and '""' in text:
                text = text[1:-1].replace('""', '"')
            unquoted.append(text)
    return TextRows(inputs, rows.labels)


def part_of(rows: TextRows, part: slice) -> TextRows:
    return TextRows(tuple(texts[part] for texts in rows.inputs), (rows.labels or [])[part])


def add_distractors(rows: TextRows, sentences: int, seed: int, hidden: Sequence[int]) -> TextRows:
    """Return a copy of rows of two texts, in which one or both texts are hidden among texts of other rows.

    A hidden text becomes `sentences` different texts, itself among them, in random order, joined by spaces. The others
    are from rows with another first text. The labels stay the same. UserError is raised if the split has too few rows.
    `hidden` has the indices of the texts to hide. If both are hidden, no row gives a text to both.
    """
    first_texts = rows.inputs[0]
    count = len(first_texts)
    generator = random.Random(seed)
    texts = [list(originals) for originals in rows.inputs]
    for row in range(count):
        candidates = iter(generator.sample(range(count), min(count, 2 * len(hidden) * sentences)))
        for position in hidden:
            originals = rows.inputs[position]
            chosen = [originals[row]]
            while len(chosen) < sentences:
                candidate = next(candidates, None)
                if candidate is None:
                    raise UserError(f"a text cannot be hidden among {sentences}: a split has only {count} rows")
                if first_texts[candidate] != first_texts[row] and originals[candidate] not in chosen:
                    chosen.append(originals[candidate])
            generator.shuffle(chosen)
            texts[position][row] = " ".join(chosen)
    return TextRows(tuple(texts), rows.labels)


def write_rows(path: Path, columns: Sequence[str], rows: TextRows) -> None:
    lines = ["\t".join(columns)]
    lines += ["\t".join(cells) for cells in zip(*rows.inputs, rows.labels or [], strict=True)]
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def chain(name: str | None) -> list[str]:
    """Return the names of a task and of all that its teacher starts from, the shortest first."""
    if name is None:
        return []
    return [*chain(TASKS[name].start), name]


def commands(names: Sequence[str], out: Path, seed: int) -> Iterator[list[str]]:
    """Yield the words of the commands that train the teachers of the tasks, each from the one before."""
    encoder = out / "encoder"
    start = encoder / "model.pt"
    yield ["python", "-m", "data_prep.encoders", "minilm", "--out", str(out / "minilm")]
    words = ["lln-fairseq", "convert", str(out / "minilm"), str(encoder)]
    yield [*words, "--attention", "softmax", "--positions", str(POSITIONS)]
    for name in names:
        task = TASKS[name]
        directory = out / name
        words = ["python", "-m", "data_prep.tsv", "--text", *GLUE_TASKS[task.glue].inputs, "--label", "label"]
        for split in ("train", "valid", "test"):
            words += [f"--{split}", str(directory / f"{split}.tsv")]
        yield [*words, "--tokenizer", str(encoder), "--out", str(directory / "data")]
        overrides = [
            f"glue={task.glue.lower()}",
            "recipe=small",
            run_override(),
            format_override("task.data", directory / "data"),
            f"task.max_positions={task.positions}",
            f"dataset.batch_size={task.batch_size}",
            f"optimization.max_epoch={task.epochs}",
            f"common.seed={seed}",
            format_override("checkpoint.finetune_from_model", start),
        ]
        if task.start is not None:
            overrides += ["model.load_checkpoint_heads=true", "model.attention_dropout=0", "model.pooler_dropout=0"]
        yield ["python", "-m", *train_words("finetune", directory / "teacher", overrides)]
        start = directory / "teacher" / "checkpoint_last.pt"


def write_long_pairs(args: argparse.Namespace) -> None:
    glue = GLUE_TASKS[TASKS[args.task].glue]
    tree, _ = fetch_tree(glue.published, args.source)
    source = GlueSource(tree, glue)
    names = chain(args.task)
    for name in names:
        for split, rows in select_rows(source, TASKS[name]).items():
            write_rows(args.out / name / f"{split}.tsv", [*glue.inputs, "label"], rows)
    for words in commands(names, args.out, args.seed):
        print(shlex.join(words))


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.long_pairs", __doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, default=Path("runs/long_pairs"), help="directory (default: %(default)s)")
    parser.add_argument("--source", type=Path, help="GLUE's archive or directory (default: download the task)")
    parser.add_argument("--seed", type=int, default=1, help="of the trainings (default: %(default)s)")
    args = parser.parse_args(argv)
    return run_main(lambda: write_long_pairs(args))


if __name__ == "__main__":
    sys.exit(main())
