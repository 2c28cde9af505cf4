"""Two hypothesis profiles: "short" runs a few examples, the same ones each time; "long" runs thousands at random.

python -m pytest tests/fuzz --hypothesis-profile=long --hypothesis-show-statistics
"""

import logging

import pytest
from hypothesis import settings

COMMON_SETTINGS = {"deadline": None, "database": None, "print_blob": True}
settings.register_profile("short", max_examples=25, derandomize=True, **COMMON_SETTINGS)
settings.register_profile("long", max_examples=2000, **COMMON_SETTINGS)
if settings.get_current_profile_name() in ("default", "ci"):  # hypothesis selects "ci" on servers that set CI
    settings.load_profile("short")


@pytest.fixture(autouse=True)
def _disable_logging():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
