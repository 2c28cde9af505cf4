"""The command `lln-fairseq`: its programs, and how it ends."""

import pytest

from lln_fairseq.__main__ import PROGRAMS, main


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
