"""Test the tables of the Long Range Arena with result files of fake runs and with a tiny measurement."""

import json
import re

import pytest

from scripts import lra_table
from scripts.benchmarks import lra as benchmark
from scripts.compare_attentions import compose_config


def write_results(directory, run, task, accuracies):
    """Write the result file of one seed per accuracy."""
    for seed, accuracy in enumerate(accuracies, start=1):
        folder = directory / run / task / f"seed{seed}"
        folder.mkdir(parents=True)
        (folder / "test.json").write_text(json.dumps({"accuracy": accuracy, "rows": 10}))


def cells_by_row(text):
    """Return the words of every line by its first cell."""
    return {line.split("  ")[0]: line.split() for line in text.splitlines()}


def test_table_has_medians_and_rows_of_paper(tmp_path, capsys):
    for task in list(lra_table.TASKS)[:5]:
        write_results(tmp_path, "lln_diag", task, (0.5, 0.6, 0.4))
    write_results(tmp_path, "softmax", "listops", (0.3,))

    assert lra_table.main([str(tmp_path), "--latex", str(tmp_path / "table.tex")]) == 0

    table = cells_by_row(capsys.readouterr().out)
    assert table["lln_diag"][1:] == ["50.0"] * 6 + ["3/3/3/3/3"]
    assert table["softmax"][1:] == ["-", "30.0", "-", "-", "-", "-", "0/1/0/0/0"]
    assert table["LLN+Diag (paper)"][2:] == ["60.7", "38.9", "81.2", "69.8", "38.6", "57.9"]
    assert r"lln\_diag & 50.0" in (tmp_path / "table.tex").read_text()


@pytest.mark.exhaustive
def test_every_task_is_measured_and_shown(tmp_path, monkeypatch, capsys):
    """The lengths and batches are tiny; the next test checks the real ones."""
    small = {task: (96, 2, classes, towers) for task, (_, _, classes, towers) in benchmark.TASKS.items()}
    monkeypatch.setattr(benchmark, "TASKS", small)
    attentions = ["softmax", "lln_diag", "reformer:hashes=2"]
    out = tmp_path / "t.json"
    options = ["--device", "cpu", "--threads", "1", "--repeats", "1", "--divide", "1", "--no-memory"]

    assert benchmark.main([*options, "--json", str(out), "--attentions", *attentions]) == 0

    table = cells_by_row(capsys.readouterr().out)
    assert table["LLN+Diag (paper)"][2:] == ["0.14", "0.30", "0.14", "0.45", "0.31"]
    rows = json.loads(out.read_text())["rows"]
    expected = []
    for task in benchmark.TASKS:
        expected += [(task, attention) for attention in attentions]
    assert [(row["task"], row["attention"]) for row in rows] == expected
    assert all(row["time"][0] > 0 for row in rows)
    assert lra_table.main([str(tmp_path), "--benchmark", str(out)]) == 0
    assert "as a multiple of softmax" in capsys.readouterr().out


def test_benchmark_measures_lengths_and_batches_of_recipes():
    for name, (length, batch, classes, towers) in benchmark.TASKS.items():
        task = compose_config("lra", [f"lra={name}"]).task
        assert (length, batch, classes) == (task.max_positions, task.global_batch, task.num_classes)
        assert towers == (2 if task.two_towers else 1)


@pytest.mark.parametrize("content", ["", '{"rows": [1], "settings": {}}'])
def test_invalid_benchmark_file_is_reported(content, tmp_path, capsys):
    file = tmp_path / "table4.json"
    file.write_text(content)

    assert lra_table.main([str(tmp_path), "--benchmark", str(file)]) == 1

    output = capsys.readouterr()
    assert output.out == ""
    assert re.fullmatch(f"error: (cannot read )?{re.escape(str(file))}.*\n", output.err)
