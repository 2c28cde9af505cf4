"""A folder for a machine with a GPU and without a network: the checkout, the wheels it lacks, text and GLUE rows.

    scripts/gpu_run.sh --pack carry --text data-bin/wikitext-103 --glue data-bin/glue

Text and rows are what data_prep.wikitext103 and data_prep.glue made; the ids of a vocabulary below 65,536 take two
bytes. There: cd carry && scripts/gpu_run.sh
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lln_fairseq.command import UserError, run_main

ROOT = Path(__file__).parents[2]
LIMIT = 60_000_000  # bytes
# What fairseq needs and a machine for torch does not have; versions are those of requirements.txt where it has them.
WHEELS = ("ve-fairseq", "hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.3", "bitarray==3.12.3",
          "sacrebleu==2.6.0", "portalocker==4.4.2", "tabulate==0.10.0", "sentencepiece", "tiktoken")  # fmt: skip
TASKS = ("SST-2", "QNLI")
SPLITS = ("train", "valid")


def pack(args: argparse.Namespace) -> None:
    """Raises: UserError for an output that exists, data that is not there, a missing wheel, too large a folder."""
    if args.out.exists():
        raise UserError(f"{args.out} exists: give another folder")
    sources = {"data-bin/wikitext-103": args.text, **{f"data-bin/glue/{task}": args.glue / task for task in TASKS}}
    for source in sources.values():
        if not (source / "manifest.json").is_file():
            raise UserError(f"{source} is no finished data directory: it has no manifest.json")
    with tempfile.TemporaryDirectory(dir=args.out.resolve().parent) as folder:
        part = Path(folder, "pack")
        checkout(part)
        for name, source in sources.items():
            copy_data(source, part / name)
        get_wheels(part / "wheels", args.python, args.platform)
        size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        if size > LIMIT:
            raise UserError(f"the folder would have {size / 1e6:.0f} MB, more than {LIMIT / 1e6:.0f}: give less text "
                            "(data_prep.wikitext103 --limit-mb)")  # fmt: skip
        part.replace(args.out)
    print(f"{args.out}: {size / 1e6:.1f} MB; there: cd {args.out.name} && scripts/gpu_run.sh")


def checkout(target: Path) -> None:
    """The files that git knows and does not ignore, as they are."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def copy_data(source: Path, target: Path) -> None:
    """Training and validation data of one directory, its dictionaries and its manifest."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and (path.suffix not in (".bin", ".idx") or path.stem in SPLITS):
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.relative_to(source))


def get_wheels(folder: Path, python: str, platform: list[str]) -> None:
    """Wheels for another Python and platform; what has none and is pure Python is built here."""
    folder.mkdir()
    pinned = dict(re.findall(r"^([\w.-]+)(==[\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    wanted = [name + pinned.get(name, "") for name in WHEELS]
    platforms = [f"--platform={name}" for name in platform]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for requirement in wanted:
        download = ["download", "--only-binary=:all:", f"--python-version={python}", *platforms]
        ways = [[*pip, *download], [*pip, "wheel"]]
        for way in ways:
            target = "--dest" if "download" in way else "--wheel-dir"
            done = subprocess.run([*way, "--no-deps", target, str(folder), requirement], capture_output=True, text=True)
            if not done.returncode:
                break
        else:
            raise UserError(f"pip has no wheel of {requirement}: {done.stderr.strip().splitlines()[-1]}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_run.sh --pack", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, default=Path("data-bin/wikitext-103"), help="(%(default)s)")
    parser.add_argument(
        "--glue", type=Path, default=Path("data-bin/glue"), help=f"holds {', '.join(TASKS)} (%(default)s)"
    )
    parser.add_argument("--python", default="3.12", help="of the other machine (default: %(default)s)")
    parser.add_argument("--platform", nargs="+", default=["manylinux2014_x86_64", "manylinux_2_28_x86_64"])
    args = parser.parse_args(argv)
    return run_main(lambda: pack(args))


if __name__ == "__main__":
    sys.exit(main())
