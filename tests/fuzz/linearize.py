"""Conversions that go on from a damaged file of their own, or from one whose values are exchanged."""

import contextlib
import functools
import io
import random
import tempfile
from pathlib import Path

import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.linearize.linearize import CHECKPOINT, PROGRESS
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train
from tests.fuzz.checkpoints import call, damage, exchange

STEPS = ("--steps", "2", "--tokens", "16", "--length", "8", "--distill", "1")


@functools.cache
def sound() -> tuple[list[str], Path, bytes]:
    """The command without OUT, what a whole conversion leaves, and the file that one goes on from."""
    sound.folder = tempfile.TemporaryDirectory(prefix="fuzz-linearize-")  # goes with the process
    folder = Path(sound.folder.name)
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()):
        data = make_corpus(folder / "data", sizes=(("train", 30), ("valid", 30)))
        softmax = (*MASKED_LM, *LLN, "--attention", "softmax", "--max-positions", 64, "--max-update", 1)
        train(monkeypatch, folder / "log", data, folder / "run", *softmax)
        command = [str(folder / "run" / "checkpoint_last.pt"), str(data)]
        assert main(["linearize", *command, str(folder / "out"), *STEPS]) == 0
    return command, folder / "out" / CHECKPOINT, (folder / "out" / PROGRESS).read_bytes()


def attack(rng: random.Random, folder: Path) -> str:
    """One line and no model, or the conversion reaches its end."""
    command, model, content = sound()
    out, mark, said = folder / "out", folder / "mark", io.StringIO()
    out.mkdir()
    (out / PROGRESS).write_bytes(rng.choice((damage, exchange, exchange, call, nothing))(rng, content, mark))
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(["linearize", *command, str(out), *STEPS])
    assert not mark.exists(), "code of the file ran"
    assert (out / CHECKPOINT).exists() == (code == 0)
    if code:
        assert said.getvalue().count("\n") == 1, f"not one line: {said.getvalue()}"
        return "refused"
    found, wanted = (torch.load(path)["model"] for path in (out / CHECKPOINT, model))
    if (out / PROGRESS).read_bytes() == content:
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), "another model"
    return "converted"


def nothing(rng: random.Random, content: bytes, mark: Path) -> bytes:
    return content
