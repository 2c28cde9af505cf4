"""Test the program that regenerates and checks the tables of moment matching."""

import json

import pytest

from lln_fairseq.ops.moment_matching import TABLE_FILE
from scripts import calibrate_moment_matching as calibrate


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A copy of a shipped table, and a simulation that returns exactly this table."""
    path = tmp_path / "tables.json"
    path.write_bytes(TABLE_FILE.read_bytes())
    tables = json.loads(path.read_text())
    monkeypatch.setattr(calibrate, "TABLE_FILE", path)
    monkeypatch.setattr(calibrate, "simulate_table", lambda dim, *_, **__: tables[str(dim)])
    return path


def test_check_rejects_a_wrong_table_and_writes_nothing(shipped, capsys):
    tables = json.loads(shipped.read_text())
    tables["32"][1][7] += 0.1
    wrong = json.dumps(tables)
    shipped.write_text(wrong)

    assert calibrate.main(["--check"]) == 1

    assert "D = 32: at most 1.0e-01" in capsys.readouterr().out
    assert shipped.read_text() == wrong


def test_program_writes_the_simulated_table(shipped):
    content = shipped.read_bytes()
    tables = json.loads(content)
    tables["32"][1][7] += 0.1
    shipped.write_text(json.dumps(tables))

    assert calibrate.main([]) == 0

    assert shipped.read_bytes() == content
    assert calibrate.main(["--check"]) == 0
