"""Fetch published files into the cache, for example to copy the cache to a machine without internet access.

python -m data_prep.fetch                       list the published files, and which of them are cached
python -m data_prep.fetch MNLI.zip dict.txt     fetch MNLI.zip and dict.txt
python -m data_prep.fetch gpt2                  fetch GPT-2's tokenizer with fairseq's dict.txt, and print its directory
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from lln_fairseq.terminal import print_status

from .command import run_command
from .download import cache_directory, fetch_file, fetch_gpt2
from .published_files import FILES

GPT2 = "gpt2"  # the files of its tokenizer


def list_files() -> None:
    """Print the path of the cache, then the name of every published file, its SHA-256, and whether it is in the cache.

    The checksums of the files in the cache are not verified.
    """
    cache = cache_directory()
    print_status(f"cache: {cache}")
    for name, file in FILES.items():
        state = "missing"
        if (cache / name).is_file():
            state = "cached "
        print_status(f"{state} {name:26} {file.sha256}")


def fetch_files(names: Sequence[str]) -> None:
    """Download published files into the cache, unless intact copies are there, and print their paths."""
    for name in names:
        if name == GPT2:
            print_status(str(fetch_gpt2()))
        else:
            print_status(str(fetch_file(FILES[name])))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.fetch", description="Fetch published files into the cache ($LLN_DATA_CACHE)."
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help=f"files to fetch, from {GPT2}, {', '.join(FILES)}; without a name, list the files",
    )
    names = parser.parse_args(argv).files
    for name in names:
        if name != GPT2 and name not in FILES:
            parser.error(f"unknown file {name}")
    if names:
        return run_command(partial(fetch_files, names))
    return run_command(list_files)


if __name__ == "__main__":
    sys.exit(main())
