"""Models of Hugging Face and checkpoints of ours."""

import pytest

from tests.conversion.sources import TOKENIZERS, make_model, shaken
from tests.fairseq_runs import LLN, MASKED_LM, train


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """kind -> (model of Hugging Face, its directory)."""
    folder = tmp_path_factory.mktemp("sources")
    return {kind: (make_model(kind, folder / kind), folder / kind) for kind in TOKENIZERS}


@pytest.fixture
def copy(sources, tmp_path):
    """A function that copies a source's directory, for a test to damage."""

    def copy_of(kind):
        folder = tmp_path / "copy"
        folder.mkdir()
        for file in sources[kind][1].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return copy_of


@pytest.fixture
def pretrained(corpus, tmp_path, monkeypatch):
    """A function: options of fairseq-train to a checkpoint."""

    def make(*options):
        save = tmp_path / "run"
        train(monkeypatch, tmp_path / "log", corpus, save, *MASKED_LM, *LLN, "--max-update", 1, *options)
        return shaken(save / "checkpoint_last.pt")

    return make
