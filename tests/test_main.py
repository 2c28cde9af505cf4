"""The command `lln-fairseq`: its programs, and how it ends."""

import os
import signal

import pytest

from lln_fairseq.__main__ import PROGRAMS, main
from lln_fairseq.linearize import linearize


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_shows_help(name, capsys):
    with pytest.raises(SystemExit) as error:
        main([name, "--help"])
    assert not error.value.code
    help_text = capsys.readouterr().out
    assert f"lln-fairseq {name} " in help_text


@pytest.mark.parametrize("arguments", [[], ["nope"]])
def test_wrong_usage_shows_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: lln-fairseq" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_program_in_one_line(number, code, monkeypatch, capsys):
    monkeypatch.setattr(linearize, "linearize", lambda args: os.kill(os.getpid(), number))
    assert main(["linearize", "teacher.pt", "data", "out"]) == code
    assert capsys.readouterr().err == "interrupted; the same command continues from the last saved step\n"
