"""Measure what more positions than a sentence encoder has learned do to its vectors.

    python -m scripts.experiments.positions ORIGINAL TEXT EXTENDED [EXTENDED ...] --lengths 512 1024 2048

ORIGINAL is a checkpoint with the learned positions, and each EXTENDED the same model from `lln-fairseq convert
--positions`. TEXT is a text in WikiText's form. Every row of the table is a model and a length. Each of the first
articles that are long enough gives two texts of this length, A from its start and B behind it. `found` is the share of
articles whose A is nearest to their own B among the texts B of all articles, `margin` the mean of the similarity to the
own B minus the one to the nearest other B, and `cosine` the mean similarity to the vectors of the original model, for
lengths that it takes. At longer ones the original model gets only the start of every
text, and the mean of its vectors of all windows. The vectors are the mean of the last hidden states.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import lln_fairseq
from lln_fairseq.command import UserError, run_main
from lln_fairseq.data.special_symbols import BOS, EOS
from lln_fairseq.data.vocabulary import load_vocabulary
from scripts.terminal import aligned, program_parser

TITLE = re.compile(r" = [^=].* =")


def read_articles(path: Path) -> Iterator[str]:
    """Yield the text of every article, without titles of articles and sections."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if TITLE.fullmatch(line.rstrip()):
                yield " ".join(lines)
                lines = []
            elif not line.startswith(" = "):
                lines.append(line.strip())
    yield " ".join(lines)


def read_tokens(path: Path, vocabulary: Any, count: int, length: int) -> Tensor:
    """Return the first `length` tokens of the first articles that have so many, int64 (count, length).

    Raises:
        UserError: if there are fewer articles of this length.
    """
    rows: list[Tensor] = []
    for article in read_articles(path):
        if len(article) < 2 * length:  # a token has more than two characters
            continue
        (ids,) = vocabulary.tokenizer.encode_ids([article])
        if len(ids) >= length:
            rows.append(torch.tensor(vocabulary.table[ids[:length]]).long())
        if len(rows) == count:
            return torch.stack(rows)
    raise UserError(f"{path} has only {len(rows)} articles of {length} tokens: give fewer --articles")


@torch.no_grad()
def mean_vectors(model: Any, tokens: Tensor, description: str) -> Tensor:
    """Return the mean of the last hidden states of every row of tokens (B, N), between <s> and </s>: (B, C)."""
    vectors = []
    for row in tqdm(tokens, desc=description, disable=None):
        sentence = F.pad(F.pad(row, (1, 0), value=BOS), (0, 1), value=EOS)
        features, _ = model(sentence[None], features_only=True)
        vectors.append(features[0].mean(dim=0))
    return torch.stack(vectors)


def window_vectors(model: Any, tokens: Tensor, window: int, description: str) -> Tensor:
    """Return the mean of the vectors of all windows of each row of tokens (B, N): (B, C)."""
    parts = [F.normalize(mean_vectors(model, part, description), dim=-1) for part in tokens.split(window, dim=1)]
    return torch.stack(parts).mean(dim=0)


def retrieval(first: Tensor, second: Tensor) -> list[str]:
    """Return how well rows i of `first` (B, C) find row i of `second` (B, C), as two cells of the table.

    They are the share of rows that find it by cosine, and the mean of its cosine minus the largest one of other rows.
    """
    similarity = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
    others = similarity.clone().fill_diagonal_(-1.0).max(dim=1).values
    margin = similarity.diagonal() - others
    return [f"{(margin > 0).double().mean().item():.3f}", f"{margin.mean().item():.3f}"]


def measure(args: argparse.Namespace) -> None:
    """Print the table."""
    lln_fairseq.register()
    from lln_fairseq.inference.loading import load_model

    lengths = sorted(args.lengths)
    original, _ = load_model(str(args.original))
    window = original.max_positions() - 2  # between <s> and </s>
    tokens = read_tokens(args.text, load_vocabulary(str(args.original.parent)), args.articles, 2 * (lengths[-1] - 2))
    models = {}
    for path in args.extended:
        models[str(path)], _ = load_model(str(path))
    table = [["model", "length", "cosine", "found", "margin"]]
    for length in lengths:
        size = length - 2
        texts = (tokens[:, :size], tokens[:, size : 2 * size])
        reference = [mean_vectors(original, text[:, :window], f"original, {length}") for text in texts]
        name = "original"
        if size > window:
            name = f"original, first {window + 2}"
            windows = [window_vectors(original, text, window, f"windows, {length}") for text in texts]
            table.append([f"original, windows of {window + 2}", str(length), "", *retrieval(*windows)])
        table.append([name, str(length), "", *retrieval(*reference)])
        for name, model in models.items():
            if length > model.max_positions():
                continue
            vectors = [mean_vectors(model, text, f"{name}, {length}") for text in texts]
            cosine = ""
            if size <= window:
                cosine = f"{F.cosine_similarity(torch.cat(vectors), torch.cat(reference)).mean().item():.4f}"
            table.append([name, str(length), cosine, *retrieval(*vectors)])
        print(aligned(table), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.experiments.positions", __doc__)
    parser.add_argument("original", type=Path, help="checkpoint with the learned positions")
    parser.add_argument("text", type=Path, help="articles in WikiText's form")
    parser.add_argument("extended", type=Path, nargs="+", help="checkpoints of the same model with more positions")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="in tokens (%(default)s)")
    parser.add_argument("--articles", type=int, default=200, help="number of articles (%(default)s)")
    args = parser.parse_args(argv)
    return run_main(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
