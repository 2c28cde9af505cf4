"""Tasks of sentences, of pairs and a regression in raw text, made by data_prep with a tokenizer of its own."""

import random
from pathlib import Path

from data_prep import glue
from data_prep.glue_tasks import GLUE_TASKS, read_glue_rows
from lln_fairseq.data.text import read_lines
from lln_fairseq.data.tokenizers import train_sentencepiece

WORDS = ["film", "story", "actor", "scene", "camera", "music", "script", "ending", "comedy", "wonderful", "dreadful"]
SIZES = {"train": 48, "dev": 30, "test": 7}
HEADERS = {"SST-2": "sentence\tlabel", "RTE": "index\tsentence1\tsentence2\tlabel"}
HEADERS["STS-B"] = HEADERS["RTE"].replace("label", "score")
PAIR = ("--separator-token", 2, "--shorten-method", "truncate")  # some are longer than 64 tokens
OPTIONS = {
    "SST-2": ("--num-classes", 2),
    "RTE": ("--num-classes", 2, *PAIR),
    "STS-B": ("--num-classes", 1, "--regression-target", *PAIR),
}


def sentence(generator: random.Random) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(3, 30))) + generator.choice([".", "!", ""])


def source(folder: Path) -> Path:
    """GLUE's files of the tasks above; words that are not in the tokenizer's training text among them."""
    generator = random.Random(1)
    for name, header in HEADERS.items():
        (folder / name).mkdir(parents=True)
        for split, count in SIZES.items():
            columns = [column for column in header.split("\t") if split != "test" or column not in ("label", "score")]
            lines = ["\t".join(columns)]
            for row in range(count):
                first, second = sentence(generator), sentence(generator) + " naïve 你好"
                good = "wonderful" in first
                cells = {"index": str(row), "sentence": first, "sentence1": first, "sentence2": second,
                         "label": str(int(good)) if name == "SST-2" else ("entailment", "not_entailment")[good],
                         "score": f"{row % 6:.1f}"}  # fmt: skip
                lines.append("\t".join(cells[column] for column in columns))
            (folder / name / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def sentencepiece(folder: Path) -> Path:
    """The model of a tokenizer with 120 pieces."""
    generator = random.Random(0)
    model = train_sentencepiece([sentence(generator) for _ in range(300)], 120)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spm.model").write_bytes(model)
    return folder / "spm.model"


def make_glue(folder: Path, *names: str, tokenizer: Path | None = None) -> Path:
    """Binarised tasks in folder/NAME, by names of HEADERS."""
    tokenizer = tokenizer or sentencepiece(folder)
    glue.build_glue_tasks(folder, str(tokenizer), names, source(folder / "raw"), workers=1)
    return folder


def texts_of(folder: Path, name: str, split: str = "dev") -> list[tuple[str, ...]]:
    """The texts of a task's file, row by row, as data_prep reads them."""
    path = folder / "raw" / name / f"{split}.tsv"
    with path.open("rb") as stream:
        rows = read_glue_rows(read_lines(stream, str(path)), str(path), GLUE_TASKS[name], split.replace("dev", "valid"))
    return list(zip(*rows.inputs, strict=True))
