"""Write the files that a user names with --output, --json, --predict and --png."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lln_fairseq.errors import UserError
from lln_fairseq.files import atomic_path

STANDARD_STREAM = "-"  # standard input or standard output
STANDARD_INPUT = 0  # its file descriptor


def check_output_path(path: Path) -> None:
    """Raise UserError if the path is a directory or in none. Call it before a long computation."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a directory")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: no such directory: {path.parent}")


def reject_input_as_output(input_name: str, output_name: str | Path) -> None:
    """Raise UserError if the output would replace the file that the texts are read from, also through `-`."""
    source = STANDARD_INPUT if input_name == STANDARD_STREAM else input_name
    if os.path.isfile(source) and os.path.isfile(output_name) and os.path.samefile(source, output_name):
        raise UserError(f"--output would replace the texts of --input, {input_name}: give another file")


@contextmanager
def output_path(path: Path) -> Iterator[Path]:
    """Yield the path that the `with` block must write to: a temporary file, which replaces `path` if nothing fails.

    A device or a pipe is written directly. A symbolic link stays one, and its target is replaced.
    """
    if path.exists() and not path.is_file():
        yield path
    else:
        with atomic_path(path.resolve()) as part:
            yield part
