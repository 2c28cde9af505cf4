"""Settings that must be in place before anything else is imported, and what every test leaves as it found it."""

import logging
import os
import signal
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Must be set before triton is first imported: the kernels then run, slowly, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what it runs in the background, and every program that a test starts would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They train, start processes or interpret kernels: scripts/test.sh --fast leaves them out.
SLOW = (
    "analysis/test_probe", "fuzz", "hf", "host", "kill", "models", "ops/backends", "ops/test_compile",
    "ops/test_joint", "ops/test_moment_matching", "scripts", "tasks", "test_command", "test_evaluate", "test_import",
    "test_linearize", "test_memory", "test_predict", "test_release", "test_train",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _handlers_of_the_root_logger():
    """fairseq-validate and Hydra put handlers there that write to the stdout of their test, closed in the next one."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
