"""The scripts that train: from a killed pre-training to the table, as a user types it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lln_fairseq.analysis.events import read_curves
from tests.fairseq_runs import make_classification, make_corpus

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = ("corpus=demo", "model=tiny", "run=cpu", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64",
         "dataset.validate_interval_updates=0", "common.log_interval=2")  # fmt: skip


def script(directory, name, *arguments):
    return subprocess.Popen(["bash", SCRIPTS / name, *map(str, arguments)], cwd=directory, text=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def finished(process, code=0):
    output = process.communicate(timeout=120)[0]
    assert process.returncode == code, output
    return output


@pytest.mark.exhaustive
def test_pre_train_kill_resume_fine_tune_score(tmp_path):
    make_corpus(tmp_path / "data" / "lm", sizes=(("train", 400), ("valid", 11)))
    make_classification(tmp_path / "data" / "task")
    pretrain = ("pretrain_wikitext103.sh", *SMALL, "task.data=data/lm", "optimization.max_update=24",
                "checkpoint.save_interval_updates=4", "task.max_positions=64")[:-1]  # fmt: skip
    last = tmp_path / "runs" / "pretrain_lln_diag" / "checkpoint_last.pt"
    first = script(tmp_path, *pretrain)
    while not last.exists():
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    output = finished(script(tmp_path, *pretrain))
    assert "Loaded checkpoint runs/pretrain_lln_diag/checkpoint_last.pt" in output
    curves = read_curves(tmp_path / "runs" / "pretrain_lln_diag" / "tensorboard")
    assert curves["train_inner/loss"].steps == curves["attention/tau_lln/layer_01"].steps == list(range(2, 25, 2))

    best = "runs/pretrain_lln_diag/checkpoint_best.pt"
    tune = ("glue_all.sh", best, "--seeds", "7", "--tasks", "sst2", *SMALL[1:5], "task.data=data/task",
            "optimization.max_update=4", "task.max_positions=128")  # fmt: skip
    output = finished(script(tmp_path, *tune))
    assert "valid: 11 rows, accuracy" in output
    assert output.splitlines()[-1].startswith("pretrain_lln_diag")
    out = tmp_path / "runs" / "pretrain_lln_diag" / "glue" / "sst2" / "seed7"
    assert json.loads((out / "valid.json").read_text())["rows"] == 11
    assert "sst2, seed 7: done before" in finished(script(tmp_path, *tune))


@pytest.mark.exhaustive
def test_a_task_of_the_long_range_arena(tmp_path):
    """From drawing the data to the table."""
    command = [sys.executable, "-m", "data_prep.lra", "listops", "--rows", "50", "--workers", "1"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}, check=True)
    small = ("run=cpu", "task.max_positions=128", "task.global_batch=4", "optimization.max_update=2",
             "dataset.validate_interval_updates=2", "common.log_interval=1")  # fmt: skip
    output = finished(script(tmp_path, "lra_all.sh", "--tasks", "listops", "--attentions", "lln", *small))
    assert "test: 1 rows, accuracy" in output
    assert output.splitlines()[-1].split()[::7] == ["lln", "0/1/0/0/0"]
    again = finished(script(tmp_path, "lra.sh", "listops", "attention=lln", *small))
    assert again == "listops, seed 1: done before, see runs/lra/lln/listops/seed1\n"


def test_a_task_without_recipe_and_one_directory_for_all(tmp_path):
    assert finished(script(tmp_path, "lra.sh", "listop"), 1).startswith("error: no such task: listop (known: image ")
    output = finished(script(tmp_path, "lra_all.sh", "checkpoint.save_dir=one"), 1)
    assert output.startswith("error: attention and checkpoint.save_dir are not for lra_all.sh")


@pytest.mark.parametrize("name", ["pretrain_wikitext103", "finetune_sst2", "tensorboard"])
def test_help_says_how(name, tmp_path):
    output = finished(script(tmp_path, f"{name}.sh", "--help"))
    assert f"scripts/{name}.sh" in output
    assert "set -euo" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("finetune_sst2.sh",), "error: which checkpoint?"),
        (("finetune_sst2.sh", "no.pt", "run=cpu"), "error: no such checkpoint: no.pt\n"),
        (("glue_all.sh", "any.pt", "checkpoint.save_dir=one"), "error: checkpoint.save_dir is not for glue_all.sh"),
        (("glue_all.sh", "any.pt", "--tasks", "sst3"), "error: no such task: sst3 (known: cola demo "),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, tmp_path):
    (tmp_path / "any.pt").touch()
    assert finished(script(tmp_path, *arguments), 1).startswith(message)


def test_the_directory_of_the_overrides_is_the_one_that_counts(tmp_path):
    (tmp_path / "any.pt").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "valid.json").touch()
    output = finished(script(tmp_path, "finetune_sst2.sh", "any.pt", "run=cpu", "checkpoint.save_dir=mine"))
    assert output == "sst2, seed 1: done before, see mine\n"
