"""Fixtures of the data programs' tests that the library's tests use too."""

from tests.data_prep.conftest import cache, gpt2  # noqa: F401
