"""The command `lln-fairseq`: its programs, and how it ends."""

import os
import signal

import pytest

from lln_fairseq.__main__ import PROGRAMS, main
from lln_fairseq.linearize import linearize


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_shows_its_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert not ended.value.code
    assert f"python -m lln_fairseq {name} " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nope"]])
def test_wrong_usage_lists_the_programs(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    main_usage = capsys.readouterr().err
    assert "usage: lln-fairseq" in main_usage


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_program_in_one_line(number, code, monkeypatch, capsys):
    monkeypatch.setattr(linearize, "linearize", lambda args: os.kill(os.getpid(), number))
    assert main(["linearize", "teacher.pt", "data", "out"]) == code
    assert capsys.readouterr().err == "interrupted; the same command continues from the last saved step\n"
