"""Strategies that damage files: changed bytes, replaced values, and pickles that call a function."""

import copy
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

MISSING = "(missing)"  # stands for a value that is removed


@dataclass
class Damage:
    """Removes `lost` bytes from `start` on and inserts other bytes in their place."""

    start: int
    lost: int
    inserted: bytes

    def apply(self, content: bytes) -> bytes:
        return content[: self.start] + self.inserted + content[self.start + self.lost :]


def damages(content: bytes, first: int = 0) -> st.SearchStrategy[Damage]:
    """Return a strategy that draws a Damage of non-empty bytes which starts at `first` or later."""
    start = st.integers(first, len(content) - 1)
    lost = st.sampled_from([0, 1, 2, 4, 8, 20, 5000, len(content)])
    return st.builds(Damage, start, lost, st.binary(max_size=20))


@dataclass
class Replacement:
    """Replaces the value at a path of keys in nested dicts and lists, or removes it if `value` is MISSING."""

    path: tuple
    value: Any

    def apply(self, container: Any) -> Any:
        """Return a changed copy of the container."""
        result = copy.deepcopy(container)
        parent = result
        for key in self.path[:-1]:
            parent = parent[key]
        if isinstance(self.value, str) and self.value == MISSING:
            del parent[self.path[-1]]
        else:
            parent[self.path[-1]] = self.value
        return result


def replacements(container: Any, values: list[Any]) -> st.SearchStrategy[Replacement]:
    """Return a strategy that draws a Replacement in a dict or list by one of `values` or by MISSING.

    Every top-level entry is drawn equally often, however many values it contains.
    """
    paths_by_entry = {}
    for path in list_paths(container):
        paths_by_entry.setdefault(path[0], []).append(path)
    path = st.sampled_from(list(paths_by_entry)).flatmap(lambda entry: st.sampled_from(paths_by_entry[entry]))
    return st.builds(Replacement, path, st.sampled_from([MISSING, *values]))


def list_paths(container: Any) -> list[tuple]:
    """Return the path of keys to every value in nested dicts and lists, each container before its contents."""
    if isinstance(container, dict):
        keys = list(container)
    elif isinstance(container, list):
        keys = range(len(container))
    else:
        return []
    paths = []
    for key in keys:
        paths.append((key,))
        paths += [(key, *inner_path) for inner_path in list_paths(container[key])]
    return paths


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> Any:
        return self.reduced


def malicious_objects(mark: Path) -> list[Call]:
    """Return objects whose pickles create the file `mark` when they are loaded without protection."""
    code = f"open({str(mark)!r}, 'w')"
    return [Call(open, str(mark), "w"), Call(eval, code), Call(exec, code), Call(Path.touch, mark)]


def torch_bytes(state: Any) -> bytes:
    """Return what torch.save writes for `state`."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
