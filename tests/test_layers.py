"""The layers of the package: imports, also those inside functions, go down only and without cycles."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# For each package and module directly below lln_fairseq, from the bottom to the top: what it may import besides itself.
ALLOWED_IMPORTS = {
    "errors": set(),
    "command": {"errors"},
    "terminal": set(),
    "files": set(),
    "provenance": {"files"},
    "scores": set(),
    "timing": set(),
    "text": {"errors", "files", "terminal"},
    "ops": set(),
    "attention": {"ops"},
    "models": {"attention", "errors", "ops", "text"},
    "criterions": {"errors", "scores"},
    "analysis": {"attention", "ops"},
    "checkpoints": {"attention", "errors", "files", "models", "ops", "text"},
    "training": {"analysis", "attention", "checkpoints", "command", "errors", "files", "models", "text"},
    "fairseq_compat": {"attention", "checkpoints", "errors", "training"},
    "tasks": {"attention", "checkpoints", "criterions", "errors", "fairseq_compat", "models", "text", "training"},
    "inference": {
        "__init__",
        "attention",
        "checkpoints",
        "errors",
        "files",
        "models",
        "provenance",
        "scores",
        "tasks",
        "terminal",
        "text",
    },
    "conversion": {
        "__init__",
        "attention",
        "checkpoints",
        "errors",
        "files",
        "inference",
        "models",
        "ops",
        "tasks",
        "text",
        "training",
    },
    "hub": {"conversion", "ops"},
    "engines": {"checkpoints", "errors", "hub", "text"},
    "linearize": {
        "attention",
        "checkpoints",
        "conversion",
        "errors",
        "files",
        "inference",
        "models",
        "ops",
        "tasks",
        "terminal",
        "text",
        "training",
    },
    "speedup": {
        "attention",
        "checkpoints",
        "conversion",
        "errors",
        "files",
        "inference",
        "linearize",
        "ops",
        "provenance",
        "hub",
        "scores",
        "terminal",
        "text",
        "timing",
        "training",
    },
}
# These may import everything.
PROGRAMS = {"__init__", "__main__", "analysis.analyze", "training.train", "training.hydra_callback"}
WITHOUT_FAIRSEQ = {
    "ops",
    "attention",
    "hub",
    "engines",
    "errors",
    "files",
    "provenance",
    "command",
    "terminal",
    "timing",
    "__init__",
}
FAIRSEQ_PACKAGES = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}


def module_name(path):
    """Return the dotted name of the module in a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


MODULES = {}  # path of every module of the project by its dotted name
for folder in ("lln_fairseq", "data_prep", "scripts"):
    for file in (ROOT / folder).rglob("*.py"):
        MODULES[module_name(file)] = file
PACKAGE_MODULES = [name for name in MODULES if name.split(".")[0] == "lln_fairseq"]


@functools.cache
def imported_modules(name):
    """Return the dotted names of all modules that a module imports anywhere in its file."""
    modules = []
    path = MODULES[name]
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = []
            if node.level:  # a relative import: one dot is the package of the module
                depth = len(package.split(".")) + 1 - node.level
                source = package.split(".")[:depth]
            if node.module:
                source.append(node.module)
            for alias in node.names:
                submodule = ".".join([*source, alias.name])
                modules.append(submodule if submodule in MODULES else ".".join(source))
    return modules


def layer(name):
    """Return the package or module directly below lln_fairseq that a module belongs to, or the name of a program."""
    inner_name = name.removeprefix("lln_fairseq").removeprefix(".") or "__init__"
    if inner_name in PROGRAMS:
        return inner_name
    return inner_name.split(".")[0]


def test_every_package_and_module_has_a_layer():
    assert {layer(name) for name in PACKAGE_MODULES} == ALLOWED_IMPORTS.keys() | PROGRAMS


def test_imports_go_down():
    for name in PACKAGE_MODULES:
        own_layer = layer(name)
        for module in imported_modules(name):
            top = module.split(".")[0]
            assert top not in ("data_prep", "scripts", "tests"), f"{name} imports {module}"
            assert top not in FAIRSEQ_PACKAGES or own_layer not in WITHOUT_FAIRSEQ, f"{name} imports {module}"
            if top == "lln_fairseq" and own_layer not in PROGRAMS:
                assert layer(module) in ALLOWED_IMPORTS[own_layer] | {own_layer}, f"{name} imports {module}"


def test_data_preparation_imports_only_data_library():
    for name in MODULES:
        if name.split(".")[0] == "data_prep":
            layers = {layer(module) for module in imported_modules(name) if module.split(".")[0] == "lln_fairseq"}
            assert layers <= {"command", "errors", "files", "terminal", "text"}, name
            # In a wheel the package is called lln_fairseq.data_prep, so that imports must be relative.
            assert "from data_prep" not in MODULES[name].read_text(), name


def test_imports_have_no_cycle():
    tuple(TopologicalSorter(ALLOWED_IMPORTS).static_order())  # raises CycleError for a cycle of packages
    graph = {}
    for name in MODULES:
        graph[name] = {module for module in imported_modules(name) if module in MODULES and module != name}
    assert sum(len(modules) for modules in graph.values()) > 200
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
