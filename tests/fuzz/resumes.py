"""Trainings that go on from a checkpoint whose bytes are damaged, or whose values are exchanged."""

import contextlib
import io
import random
from pathlib import Path

import pytest

from lln_fairseq.errors import InputError
from tests.fairseq_runs import LLN, MASKED_LM, train
from tests.fuzz.checkpoints import call, damage, exchange, original


def attack(rng: random.Random, folder: Path) -> str:
    """One line, or the training reaches its end."""
    data, content, _ = original()
    run, mark = folder / "run", folder / "mark"
    run.mkdir()
    change = rng.choice((damage, exchange, exchange, exchange, call))
    (run / "checkpoint_last.pt").write_bytes(change(rng, content, mark))
    outcome = "refused"
    with contextlib.suppress(InputError), pytest.MonkeyPatch.context() as monkeypatch:
        with contextlib.redirect_stdout(io.StringIO()):
            train(monkeypatch, folder / "log", data, run, *MASKED_LM, *LLN, "--max-update", 2)
        outcome = "trained"
    assert not mark.exists(), "code of the checkpoint ran"
    return outcome
