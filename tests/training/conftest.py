"""A run that is under way."""

import pytest

from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train

COMMON = (*MASKED_LM, *LLN, "--max-update", 2)


@pytest.fixture(scope="package")
def begun(tmp_path_factory):
    """A corpus, and the directory of a run of two updates."""
    folder = tmp_path_factory.mktemp("begun")
    corpus = make_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", corpus, folder / "run", *COMMON)
    return corpus, folder / "run"
