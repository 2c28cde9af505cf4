"""Fetch published files into the cache, for example to copy it to a machine without internet.

python -m data_prep.fetch                     lists the files, and which of them are in the cache
python -m data_prep.fetch MNLI.zip dict.txt   fetches these
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from lln_fairseq.data.download import cache_directory, fetch_file
from lln_fairseq.data.published_files import FILES
from lln_fairseq.data.reporting import print_status

from .command import run_command


def list_files() -> None:
    """Print the published files, and which of them are in the cache."""
    cache = cache_directory()
    print_status(f"cache: {cache}")
    for name, file in FILES.items():
        state = "cached " if (cache / name).is_file() else "missing"
        print_status(f"{state} {name:26} {file.sha256}")


def fetch_files(names: Sequence[str]) -> None:
    """Download these files into the cache and print their paths."""
    for name in names:
        print_status(str(fetch_file(FILES[name])))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.fetch", description="Fetch published files into the cache ($LLN_DATA_CACHE)."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)}; without any: list them")
    names = parser.parse_args(argv).files
    unknown = [name for name in names if name not in FILES]
    if unknown:
        parser.error(f"unknown file {unknown[0]}")
    return run_command(partial(fetch_files, names) if names else list_files)


if __name__ == "__main__":
    sys.exit(main())
