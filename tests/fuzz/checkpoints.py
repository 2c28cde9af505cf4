"""Checkpoints: bits flipped, bytes cut and lost, values of the configuration and of the training's state exchanged."""

import contextlib
import copy
import functools
import io
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import lln_fairseq
from lln_fairseq.host.checkpoints import load_to_cpu
from lln_fairseq.host.errors import InputError
from lln_fairseq.inference.loading import load_model
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train

LONGEST = 60  # characters of a tensor's or text's repr in a message


@functools.cache
def original() -> tuple[Path, bytes, dict[str, torch.Tensor]]:
    """The data of a training of one update, its checkpoint, and the parameters that this holds."""
    original.folder = tempfile.TemporaryDirectory(prefix="fuzz-checkpoint-")  # goes with the process
    folder = Path(original.folder.name)
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()):
        data = make_corpus(folder / "data", sizes=(("train", 8), ("valid", 4)))
        train(monkeypatch, folder / "log", data, folder / "run", *MASKED_LM, *LLN, "--max-update", 1)
    path = folder / "run" / "checkpoint_last.pt"
    return data, path.read_bytes(), torch.load(path)["model"]


def attack(rng: random.Random, folder: Path) -> str:
    """The file is refused in one line, or its model has the parameters that the file holds and runs."""
    data, content, parameters = original()
    path, mark = folder / "checkpoint.pt", folder / "mark"
    change = rng.choice([damage, damage, exchange, exchange, exchange, call])
    path.write_bytes(change(rng, content, mark))
    outcome = "refused"
    with contextlib.suppress(InputError):
        load_to_cpu(str(path), load_on_all_ranks=False)  # as a training does
        outcome = "resumed"
    with contextlib.suppress(InputError):
        model, _ = load_model(str(path), str(data))
        out, _ = model(torch.full((1, 5), 4))
        assert out.shape[-1] == len(model.encoder.dictionary)
        outcome = "loaded"
        own = model.state_dict()
        assert all(torch.equal(own[key], parameters[key]) for key in parameters), "other parameters"
    assert not mark.exists(), "code of the checkpoint ran"
    return outcome


def damage(rng: random.Random, content: bytes, mark: Path) -> bytes:
    kind, changed = rng.randrange(4), bytearray(content)
    if kind == 0:
        return content[: rng.randrange(len(content))]
    if kind == 1:
        start = rng.randrange(len(content))
        del changed[start : start + rng.randint(1, 5000)]
        return bytes(changed)
    # the configuration and the table of contents more often than the numbers
    places = [rng.randrange(len(content)) if kind == 2 else content.find(b"cfg") + rng.randrange(6000)]
    for place in places * rng.randint(1, 3):
        changed[min(place, len(content) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def exchange(rng: random.Random, content: bytes, mark: Path) -> bytes:
    state = torch.load(io.BytesIO(content))
    values: list[Any] = [None, -1, 0, 1 << 70, 0.5, float("nan"), "", "x" * 50, "${oc.env:HOME}", "lln_roberta", [],
                         {}, [1, "a"], True, torch.ones(2), f"open({str(mark)!r}, 'w')"]  # fmt: skip
    for _ in range(rng.randint(1, 3)):
        group = state
        while True:
            if not isinstance(group, dict) or not group:
                break
            key = rng.choice(list(group))
            if group is state.get("model") or not isinstance(group[key], dict) or rng.random() < 0.15:
                if rng.random() < 0.2:
                    del group[key]
                else:
                    group[key] = copy.copy(rng.choice(values))
                break
            group = group[key]
    return saved(state)


class Call:
    """What a pickle of it calls when it is loaded."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def call(rng: random.Random, content: bytes, mark: Path) -> bytes:
    state = torch.load(io.BytesIO(content))
    function = rng.choice([open, eval, exec, Path.touch])
    argument = mark if function is Path.touch else f"open({str(mark)!r}, 'w')"
    key = rng.choice(list(state))
    state[key] = Call(open, str(mark), "w") if function is open else Call(function, argument)
    return saved(state)


def saved(state: Any) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


lln_fairseq.register()
