"""A short run for the tests that resume it."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train

# The options of the run. A test repeats --max-update to train longer: the last one counts.
RUN_OPTIONS = (*MASKED_LM, *LLN, "--max-update", 2)


class StartedRun(NamedTuple):
    corpus: Path
    save_dir: Path  # with checkpoints of two updates, in the middle of the first epoch

    @property
    def checkpoint(self):
        return self.save_dir / "checkpoint_last.pt"


@pytest.fixture(scope="package")
def started_run(tmp_path_factory):
    """A run of two updates, for tests that only read it."""
    folder = tmp_path_factory.mktemp("started")
    corpus = make_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", corpus, folder / "run", *RUN_OPTIONS)
    return StartedRun(corpus, folder / "run")


@pytest.fixture
def run_copy(started_run, tmp_path):
    """A copy of the run in tmp_path, for tests that resume or change it."""
    save_dir = shutil.copytree(started_run.save_dir, tmp_path / "run")
    return StartedRun(started_run.corpus, save_dir)
