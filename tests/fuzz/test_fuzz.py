"""About a second of every attack; `python -m tests.fuzz --long` is the whole."""

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.run import SUBJECTS, attack


@pytest.mark.parametrize("subject", SUBJECTS)
def test_random_cases(subject):
    tally = attack(subject, seed=0, cases=1000, seconds=1.5)
    assert tally.total() > 0


def test_the_program_runs_the_subjects_that_are_named_or_all(capsys):
    assert main(["rows", "--cases", "2"]) == 0
    assert capsys.readouterr().out.startswith("rows: 2 cases in ")
    assert main(["--cases", "1"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == SUBJECTS
    with pytest.raises(SystemExit, match="2"):
        main(["nothing"])
