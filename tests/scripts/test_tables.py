"""Test the tables of accuracies with result files of fake runs."""

import json
import re

import pytest

from scripts.tables import GLUE, LRA, main


def write_results(run, task, accuracies, name):
    """Write the result file of one seed per accuracy."""
    for seed, accuracy in enumerate(accuracies, start=1):
        folder = run / task / f"seed{seed}"
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps({"accuracy": accuracy, "rows": 10}))


def words_by_row(text):
    """Return the words of every line by its first cell."""
    return {line.split("  ")[0]: line.split() for line in text.splitlines()}


def test_glue_has_medians_and_rows_of_paper(tmp_path, capsys):
    for task in GLUE.tasks:
        write_results(tmp_path / "pretrain_lln_diag" / "glue", task, (0.8, 0.9, 0.7), "valid.json")
    write_results(tmp_path / "pretrain_elu" / "glue", "sst2", (0.5,), "valid.json")
    latex = tmp_path / "table.tex"

    assert main(["glue", str(tmp_path), "--latex", str(latex)]) == 0

    table = words_by_row(capsys.readouterr().out)
    assert table["pretrain_lln_diag"][1:] == ["80.0", "80.0", "80.0", "80.0", "80.0", "3/3/3/3"]
    assert table["pretrain_elu"][1:] == ["-", "-", "-", "50.0", "-", "0/0/0/1"]
    assert table["LLN+Diag (paper)"][2:] == ["80.0", "86.5", "89.7", "91.6", "86.9"]
    assert table["Reformer (paper)"][2:] == ["35.4", "-", "63.2", "50.9", "49.8"]
    assert re.search(r"pretrain\\_elu & - & - & - & 50\.0 & - \\\\", latex.read_text())


def test_lra_has_medians_and_rows_of_paper(tmp_path, capsys):
    for task in LRA.tasks:
        write_results(tmp_path / "lln_diag", task, (0.5, 0.6, 0.4), "test.json")
    write_results(tmp_path / "softmax", "listops", (0.3,), "test.json")

    assert main(["lra", str(tmp_path)]) == 0

    table = words_by_row(capsys.readouterr().out)
    assert table["lln_diag"][1:] == ["50.0"] * 6 + ["3/3/3/3/3"]
    assert table["softmax"][1:] == ["-", "30.0", "-", "-", "-", "-", "0/1/0/0/0"]
    assert table["LLN+Diag (paper)"][2:] == ["60.7", "38.9", "81.2", "69.8", "38.6", "57.9"]


def test_directory_without_results_is_reported(tmp_path, capsys):
    assert main(["glue", str(tmp_path)]) == 1

    assert "scripts/glue_all.sh" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", '{"accuracy": null}'])
def test_invalid_result_file_is_reported(content, tmp_path, capsys):
    file = tmp_path / "softmax" / "glue" / "sst2" / "seed1" / "valid.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)

    assert main(["glue", str(tmp_path)]) == 1

    assert capsys.readouterr().err.startswith(f"error: {file} is not a result file of lln-fairseq evaluate: ")
