"""Fixtures with small Hugging Face models and pre-trained checkpoints."""

import shutil

import pytest

from tests.conversion.sources import TOKENIZERS, add_noise, make_model
from tests.fairseq_runs import LLN, MASKED_LM, train


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Return a dictionary from kind to (Hugging Face model, its directory)."""
    folder = tmp_path_factory.mktemp("sources")
    return {kind: (make_model(kind, folder / kind), folder / kind) for kind in TOKENIZERS}


@pytest.fixture
def copy_source(sources, tmp_path):
    """Return a function that copies the directory of a source, for a test to change the copy."""

    def copy(kind):
        _, source = sources[kind]
        return shutil.copytree(source, tmp_path / "copy")

    return copy


@pytest.fixture
def pretrain(corpus, tmp_path, monkeypatch):
    """Return a function that pre-trains with options of fairseq-train and returns the checkpoint."""

    def run(*options):
        save_dir = tmp_path / "run"
        train(monkeypatch, tmp_path / "log", corpus, save_dir, *MASKED_LM, *LLN, "--max-update", 1, *options)
        return add_noise(save_dir / "checkpoint_last.pt")

    return run
