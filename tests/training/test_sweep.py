"""Jobs of a Hydra sweep share a process, and are the runs that they would be in processes of their own."""

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
from tests.fairseq_runs import hydra_train, make_corpus

OPTIONS = ("corpus=demo", "model=tiny", "run=cpu", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64",
           "optimization.max_update=4", "common.log_interval=1", "dataset.validate_interval_updates=2",
           "dataset.batch_size=8", "dataset.max_tokens=null", "task.global_batch=null", "task.data=corpus",
           "lr_scheduler.warmup_updates=1", "dataset.num_workers=0")  # fmt: skip
CURVES = {"attention/alpha/layer_00", "train/loss", "train_inner/loss", "valid/loss"}


def run(directory, *options):
    command = [sys.executable, "-m", "lln_fairseq", "train", "--config-dir", CONFIGS, "--config-name", "pretrain"]
    done = subprocess.run([*map(str, command), *options, *OPTIONS], cwd=directory, env=os.environ, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout


def files_of(folder):
    return sorted(path.parent.relative_to(folder) / path.name.split(".")[0] for path in folder.rglob("*.*"))


@pytest.mark.exhaustive
def test_a_job_after_a_better_one_equals_a_process_of_its_own(tmp_path, monkeypatch):
    make_corpus(tmp_path / "corpus")
    worse = ("optimization.lr=[0.00001]", "common.seed=2")
    monkeypatch.chdir(tmp_path)
    _tensorboard_writers.clear()  # fairseq keeps one for the life of a process
    hydra_train(monkeypatch, "--multirun", "optimization.lr=[0.01],[0.00001]", "common.seed=2",
                "hydra.sweep.dir=jobs", *OPTIONS)  # fmt: skip
    run(tmp_path, *worse, "checkpoint.save_dir=alone", "hydra.run.dir=job")
    alone, runs = tmp_path / "alone", tmp_path / "runs" / "pretrain_lln_diag"
    better, sweep = (runs / f"optimization.lr=[{rate}]" for rate in ("0.01", "1e-05"))
    assert files_of(sweep) == files_of(alone) == files_of(better)
    ours, wanted = (torch.load(folder / "checkpoint_best.pt") for folder in (sweep, alone))
    assert all(torch.equal(ours["model"][name], value) for name, value in wanted["model"].items())
    assert ours["extra_state"]["best"] == wanted["extra_state"]["best"]
    ours, wanted = (read_curves(folder / "tensorboard") for folder in (sweep, alone))
    assert ours.keys() == wanted.keys() >= CURVES
    for name in CURVES:
        assert (ours[name].steps, ours[name].values) == (wanted[name].steps, wanted[name].values), name


JOBS = {
    ("attention=lln,elu", "common.seed=1,2"): [f"runs/pretrain_{name}/common.seed={seed}" for name in ("lln", "elu")
                                               for seed in (1, 2)],
    ("model=tiny,small",): [f"runs/pretrain_lln_diag/model={name}" for name in ("tiny", "small")],
    ("common.seed=1,2", "checkpoint.save_dir='own/${common.seed}'"): ["own/1", "own/2"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", JOBS)
def test_each_job_has_a_directory_of_its_own(overrides, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", lambda cfg: seen.append(cfg))
    monkeypatch.chdir(tmp_path)
    hydra_train(monkeypatch, "--multirun", "run=cpu", "task.data=x", *overrides)
    assert [cfg.checkpoint.save_dir for cfg in seen] == JOBS[overrides]
    assert all(cfg.common.tensorboard_logdir == f"{cfg.checkpoint.save_dir}/tensorboard" for cfg in seen)


def test_a_job_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    errors, seen = {1: TrainingError("NaN"), 2: RuntimeError("a bug")}, []

    def main(cfg):
        seen.append(cfg.common.seed)
        if error := errors.get(cfg.common.seed):
            raise error

    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", main)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        hydra_train(monkeypatch, "--multirun", "run=cpu", "task.data=x", "common.seed=1,2,3",
                    "checkpoint.save_dir='${common.seed}'")  # fmt: skip
    assert (ended.value.code, seen) == (1, [1, 2, 3])
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: 1: NaN"
    assert said[1].startswith("Traceback")  # of a bug
    assert said[-2:] == ["error: 2: a bug", "error: 2 of 3 jobs failed: 1, 2"]


def test_ctrl_c_ends_the_whole_sweep(tmp_path, monkeypatch):
    seen = []

    def main(cfg):
        seen.append(cfg.common.seed)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", main)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        hydra_train(monkeypatch, "--multirun", "run=cpu", "task.data=x", "common.seed=1,2")
    assert (ended.value.code, seen) == (143, [1])
