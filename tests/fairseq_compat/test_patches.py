"""The list of patches names the lines of the installed fairseq, and tests that exist."""

import inspect
from pathlib import Path

import lln_fairseq
from lln_fairseq.fairseq_compat.patches import list_patches

lln_fairseq.register()
ROOT = Path(__file__).parents[2]


def test_every_patch_names_its_line_and_an_existing_test():
    for patch in list_patches(lambda: None):
        if patch.line:
            code = inspect.unwrap(getattr(patch.owner, patch.name)).__code__
            assert f"{Path(code.co_filename).as_posix()}:{code.co_firstlineno}".endswith(f"/fairseq/{patch.line}")
        path, test = patch.test.split("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), patch.test
