"""About a second of every attack; `python -m tests.fuzz --long` is the whole."""

import pytest

from tests.fuzz.run import SUBJECTS, attack


@pytest.mark.parametrize("subject", SUBJECTS)
def test_random_cases(subject):
    tally = attack(subject, seed=0, cases=1000, seconds=1.5)
    assert tally.total() > 0
