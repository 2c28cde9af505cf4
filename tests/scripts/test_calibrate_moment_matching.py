import json

import pytest

from lln_fairseq.ops.moment_matching import TABLES_FILES
from scripts import calibrate_moment_matching as calibrate


def test_a_small_simulation_agrees_with_the_shipped_tables():
    before = {path: path.read_bytes() for path in TABLES_FILES.values()}
    assert calibrate.main(["--fast"]) == 0
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("constants", TABLES_FILES)
def test_a_table_that_is_off_fails_the_check(constants, tmp_path, monkeypatch, capsys):
    shipped = json.loads(TABLES_FILES[constants].read_text())
    shipped["32"][1][7] += 0.1
    (tmp_path / "tables.json").write_text(json.dumps(shipped))
    monkeypatch.setattr(calibrate, "TABLES_FILES", {constants: tmp_path / "tables.json"})
    assert calibrate.main(["--fast"]) == 1
    assert f"{constants}, D = 32: at most" in capsys.readouterr().out


@pytest.mark.parametrize("constants", TABLES_FILES)
def test_the_file_is_written_as_it_is_shipped(constants, tmp_path):
    shipped = json.loads(TABLES_FILES[constants].read_text())
    assert [int(dim) for dim in shipped] == list(calibrate.HEAD_DIMS)
    calibrate.write(shipped, tmp_path / "tables.json")
    assert (tmp_path / "tables.json").read_bytes() == TABLES_FILES[constants].read_bytes()
    assert calibrate.deviation(shipped["32"], [column[:-1] for column in shipped["32"]]) == float("inf")
