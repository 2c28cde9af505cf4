"""Define what the programs of this package share: options, summaries, and the exit codes of errors."""

import argparse
from collections.abc import Callable
from typing import Any

from lln_fairseq.command import run_main
from lln_fairseq.terminal import at_least_one, print_status
from lln_fairseq.text.parallel_encoder import usable_cores


def add_tokenizer_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", required=True, help="directory of the pre-training data or of a tokenizer, or gpt2"
    )


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --workers, by default the number of cores, and --overwrite."""
    parser.add_argument(
        "--workers", type=at_least_one, default=usable_cores(), help="processes (default: number of cores, %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing result in the output directory")


def run_build(build: Callable[[], dict[str, Any]], summarize: Callable[[dict[str, Any]], str]) -> int:
    """Build a data set, print the summary of the manifest that `build` returns, and return the exit code.

    See `run_command` for the exit codes.
    """
    return run_command(lambda: print_status(summarize(build())))


def run_command(program: Callable[[], object]) -> int:
    """Run a program and return its exit code: 0, 1 after an error that the user can fix, or 130 after Ctrl-C.

    An error that the user can fix is printed as one line on stderr. After Ctrl-C, a message says what the same command
    will not do again. Other exceptions are raised.
    """

    def run() -> None:
        program()

    return run_main(run, "interrupted: run the same command again; finished downloads and data directories are kept")
