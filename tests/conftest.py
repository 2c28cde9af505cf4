"""Settings that must be in place before other imports, and fixtures that all tests share."""

import gc
import logging
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from lln_fairseq.ops import moment_matching
from lln_fairseq.training.malloc import disable_malloc_trim
from tests.shortcuts import install_shortcuts

if not torch.cuda.is_available():
    # Without a GPU, Triton's kernels run slowly on the CPU. Triton reads the variable when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts background jobs this way, and the programs that the tests start would inherit it and ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

disable_malloc_trim()  # otherwise the quadratic oracles spend half of their time on fresh memory pages


def pytest_sessionstart() -> None:
    install_shortcuts()


def pytest_collection_finish() -> None:
    gc.freeze()  # modules live until the end: looking at them again and again takes a twentieth of the time


@pytest.fixture(autouse=True)
def _restore_root_handlers():
    """Restore the root logger's handlers: those of fairseq-validate and Hydra write to the stdout of one test only."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a binarized corpus. Copy it before you change it."""
    from tests.fairseq_runs import make_corpus  # fairseq is slow to import, and the tests of ops do not need it

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a binarized classification with two classes. Copy it before you change it."""
    from tests.fairseq_runs import make_classification

    return make_classification(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def quick_table():
    """Let the simulation of a calibrated table that is not shipped use fewer tokens than by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moment_matching, "simulate_table", partial(moment_matching.simulate_table, tokens=256, heads=2))
        moment_matching.calibration_table.cache_clear()
        yield
    moment_matching.calibration_table.cache_clear()


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fairseq train in fp16 on a CPU: the first overflow would move a tensor to the GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
