"""What can happen to files: changed bytes, exchanged values, pickles that call a function."""

import copy
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

MISSING = "(missing)"  # in the place of a value: there is none


@dataclass
class Damage:
    """Bytes from `start` on are lost, and others come in their place."""

    start: int
    lost: int
    inserted: bytes

    def apply(self, content: bytes) -> bytes:
        return content[: self.start] + self.inserted + content[self.start + self.lost :]


def damages(content: bytes, first: int = 0) -> st.SearchStrategy[Damage]:
    """Draw damages of non-empty bytes after the place `first`."""
    start = st.integers(first, len(content) - 1)
    lost = st.sampled_from([0, 1, 2, 4, 8, 20, 5000, len(content)])
    return st.builds(Damage, start, lost, st.binary(max_size=20))


@dataclass
class Exchange:
    """A value in nested dicts and lists is another one, or missing."""

    path: tuple
    value: Any

    def apply(self, container: Any) -> Any:
        result = copy.deepcopy(container)
        group = result
        for key in self.path[:-1]:
            group = group[key]
        if isinstance(self.value, str) and self.value == MISSING:
            del group[self.path[-1]]
        else:
            group[self.path[-1]] = self.value
        return result


def exchanges(container: Any, values: list[Any]) -> st.SearchStrategy[Exchange]:
    """Draw exchanges of values of a container, of all its entries alike, however much is in them."""
    by_entry = {path[0]: [] for path in paths(container)}
    for path in paths(container):
        by_entry[path[0]].append(path)
    path = st.sampled_from(list(by_entry)).flatmap(lambda entry: st.sampled_from(by_entry[entry]))
    return st.builds(Exchange, path, st.sampled_from([MISSING, *values]))


def paths(container: Any) -> list[tuple]:
    """List the path of keys to everything in nested dicts and lists."""
    if not isinstance(container, dict | list):
        return []
    found = []
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        found.append((key,))
        found += [(key, *rest) for rest in paths(container[key])]
    return found


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def calls(mark: Path) -> list[Call]:
    """Return objects whose pickles would make the file `mark`."""
    code = f"open({str(mark)!r}, 'w')"
    return [Call(open, str(mark), "w"), Call(eval, code), Call(exec, code), Call(Path.touch, mark)]


def saved(state: Any) -> bytes:
    """Return what torch.save writes."""
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()
