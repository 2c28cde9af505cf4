"""Make small GLUE tasks in raw text, and prepare them with data_prep and a small tokenizer."""

import random
from pathlib import Path

from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line

from data_prep import glue
from data_prep.glue_rows import read_glue_rows
from data_prep.glue_tasks import GLUE_TASKS
from lln_fairseq.text.read_lines import read_lines
from lln_fairseq.text.tokenizers import SentencePieceTokenizer, train_sentencepiece

WORDS = ["film", "story", "actor", "scene", "camera", "music", "script", "ending", "comedy", "wonderful", "dreadful"]
SIZES = {"train": 48, "dev": 30, "test": 7}
COLUMNS = {
    "SST-2": ["sentence", "label"],
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "STS-B": ["index", "sentence1", "sentence2", "score"],
}
PAIR = ("--separator-token", 2, "--shorten-method", "truncate")  # some pairs are longer than 64 tokens
OPTIONS = {
    "SST-2": ("--num-classes", 2),
    "RTE": ("--num-classes", 2, *PAIR),
    "STS-B": ("--num-classes", 1, "--regression-target", *PAIR),
}


def random_sentence(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(3, 30))) + generator.choice([".", "!", ""])


def write_raw_tasks(folder: Path) -> Path:
    """Write the files of all tasks in GLUE's format and return the folder.

    The second sentences contain words that are not in the tokenizer's training text.
    """
    generator = random.Random(1)
    for name, all_columns in COLUMNS.items():
        (folder / name).mkdir(parents=True)
        for split, count in SIZES.items():
            columns = all_columns
            if split == "test":
                columns = [column for column in all_columns if column not in ("label", "score")]
            lines = ["\t".join(columns)]
            for row in range(count):
                cells = random_cells(name, row, generator)
                lines.append("\t".join(cells[column] for column in columns))
            (folder / name / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def random_cells(name: str, row: int, generator: random.Random) -> dict[str, str]:
    """Return a row's cells for every column of a task."""
    first = random_sentence(generator)
    second = random_sentence(generator) + " naïve 你好"
    is_positive = "wonderful" in first
    label = ("entailment", "not_entailment")[is_positive]
    if name == "SST-2":
        label = str(int(is_positive))
    return {
        "index": str(row),
        "sentence": first,
        "sentence1": first,
        "sentence2": second,
        "label": label,
        "score": f"{row % 6:.1f}",
    }


def write_tokenizer(folder: Path) -> Path:
    """Train a SentencePiece model with 120 pieces and return the path of its file."""
    generator = random.Random(0)
    model = train_sentencepiece([random_sentence(generator) for _ in range(300)], 120)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spm.model").write_bytes(model)
    return folder / "spm.model"


def make_glue(folder: Path, *names: str, tokenizer: Path | None = None) -> Path:
    """Prepare the tasks with these names in folder/NAME, and return the folder."""
    tokenizer = tokenizer or write_tokenizer(folder)
    glue.build_glue_tasks(folder, str(tokenizer), names, write_raw_tasks(folder / "raw"), workers=1)
    return folder


def texts_of(folder: Path, name: str, split: str = "dev") -> list[tuple[str, ...]]:
    """Return the texts of each row of a task, as data_prep reads them; `folder` is that of `make_glue`."""
    path = folder / "raw" / name / f"{split}.tsv"
    with path.open("rb") as stream:
        rows = read_glue_rows(read_lines(stream, str(path)), str(path), GLUE_TASKS[name], split.replace("dev", "valid"))
    return list(zip(*rows.inputs, strict=True))


def fairseq_dictionary(tokenizer: SentencePieceTokenizer, lines: list[str], path: Path) -> Dictionary:
    """Write the dict.txt that fairseq-preprocess makes of the pieces of lines, and return fairseq's dictionary."""
    pieces = path.with_suffix(".pieces")
    encoded = [" ".join(tokenizer.processor.encode(line, out_type=str)) for line in lines]
    pieces.write_text("\n".join(encoded) + "\n", encoding="utf-8")
    dictionary = Dictionary()
    Dictionary.add_file_to_dictionary(str(pieces), dictionary, tokenize_line, num_workers=1)
    dictionary.finalize(padding_factor=8)
    dictionary.save(str(path))
    return dictionary
