"""Settings that must be in place before anything else is imported, and what every test leaves as it found it."""

import logging
import os
import signal
from pathlib import Path

import pytest
import torch

from lln_fairseq.training.malloc import disable_malloc_trim
from tests.shortcuts import hurry

if not torch.cuda.is_available():
    # Must be set before triton is first imported: the kernels then run, slowly, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what it runs in the background, and every program that a test starts would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

disable_malloc_trim()  # half the time of quadratic oracles goes into fresh pages otherwise


def pytest_sessionstart() -> None:
    hurry()


@pytest.fixture(autouse=True)
def _handlers_of_the_root_logger():
    """fairseq-validate and Hydra put handlers there that write to the stdout of their test, closed in the next one."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data-bin of a few sentences; who changes it copies it."""
    from tests.fairseq_runs import make_corpus  # not above: tests of the operations start without fairseq

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two separable classes of pairs of sentences; who changes it copies it."""
    from tests.fairseq_runs import make_classification

    return make_classification(tmp_path_factory.mktemp("task"))


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 on a CPU: the first overflow moves a number to the GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
