"""Hypothesis profiles: a few examples, the same in every run, and thousands of random ones.

python -m pytest tests/fuzz --hypothesis-profile=long --hypothesis-show-statistics
"""

import logging

import pytest
from hypothesis import settings

SHARED = {"deadline": None, "database": None, "print_blob": True}
settings.register_profile("short", max_examples=25, derandomize=True, **SHARED)
settings.register_profile("long", max_examples=2000, **SHARED)
if settings.get_current_profile_name() == "default":
    settings.load_profile("short")


@pytest.fixture(autouse=True)
def _quiet_logs():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
