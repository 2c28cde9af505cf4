"""Test the table and the figure of quality against time; the models are replaced by functions that do nothing."""

import json

import pytest

from lln_fairseq.errors import InputError
from scripts.experiments import quality_and_time


def write_result(path, accuracy):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"accuracy": accuracy}))


def test_table_and_figure_have_every_variant(tmp_path, monkeypatch, capsys):
    write_result(tmp_path / "runs" / "teacher1.json", 0.8)
    write_result(tmp_path / "runs" / "teacher2.json", 0.7)
    write_result(tmp_path / "runs" / "blocks_of_64_1_softmax_layer_teacher_1" / "test.json", 0.6)
    timed = []

    def classification(checkpoint, tokens):
        timed.append((str(checkpoint.relative_to(tmp_path)), tokens))
        return lambda: None

    monkeypatch.setattr(quality_and_time, "classification", classification)
    arguments = [str(tmp_path / "figure"), "--teacher", str(tmp_path / "teacher.pt")]

    assert quality_and_time.main([*arguments, "--results", f"256={tmp_path / 'runs'}"]) == 0

    table = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in table[1:3]] == ["75.0", "60.0"]
    assert table[2].startswith("blocks of 64, 1 softmax layer")
    assert timed == [("teacher.pt", 256), ("runs/blocks_of_64_1_softmax_layer_teacher_1/model.pt", 256)]
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert (tmp_path / "figure.csv").read_text().count("\n") == 3


def test_directory_without_results_is_rejected(tmp_path):
    with pytest.raises(InputError, match="has no results"):
        quality_and_time.find_results(tmp_path)
