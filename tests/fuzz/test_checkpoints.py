"""Damaged and forged checkpoints are rejected with a UserError or load as stored; their code never runs."""

import contextlib
import io
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lln_fairseq.checkpoints.reading import load_checkpoint
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train
from tests.fuzz.damage import damages, malicious_objects, replacements, torch_bytes

NUMBERS = [-1, 0, 1 << 70, 0.5, float("nan")]
VALUES = [None, True, *NUMBERS, "", "x" * 50, "${oc.env:HOME}", "lln_roberta", [], {}, [1, "a"], torch.ones(2)]


class TrainedModel:
    """The data of a training with one update, and the bytes of its checkpoint."""

    def __init__(self, folder, monkeypatch):
        self.data = make_corpus(folder / "data", sizes=(("train", 8), ("valid", 4)))
        train(monkeypatch, folder / "log", self.data, folder / "run", *MASKED_LM, *LLN, "--max-update", 1)
        self.content = (folder / "run" / "checkpoint_last.pt").read_bytes()

    @property
    def state(self):
        """The content of the checkpoint, loaded anew each time."""
        return torch.load(io.BytesIO(self.content))


@pytest.fixture(scope="module")
def trained():
    # The name of the folder has the same length in every run, so that the examples damage the same bytes.
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        yield TrainedModel(Path(name), monkeypatch)


def draw_changed_checkpoint(data, trained, mark):
    """Draw the bytes of a checkpoint with damaged bytes, a replaced value, or an object that creates `mark`."""
    kind = data.draw(st.sampled_from(["bytes", "configuration", "value", "value", "call"]))
    if kind == "bytes":
        return data.draw(damages(trained.content)).apply(trained.content)
    if kind == "configuration":
        return data.draw(damages(trained.content, trained.content.find(b"cfg"))).apply(trained.content)
    values = malicious_objects(mark) if kind == "call" else VALUES
    return torch_bytes(data.draw(replacements(trained.state, values)).apply(trained.state))


@given(data=st.data())
def test_changed_checkpoint_is_rejected_or_loaded(trained, data):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "checkpoint.pt")
        mark = Path(name, "mark")
        path.write_bytes(draw_changed_checkpoint(data, trained, mark))
        try:
            load_checkpoint(str(path), load_on_all_ranks=False)  # as a training does
            model, _ = load_model(str(path), str(trained.data))
        except UserError:
            return
        finally:
            assert not mark.exists(), "code of the checkpoint ran"

        event("loaded")
        logits, _ = model(torch.full((1, 5), 4))
        assert logits.shape[-1] == len(model.encoder.dictionary)
        expected = trained.state["model"]
        assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


@settings(max_examples=settings().max_examples // 5)
@given(data=st.data())
def test_training_runs_no_code_of_changed_checkpoint(trained, data):
    """A forged state of the optimizer or of the data loader may end the training with any exception."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        folder = Path(name)
        mark = folder / "mark"
        (folder / "run").mkdir()
        (folder / "run" / "checkpoint_last.pt").write_bytes(draw_changed_checkpoint(data, trained, mark))
        options = (*MASKED_LM, *LLN, "--max-update", 2)
        with contextlib.suppress(Exception):
            train(monkeypatch, folder / "log", trained.data, folder / "run", *options)
            event("trained")
        assert not mark.exists(), "code of the checkpoint ran"
