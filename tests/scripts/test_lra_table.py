"""Tables 4 and 5 from the results of runs and from a measurement of the smallest size."""

import json
import re

import pytest

from scripts import lra_table
from scripts.benchmarks import lra as benchmark


def results(directory, run, task, accuracies):
    for seed, accuracy in enumerate(accuracies, start=1):
        folder = directory / run / task / f"seed{seed}"
        folder.mkdir(parents=True)
        (folder / "test.json").write_text(json.dumps({"accuracy": accuracy, "rows": 10}))


def lines_of(text):
    return {line.rsplit("   ", 1)[0].split("  ")[0]: line.split() for line in text.splitlines()}


def test_medians_beside_the_paper(tmp_path, capsys):
    for task in list(lra_table.TASKS)[:5]:
        results(tmp_path, "lln_diag", task, (0.5, 0.6, 0.4))
    results(tmp_path, "softmax", "listops", (0.3,))
    assert lra_table.main([str(tmp_path), "--latex", str(tmp_path / "table.tex")]) == 0
    table = lines_of(capsys.readouterr().out)
    assert table["lln_diag"][1:] == ["50.0"] * 6 + ["3/3/3/3/3"]
    assert table["softmax"][1:] == ["-", "30.0", "-", "-", "-", "-", "0/1/0/0/0"]
    assert table["LLN+Diag (paper)"][2:] == ["60.7", "38.9", "81.2", "69.8", "38.6", "57.9"]
    assert r"lln\_diag & 50.0" in (tmp_path / "table.tex").read_text()


@pytest.mark.exhaustive
def test_every_task_is_measured_and_shown(tmp_path, monkeypatch, capsys):
    """At lengths and batches of a smoke run; the published ones are those of the recipes."""
    small = {task: (96, 2, classes, towers) for task, (_, _, classes, towers) in benchmark.TASKS.items()}
    monkeypatch.setattr(benchmark, "TASKS", small)
    out = tmp_path / "t.json"
    options = ["--device", "cpu", "--threads", "1", "--repeats", "1", "--divide", "1", "--no-memory", "--json"]
    assert benchmark.main([*options, str(out), "--attentions", "softmax", "lln_diag", "reformer:hashes=2"]) == 0
    table = lines_of(capsys.readouterr().out)
    assert table["LLN+Diag (paper)"][2:] == ["0.14", "0.30", "0.14", "0.45", "0.31"]
    content = json.loads(out.read_text())
    assert [(row["task"], row["attention"]) for row in content["rows"]] == [
        (task, name) for task in benchmark.TASKS for name in ("softmax", "lln_diag", "reformer:hashes=2")
    ]
    assert all(row["time"][0] > 0 for row in content["rows"])
    assert lra_table.main([str(tmp_path), "--benchmark", str(out)]) == 0
    assert "the same as a multiple of softmax's" in capsys.readouterr().out


def test_the_recipes_have_the_lengths_and_batches_that_are_measured():
    from tests.test_configs import LRA_RECIPES

    for task, (length, batch, classes, towers) in benchmark.TASKS.items():
        assert (length, classes, batch) == LRA_RECIPES[task][:3]
        assert towers == 1 + (task == "retrieval")


@pytest.mark.parametrize("content", ["", '{"rows": [1], "settings": {}}'])
def test_a_file_that_is_no_measurement_is_named(content, tmp_path, capsys):
    file = tmp_path / "table4.json"
    file.write_text(content)
    assert lra_table.main([str(tmp_path), "--benchmark", str(file)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(f"error: (cannot read )?{re.escape(str(file))}.*\n", said.err)
