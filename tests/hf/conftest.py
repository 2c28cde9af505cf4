"""transformers stays off the network and out of the user's cache."""

import atexit
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_home_")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

import pytest  # noqa: E402

from tests.fairseq_runs import LLN, MASKED_LM, train  # noqa: E402
from tests.hf.sources import TOKENIZERS, make_model, shaken  # noqa: E402


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
