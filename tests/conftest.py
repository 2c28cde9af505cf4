"""Settings that must be in place before anything else is imported, and what every test leaves as it found it."""

import logging
import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    # Must be set before triton is first imported: the kernels then run, slowly, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what it runs in the background, and every program that a test starts would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _handlers_of_the_root_logger():
    """fairseq-validate and Hydra put handlers there that write to the stdout of their test, closed in the next one."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
