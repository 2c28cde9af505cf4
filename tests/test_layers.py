"""Imports go down only, those inside functions too; no circle anywhere; nothing above `attention` knows a mechanism."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from lln_fairseq.attention import MECHANISMS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lln_fairseq"

# What each package and each module of lln_fairseq may import of the others, from the bottom to the top.
ALLOWED = {
    "command": set(),
    "data": {"command", "errors"},
    "ops": set(),
    "attention": {"ops"},
    "errors": {"command"},
    "modules": {"attention", "ops"},
    "models": {"attention", "errors", "modules", "ops"},
    "criterions": {"errors"},
    "analysis": {"attention", "ops"},
    "checkpoints": {"attention", "command", "data", "errors"},
    "training": {"analysis", "attention", "checkpoints", "command", "data", "errors", "modules"},
    "fairseq_compat": {"attention", "checkpoints", "errors", "training"},
    "tasks": {"checkpoints", "criterions", "data", "errors", "fairseq_compat", "models", "training"},
    "inference": {"checkpoints", "command", "criterions", "data", "errors", "tasks"},
    "conversion": {
        "__init__",
        "attention",
        "checkpoints",
        "data",
        "errors",
        "inference",
        "models",
        "ops",
        "tasks",
        "training",
    },
    "linearize": {
        "attention",
        "checkpoints",
        "conversion",
        "data",
        "errors",
        "inference",
        "models",
        "modules",
        "tasks",
        "training",
    },
}
# They may import all of them.
PROGRAMS = {"__init__", "__main__", "analysis.analyze", "training.train"}
WITHOUT_FAIRSEQ = {"ops", "attention", "command", "__init__"}
HOST_PACKAGES = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for top in ("lln_fairseq", "data_prep", "scripts")
           for path in (ROOT / top).rglob("*.py")}  # fmt: skip


def imported(name):
    """The modules that a module names in its imports, wherever they stand."""
    path = MODULES[name]
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inside = f"{source}.{alias.name}"
                yield inside if inside in MODULES else source


def layer(name):
    """The package or module directly below lln_fairseq that a module belongs to."""
    inner = name.removeprefix("lln_fairseq").removeprefix(".") or "__init__"
    return inner if inner in PROGRAMS else inner.split(".")[0]


OURS = [name for name in MODULES if name.split(".")[0] == "lln_fairseq"]


def test_every_package_and_module_has_its_layer():
    assert {layer(name) for name in OURS} == ALLOWED.keys() | PROGRAMS


@pytest.mark.parametrize("name", OURS)
def test_imports_go_down(name):
    here = layer(name)
    for module in imported(name):
        top = module.split(".")[0]
        assert top not in ("data_prep", "scripts", "tests"), f"{name} imports {module}"
        assert top not in HOST_PACKAGES or here not in WITHOUT_FAIRSEQ, f"{name} imports {module}"
        if top == "lln_fairseq" and here not in PROGRAMS:
            assert layer(module) in ALLOWED[here] | {here}, f"{name} imports {module}"


def test_data_preparation_imports_only_the_data_library():
    for name in MODULES:
        if name.split(".")[0] == "data_prep":
            others = {layer(module) for module in imported(name) if module.split(".")[0] == "lln_fairseq"}
            assert others <= {"command", "data"}, name
            # In a wheel the package is lln_fairseq.data_prep.
            assert "from data_prep" not in MODULES[name].read_text(), name


def test_there_is_no_circle():
    tuple(TopologicalSorter(ALLOWED).static_order())  # none among the packages
    graph = {name: {module for module in imported(name) if module in MODULES} - {name} for name in MODULES}
    assert sum(map(len, graph.values())) > 200
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_mechanism_is_named_above_attention():
    names = "|".join(sorted(MECHANISMS, key=len, reverse=True))
    own = {
        "lln_fairseq.models.lln_roberta": {"lln_diag"},  # its default
        "lln_fairseq.conversion.from_hugging_face": {"relu"},  # the activation
        "lln_fairseq.conversion.to_hugging_face": {"lln", "lln_diag"},  # what the next file knows
        "lln_fairseq.conversion.modeling_lln_roberta": {"lln", "lln_diag"},
        "lln_fairseq.checkpoints.config": {"softmax"},  # what a RoBERTa of fairseq has
        "lln_fairseq.analysis.separation": {"softmax", "lln"},  # the paper's experiment is about these
    }
    for name in OURS:
        if layer(name) not in ("ops", "attention"):
            found = re.findall(rf"""["']({names})["']""", MODULES[name].read_text())
            assert set(found) == own.get(name, set()), name
