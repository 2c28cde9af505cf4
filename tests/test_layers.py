"""Imports go down only, and nothing above `attention` knows a mechanism by name."""

import ast
import re
from pathlib import Path

import pytest

from lln_fairseq.attention import ATTENTION_REGISTRY

PACKAGE = Path(__file__).parents[1] / "lln_fairseq"
ALLOWED = {
    "ops": {"ops"},
    "attention": {"attention", "ops"},
    "modules": {"modules", "attention"},
    "models": {"models", "modules", "attention", "errors", "checkpoint", "presets"},
    "criterions": {"criterions", "errors"},
    "tasks": {"tasks", "models", "modules", "attention", "errors", "checkpoint", "analysis"},
    "analysis": {"analysis", "attention", "ops", "command", "errors", "checkpoint"},
}
HOST_FREE = ("ops", "attention")  # used without fairseq too


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_go_down(layer):
    files = list((PACKAGE / layer).rglob("*.py"))
    assert files
    for path in files:
        for module in imported(path):
            if module.startswith("lln_fairseq."):
                assert module.split(".")[1] in ALLOWED[layer], f"{path.name} imports {module}"
            if layer in HOST_FREE:
                assert module.split(".")[0] not in ("fairseq", "omegaconf", "hydra"), f"{path.name} imports {module}"


def test_no_mechanism_is_named_above_attention():
    names = "|".join(sorted(ATTENTION_REGISTRY, key=len, reverse=True))
    presets = PACKAGE / "models" / "lln_roberta.py"  # its default is a name
    for layer in ("modules", "models", "tasks"):
        for path in (PACKAGE / layer).rglob("*.py"):
            found = re.findall(rf"""["']({names})["']""", path.read_text())
            assert found == (["lln_diag"] if path == presets else []), path
