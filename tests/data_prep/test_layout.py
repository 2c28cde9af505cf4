"""How the files of data_prep stand to each other."""

import ast
import importlib
import importlib.util
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import data_prep

FOLDER = Path(data_prep.__file__).parent


def imports(path):
    """The files of data_prep that this one imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                found |= {node.module} if node.module else {alias.name for alias in node.names}
            else:
                names = [node.module]
        names = [name for name in names if name != "lln_fairseq.command"]  # how a program starts and ends
        assert not {"data_prep", "lln_fairseq"} & {name.partition(".")[0] for name in names}, path
    return found


def test_no_circle_and_everything_relative():
    graph = {path.stem: imports(path) for path in FOLDER.glob("*.py")}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert graph["sources"] == set()
    assert order.index("sources") < order.index("download") < order.index("glue")


def test_the_package_works_under_another_name():
    place = {"submodule_search_locations": [str(FOLDER)]}
    spec = importlib.util.spec_from_file_location("another_name", FOLDER / "__init__.py", **place)
    sys.modules["another_name"] = importlib.util.module_from_spec(spec)
    try:
        for program in ("wikitext103", "glue", "demo", "encoders", "fetch", "lra", "newsgroups", "tokenizers"):
            module = importlib.import_module(f"another_name.{program}")
            assert module.__name__ == f"another_name.{program}"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "another_name"]:
            del sys.modules[name]
