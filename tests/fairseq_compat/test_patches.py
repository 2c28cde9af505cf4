"""The list of patches names lines of the installed fairseq, and tests that exist."""

import re
from pathlib import Path

import fairseq

from lln_fairseq.fairseq_compat import patches

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(r"# (fairseq\S*\.py):(\d+): .*\n +# (tests/\S+)::(\w+)\n +_wrap\([\w.]+, \"(\w+)\"")


def test_every_patch_names_its_line_and_an_existing_test():
    source = Path(patches.__file__).read_text(encoding="utf-8")
    entries = ENTRY.findall(source)
    assert len(entries) == source.count("    _wrap(")
    for file, line, path, test, name in entries:
        lines = Path(fairseq.__file__).parents[1].joinpath(file).read_text(encoding="utf-8").splitlines()
        if name != "excepthook":  # Python's, which prints the exceptions of fairseq_cli/train.py
            assert f"def {name}(" in lines[int(line) - 1], name
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), test
