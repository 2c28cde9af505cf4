"""Train a SentencePiece model that keeps every text.

python -m data_prep.train_tokenizer --text FILE --out DIR      other programs use it with `--tokenizer DIR`
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.manifest import output_directory
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.text import read_lines
from lln_fairseq.data.tokenizers import VOCAB_SIZE, train_on_corpus

from .command import run_command


def _train_command(text: Sequence[Path], out: Path, vocab_size: int, model_type: str) -> None:
    def lines() -> Iterable[str]:
        for path in text:
            with path.open("rb") as stream:
                yield from map(str.strip, read_lines(stream, str(path)))

    with output_directory(out):
        if (out / "spm.model").exists():
            raise DataError(f"{out / 'spm.model'} is there already; remove it or choose another directory")
        tokenizer = train_on_corpus(lines(), vocab_size, model_type)
        write_bytes(out / "spm.vocab", tokenizer.vocabulary_text().encode())
        write_bytes(out / "spm.model", tokenizer.files["spm.model"])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.train_tokenizer", description="Train a SentencePiece model that keeps every text."
    )
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 files, one sentence or line a line")
    parser.add_argument("--out", type=Path, required=True, help="directory for spm.model and spm.vocab")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="pieces (%(default)s)")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="(%(default)s)")
    a = parser.parse_args(argv)
    return run_command(lambda: _train_command(a.text, a.out, a.vocab_size, a.model_type))


if __name__ == "__main__":
    sys.exit(main())
