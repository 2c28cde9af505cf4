"""Damaged and forged checkpoints are refused in one line or used as they are, and never run code."""

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lln_fairseq.checkpoints.reading import load_checkpoint
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train
from tests.fuzz.damage import calls, damages, exchanges, saved

VALUES = [None, -1, 0, 1 << 70, 0.5, float("nan"), "", "x" * 50, "${oc.env:HOME}", "lln_roberta", [], {}, [1, "a"],
          True, torch.ones(2)]  # fmt: skip


class Trained:
    """A training of one update: its data, its checkpoint as bytes, and what is in it."""

    def __init__(self, folder, monkeypatch):
        self.data = make_corpus(folder / "data", sizes=(("train", 8), ("valid", 4)))
        train(monkeypatch, folder / "log", self.data, folder / "run", *MASKED_LM, *LLN, "--max-update", 1)
        self.content = (folder / "run" / "checkpoint_last.pt").read_bytes()

    @property
    def state(self):
        return torch.load(io.BytesIO(self.content))


@pytest.fixture(scope="module")
def trained():
    # A folder whose name has the same length in every run, so that examples damage the same places.
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        yield Trained(Path(name), monkeypatch)


def changed(draws, trained, mark):
    """Bytes of a checkpoint that are damaged, or its values exchanged, or one of them a call."""
    kind = draws.draw(st.sampled_from(["bytes", "configuration", "value", "value", "call"]))
    if kind == "bytes":
        return draws.draw(damages(trained.content)).apply(trained.content)
    if kind == "configuration":
        return draws.draw(damages(trained.content, trained.content.find(b"cfg"))).apply(trained.content)
    values = calls(mark) if kind == "call" else VALUES
    return saved(draws.draw(exchanges(trained.state, values)).apply(trained.state))


@given(draws=st.data())
def test_changed_checkpoint_is_refused_or_loaded(trained, draws):
    with tempfile.TemporaryDirectory() as name:
        path, mark = Path(name, "checkpoint.pt"), Path(name, "mark")
        path.write_bytes(changed(draws, trained, mark))
        try:
            load_checkpoint(str(path), load_on_all_ranks=False)  # as a training does
            model, _ = load_model(str(path), str(trained.data))
        except InputError:
            return
        finally:
            assert not mark.exists(), "code of the checkpoint ran"
        event("loaded")
        logits, _ = model(torch.full((1, 5), 4))
        assert logits.shape[-1] == len(model.encoder.dictionary)
        expected = trained.state["model"]
        assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


@settings(max_examples=settings().max_examples // 5)
@given(draws=st.data())
def test_training_refuses_changed_checkpoint_or_finishes(trained, draws):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        folder, mark = Path(name), Path(name, "mark")
        (folder / "run").mkdir()
        (folder / "run" / "checkpoint_last.pt").write_bytes(changed(draws, trained, mark))
        options = (*MASKED_LM, *LLN, "--max-update", 2)
        with contextlib.suppress(InputError):
            train(monkeypatch, folder / "log", trained.data, folder / "run", *options)
            event("trained")
        assert not mark.exists(), "code of the checkpoint ran"
