import json

from lln_fairseq.ops.moment_matching import TABLES_FILE
from scripts import calibrate_moment_matching as calibrate


def test_a_small_simulation_agrees_with_the_shipped_table(tmp_path, capsys):
    out = tmp_path / "tables.json"
    assert calibrate.main(["--fast", "--out", str(out)]) == 0
    assert not out.exists()
    lines = capsys.readouterr().out.splitlines()
    ours, paper = (float(cell.rstrip("%")) for cell in lines[-1].split()[1:])
    assert ours < 5
    assert paper > 100  # the straight line is far off at small s


def test_a_table_that_is_off_fails_the_check(tmp_path, monkeypatch, capsys):
    shipped = json.loads(TABLES_FILE.read_text())
    shipped["32"][1][7] += 0.1
    (tmp_path / "tables.json").write_text(json.dumps(shipped))
    monkeypatch.setattr(calibrate, "TABLES_FILE", tmp_path / "tables.json")
    assert calibrate.main(["--fast"]) == 1
    assert "D = 32: at most" in capsys.readouterr().out


def test_the_file_is_written_as_it_is_shipped(tmp_path):
    shipped = json.loads(TABLES_FILE.read_text())
    assert [int(dim) for dim in shipped] == list(calibrate.HEAD_DIMS)
    calibrate.write(shipped, tmp_path / "tables.json")
    assert (tmp_path / "tables.json").read_bytes() == TABLES_FILE.read_bytes()
    assert calibrate.deviation(shipped["32"], [column[:-1] for column in shipped["32"]]) == float("inf")
