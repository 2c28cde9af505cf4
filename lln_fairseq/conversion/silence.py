"""Suppress what transformers and the ONNX exporter print while they work."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence() -> Iterator[None]:
    """Suppress all warnings and log messages up to WARNING of this process, and the progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    disabled = logging.root.manager.disable
    has_progress_bars = transformers_logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if has_progress_bars:
            transformers_logging.enable_progress_bar()
