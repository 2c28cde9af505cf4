"""Test the program that regenerates and checks the tables of moment matching."""

import json

import pytest

from lln_fairseq.ops.moment_matching import TABLE_FILES
from scripts import calibrate_moment_matching as calibrate


def test_fast_check_agrees_with_shipped_tables_and_writes_nothing():
    contents = {path: path.read_bytes() for path in TABLE_FILES.values()}

    assert calibrate.main(["--fast"]) == 0

    for path, content in contents.items():
        assert path.read_bytes() == content


@pytest.mark.parametrize("constants", TABLE_FILES)
def test_fast_check_fails_for_wrong_table(constants, tmp_path, monkeypatch, capsys):
    tables = json.loads(TABLE_FILES[constants].read_text())
    tables["32"][1][7] += 0.1
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    monkeypatch.setattr(calibrate, "TABLE_FILES", {constants: tmp_path / "tables.json"})

    assert calibrate.main(["--fast"]) == 1

    assert f"{constants}, D = 32: at most" in capsys.readouterr().out


@pytest.mark.parametrize("constants", TABLE_FILES)
def test_written_file_has_format_of_shipped_one(constants, tmp_path):
    tables = json.loads(TABLE_FILES[constants].read_text())

    calibrate.write_tables(tables, tmp_path / "tables.json")

    assert [int(dim) for dim in tables] == list(calibrate.HEAD_DIMS)
    assert (tmp_path / "tables.json").read_bytes() == TABLE_FILES[constants].read_bytes()


def test_deviation_of_tables_with_different_lengths_is_infinite():
    table = [[0.0, 1.0], [2.0, 3.0]]
    shorter_table = [[0.0], [2.0]]

    assert calibrate.max_deviation(table, shorter_table) == float("inf")
