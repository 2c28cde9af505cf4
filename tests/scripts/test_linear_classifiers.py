"""Test the table of linear classifiers; the programs that it starts are replaced by fake results."""

import json
from pathlib import Path

from scripts.research import linear_classifiers

ACCURACIES = {"teacher 1": 0.8, "teacher 2": 0.7, "blocks of 32, teacher 1": 0.75, "blocks of 32, teacher 2": 0.71}


def test_table_has_mean_range_and_difference_to_the_teachers(tmp_path, monkeypatch, capsys):
    commands = {}

    def run(name, command, log):
        commands[name] = command
        if name.startswith("evaluate "):
            result = Path(command[command.index("--json") + 1])
            result.parent.mkdir(exist_ok=True)
            result.write_text(json.dumps({"accuracy": ACCURACIES[name.removeprefix("evaluate ")]}))

    monkeypatch.setattr(linear_classifiers, "call_logged", run)
    arguments = ["data", str(tmp_path), "--teachers", "one.pt", "two.pt", "--variants", "blocks of 32"]

    assert linear_classifiers.main([*arguments, "--linearize", "--steps", "300"]) == 0

    table = capsys.readouterr().out.rpartition("\n\n")[2]
    assert table.splitlines()[1].split("  ")[0] == "softmax (the teachers)"
    assert "75.0 (70.0–80.0)        +0.0" in table
    assert "73.0 (71.0–75.0)        -2.0" in table
    linearize = commands["linearize blocks of 32, teacher 2"]
    assert linearize[2:4] == ["two.pt", "data"]
    assert linearize[-4:] == ["--seed", "2", "--steps", "300"]
    assert commands["evaluate blocks of 32, teacher 2"][-3] == "--split=test"
