"""One version, wherever it is written."""

import re
from pathlib import Path

import setuptools

import lln_fairseq

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere(monkeypatch):
    packaged = {}
    monkeypatch.setattr(setuptools, "setup", packaged.update)
    exec((ROOT / "setup.py").read_text(), {"__file__": str(ROOT / "setup.py")})
    assert packaged["version"] == lln_fairseq.__version__
    assert f"\nversion: {lln_fairseq.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == lln_fairseq.__version__
