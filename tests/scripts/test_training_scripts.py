"""Test the shell scripts that train, as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lln_fairseq.analysis.events import read_curves
from scripts import train_tasks
from tests.fairseq_runs import make_classification, make_corpus

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY_MODEL = ("model=tiny", "run=cpu", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64")
VALIDATE_AT_END = "dataset.validate_interval_updates=0"


def start_script(directory, name, *arguments):
    """Start a script in a directory and in its own process group."""
    return subprocess.Popen(
        ["bash", SCRIPTS / name, *map(str, arguments)],
        cwd=directory,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish_script(process, code=0):
    """Wait for a script, check its exit code, and return its output."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    return output


def run_script(directory, name, *arguments, code=0):
    return finish_script(start_script(directory, name, *arguments), code)


@pytest.mark.exhaustive
def test_killed_pretraining_resumes_and_can_be_finetuned(tmp_path):
    make_corpus(tmp_path / "data" / "lm", sizes=(("train", 400), ("valid", 11)))
    make_classification(tmp_path / "data" / "task")
    pretrain = ("pretrain_wikitext103.sh", "corpus=demo", *TINY_MODEL, VALIDATE_AT_END, "common.log_interval=2")
    pretrain += ("task.data=data/lm", "optimization.max_update=24", "checkpoint.save_interval_updates=4")
    run_folder = tmp_path / "runs" / "pretrain_lln_diag"

    killed = start_script(tmp_path, *pretrain)
    while not (run_folder / "checkpoint_last.pt").exists():
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    output = run_script(tmp_path, *pretrain)
    assert "Loaded checkpoint runs/pretrain_lln_diag/checkpoint_last.pt" in output
    curves = read_curves(run_folder / "tensorboard")
    assert curves["train_inner/loss"].steps == curves["attention/tau_lln/layer_01"].steps == list(range(2, 25, 2))

    finetune = ("glue_all.sh", "runs/pretrain_lln_diag/checkpoint_best.pt", "--seeds", "7", "--tasks", "sst2")
    finetune += (*TINY_MODEL, "task.data=data/task", "optimization.max_update=4", "task.max_positions=128")
    output = run_script(tmp_path, *finetune)
    assert "valid: 11 rows, accuracy" in output
    assert output.splitlines()[-1].startswith("pretrain_lln_diag")
    scores = json.loads((run_folder / "glue" / "sst2" / "seed7" / "valid.json").read_text())
    assert scores["rows"] == 11
    written = (run_folder / "glue" / "sst2" / "seed7" / "valid.json").stat().st_mtime_ns
    assert run_script(tmp_path, *finetune).splitlines()[-1] == output.splitlines()[-1]
    assert (run_folder / "glue" / "sst2" / "seed7" / "valid.json").stat().st_mtime_ns == written

    other_settings = run_script(tmp_path, *finetune, "optimization.lr=[0.1]", code=1)
    assert "optimization.lr" in other_settings


@pytest.mark.exhaustive
def test_lra_task_from_data_to_table(tmp_path):
    command = [sys.executable, "-m", "data_prep.lra", "listops", "--rows", "50", "--workers", "1"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}, check=True)
    overrides = ("run=cpu", "task.max_positions=128", "task.global_batch=4", "optimization.max_update=2")
    overrides += ("dataset.validate_interval_updates=2", "common.log_interval=1")

    output = run_script(tmp_path, "lra_all.sh", "--tasks", "listops", "--attentions", "lln", *overrides)

    assert "test: 1 rows, accuracy" in output
    cells = output.splitlines()[-1].split()
    assert (cells[0], cells[7]) == ("lln", "0/1/0/0/0")
    scores = tmp_path / "runs" / "lra" / "lln" / "listops" / "seed1" / "test.json"
    written = scores.stat().st_mtime_ns
    run_script(tmp_path, "lra.sh", "listops", "attention=lln", *overrides)
    assert scores.stat().st_mtime_ns == written


def test_bad_argument_ends_a_script_in_one_line(tmp_path):
    (tmp_path / "any.pt").touch()

    output = run_script(tmp_path, "glue_all.sh", "any.pt", "--tasks", "sst3", code=1)

    assert output.startswith("error: no such task: sst3 (known: cola demo ")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("finetune_sst2",), "which checkpoint"),
        (("finetune_sst2", "no.pt", "run=cpu"), "no such checkpoint: no.pt\n"),
        (("glue_all", "any.pt", "checkpoint.save_dir=one"), "checkpoint.save_dir"),
        (("glue_all", "any.pt", "common.seed=7"), "use --seed or --seeds instead of common.seed"),
        (("finetune_sst2", "any.pt", "++common.seed=7"), "use --seed or --seeds instead of common.seed"),
        (("finetune_sst2", "any.pt", "glue=cola"), "use another script or --tasks instead of glue="),
        (("lra", "listops", "model.attention=elu"), "use attention= or --attentions instead of model.attention="),
        (("lra", "listop"), "no such task: listop (known: image "),
        (("lra_all", "checkpoint.save_dir=one"), "checkpoint.save_dir"),
        (("lra_all", "--attentions", "softmax lnl"), "no such attention: lnl (known: block_diag "),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "any.pt").touch()
    monkeypatch.chdir(tmp_path)

    assert train_tasks.main(list(arguments)) == 1

    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
