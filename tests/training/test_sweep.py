"""The jobs of a Hydra sweep share a process, but each is the same run as in a process of its own."""

import os
import signal
import subprocess
import sys

import fairseq_cli.hydra_train
import pytest
import torch
from fairseq.logging.progress_bar import _tensorboard_writers

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.errors import TrainingError
from lln_fairseq.training.recipes import CONFIGS
from tests.fairseq_runs import hydra_train, make_corpus, split_options

OVERRIDES = split_options("""
    corpus=demo model=tiny run=cpu model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=64 optimization.max_update=4
    common.log_interval=1 dataset.validate_interval_updates=2 dataset.batch_size=8 dataset.max_tokens=null
    task.global_batch=null task.data=corpus lr_scheduler.warmup_updates=1 dataset.num_workers=0
""")
CURVES = {"attention/alpha/layer_00", "train/loss", "train_inner/loss", "valid/loss"}


def run_in_process(directory, *overrides):
    command = [sys.executable, "-m", "lln_fairseq", "train", "--config-dir", str(CONFIGS), "--config-name", "pretrain"]
    result = subprocess.run(
        [*command, *overrides, *OVERRIDES], cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert result.returncode == 0, result.stdout


def list_files(folder):
    """Return the relative paths of all files, without what follows the first dot, such as times in names of events."""
    return sorted(path.parent.relative_to(folder) / path.name.split(".")[0] for path in folder.rglob("*.*"))


@pytest.mark.exhaustive
def test_second_job_equals_a_run_in_its_own_process(tmp_path, monkeypatch):
    """The first job has the better scores, which must not count in the second."""
    make_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    _tensorboard_writers.clear()  # fairseq keeps them for the life of a process
    swept = ("optimization.lr=[0.01],[0.00001]", "common.seed=2", "hydra.sweep.dir=jobs")
    hydra_train(monkeypatch, "--multirun", *swept, *OVERRIDES)
    settings = ("optimization.lr=[0.00001]", "common.seed=2")
    run_in_process(tmp_path, *settings, "checkpoint.save_dir=single", "hydra.run.dir=job")

    single = tmp_path / "single"
    first_job = tmp_path / "runs" / "pretrain_lln_diag" / "optimization.lr=[0.01]"
    second_job = tmp_path / "runs" / "pretrain_lln_diag" / "optimization.lr=[1e-05]"
    assert list_files(first_job) == list_files(second_job) == list_files(single)

    checkpoint = torch.load(second_job / "checkpoint_best.pt")
    expected_checkpoint = torch.load(single / "checkpoint_best.pt")
    for name, expected in expected_checkpoint["model"].items():
        assert torch.equal(checkpoint["model"][name], expected), name
    assert checkpoint["extra_state"]["best"] == expected_checkpoint["extra_state"]["best"]

    curves = read_curves(second_job / "tensorboard")
    expected_curves = read_curves(single / "tensorboard")
    assert curves.keys() == expected_curves.keys() >= CURVES
    for tag in CURVES:
        assert curves[tag].steps == expected_curves[tag].steps, tag
        assert curves[tag].values == expected_curves[tag].values, tag


@pytest.mark.parametrize(
    ("overrides", "save_dirs"),
    [
        (
            ("attention=lln,elu", "common.seed=1,2"),
            [
                "runs/pretrain_lln/common.seed=1",
                "runs/pretrain_lln/common.seed=2",
                "runs/pretrain_elu/common.seed=1",
                "runs/pretrain_elu/common.seed=2",
            ],
        ),
        (("model=tiny,small",), ["runs/pretrain_lln_diag/model=tiny", "runs/pretrain_lln_diag/model=small"]),
        (("common.seed=1,2", "checkpoint.save_dir='own/${common.seed}'"), ["own/1", "own/2"]),
    ],
)
def test_each_job_has_its_own_directory(overrides, save_dirs, tmp_path, monkeypatch):
    configurations = []

    def main(cfg):
        configurations.append(cfg)

    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", main)
    monkeypatch.chdir(tmp_path)

    hydra_train(monkeypatch, "--multirun", "run=cpu", "task.data=x", *overrides)

    assert [cfg.checkpoint.save_dir for cfg in configurations] == save_dirs
    for cfg in configurations:
        assert cfg.common.tensorboard_logdir == f"{cfg.checkpoint.save_dir}/tensorboard"


def test_sweep_continues_after_failed_jobs(tmp_path, monkeypatch, capsys):
    errors = {1: TrainingError("NaN"), 2: RuntimeError("a bug")}
    seeds = []

    def main(cfg):
        seeds.append(cfg.common.seed)
        if cfg.common.seed in errors:
            raise errors[cfg.common.seed]

    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", main)
    monkeypatch.chdir(tmp_path)
    swept = ("common.seed=1,2,3", "checkpoint.save_dir='${common.seed}'")
    with pytest.raises(SystemExit) as exit_info:
        hydra_train(monkeypatch, "--multirun", "run=cpu", "task.data=x", *swept)

    assert exit_info.value.code == 1
    assert seeds == [1, 2, 3]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: 1: NaN"
    assert lines[1].startswith("Traceback")  # of the bug
    assert lines[-2:] == ["error: 2: a bug", "error: 2 of 3 jobs failed: 1, 2"]


def test_interrupt_ends_the_whole_sweep(tmp_path, monkeypatch):
    seeds = []

    def main(cfg):
        seeds.append(cfg.common.seed)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", main)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        hydra_train(monkeypatch, "--multirun", "run=cpu", "task.data=x", "common.seed=1,2")
    assert exit_info.value.code == 143
    assert seeds == [1]
