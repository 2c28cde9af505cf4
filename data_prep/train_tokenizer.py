"""Train a SentencePiece model that encodes every text without loss.

    python -m data_prep.train_tokenizer --text FILE --out DIR

Then pass `--tokenizer DIR` to the other programs.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.text.read_lines import read_lines
from lln_fairseq.text.tokenizers import VOCAB_SIZE, train_on_corpus

from .command import run_command
from .manifest import output_directory


def read_stripped_lines(paths: Sequence[Path]) -> Iterable[str]:
    """Yield the lines of all files, blank ones included, with white space stripped from both ends."""
    for path in paths:
        with path.open("rb") as stream:
            yield from map(str.strip, read_lines(stream, str(path)))


def train_tokenizer(text: Sequence[Path], out: Path, vocab_size: int, model_type: str) -> None:
    """Train a SentencePiece model on text files and write OUT/spm.model and OUT/spm.vocab.

    spm.model is written last: if it exists, so does spm.vocab. An existing spm.model is never replaced; it raises
    UserError.

    Args:
        text: UTF-8 files with one sentence or paragraph per line.
        out: the output directory, which is created.
        vocab_size: number of pieces; for "char", the maximum.
        model_type: "bpe", "unigram" or "char".
    """
    with output_directory(out):
        if (out / "spm.model").exists():
            raise UserError(f"{out / 'spm.model'} exists already; remove it or choose another directory")
        tokenizer = train_on_corpus(read_stripped_lines(text), vocab_size, model_type)
        write_bytes(out / "spm.vocab", tokenizer.vocabulary_text().encode())
        write_bytes(out / "spm.model", tokenizer.files["spm.model"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.train_tokenizer",
        description="Train a SentencePiece model that encodes every text without loss.",
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", required=True, help="UTF-8 files with one sentence or paragraph per line"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for spm.model and spm.vocab")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="number of pieces (default: %(default)s)")
    parser.add_argument(
        "--model-type", choices=("bpe", "unigram", "char"), default="bpe", help="kind of model (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    return run_command(partial(train_tokenizer, args.text, args.out, args.vocab_size, args.model_type))


if __name__ == "__main__":
    sys.exit(main())
