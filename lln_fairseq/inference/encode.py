"""Write a vector for every line of text to a NumPy file.

    lln-fairseq encode encoders/minilm/model.pt --input texts.txt --output vectors.npy

Row i of the output, a float32 array, is the vector of line i, also of an empty line. The vectors are those of `encode`
in Python. They are written while the input is read, so the input may be of any size. With --on-error row, a line that
cannot be read or encoded gets NaN, and a warning says why.
"""

import argparse
import logging
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from lln_fairseq.checkpoints.pooling import POOLINGS
from lln_fairseq.errors import UserError
from lln_fairseq.inference.outputs import output_path, reject_input_as_output
from lln_fairseq.inference.predict import add_text_options, map_lines, open_lines
from lln_fairseq.inference.text_model import load_text_model

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq encode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="an encoder of `lln-fairseq convert`, or any other checkpoint for text")
    add_text_options(parser)
    parser.add_argument("--output", type=Path, required=True, help="a .npy file, written completely or not at all")
    parser.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="mean over the tokens, the first token, or the maximum over the tokens (default: the model's own)",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="divide each vector by its Euclidean norm (default: the model's own)",
    )
    args = parser.parse_args(argv)
    if args.output.exists() and not args.output.is_file():
        raise UserError(f"--output must be a file, got {args.output}")
    reject_input_as_output(args.input, args.output)
    with open_lines(args.input, args.on_error) as lines:
        model = load_text_model(args.checkpoint, args.data, args.tokenizer, args.precision, args.positions)
        model.batch_tokens = args.batch_tokens
        encode = partial(
            model.encode_each,
            pooling=args.pooling,
            normalize=args.normalize,
            on_long=args.on_long,
            on_error=args.on_error,
        )
        with output_path(args.output) as part, part.open("wb") as file:
            write_vectors(file, map_lines(encode, lines), model.width)


def write_vectors(file: BinaryIO, vectors: Iterable[Tensor | UserError], width: int) -> None:
    """Write the vectors (width,), as many as there are, to an empty file, as a float32 array in NumPy's format.

    For a UserError, a vector of NaN is written, and the error is logged.
    """
    _write_header(file, 0, width)
    count = 0
    for vector in vectors:
        count += 1
        if isinstance(vector, UserError):
            logger.warning(f"no vector for line {count}: {vector}")
            vector = torch.full((width,), math.nan)
        file.write(vector.numpy().astype("<f4").tobytes())
    file.seek(0)
    _write_header(file, count, width)  # of the same size: NumPy leaves room for a growing number of rows


def _write_header(file: BinaryIO, rows: int, width: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, header)
