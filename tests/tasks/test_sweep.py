"""Jobs of a Hydra sweep share a process, and are the runs that they would be in processes of their own."""

import os
import subprocess
import sys

import pytest
import torch

from lln_fairseq.analysis.events import read_curves
from tests.fairseq_runs import USER_DIR, make_corpus

OPTIONS = ("corpus=demo", "model=tiny", "run=cpu", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64",
           "optimization.max_update=4", "common.log_interval=1", "dataset.validate_interval_updates=2",
           "dataset.batch_size=8", "dataset.max_tokens=null", "task.global_batch=null", "task.data=corpus",
           "lr_scheduler.warmup_updates=1", "dataset.num_workers=0")  # fmt: skip
CURVES = {"attention/alpha/layer_00", "train/loss", "train_inner/loss", "valid/loss"}


def run(directory, *options):
    configs = USER_DIR[1].parent / "configs"
    command = [sys.executable, "-m", "lln_fairseq.train", "--config-dir", configs, "--config-name", "pretrain"]
    done = subprocess.run([*map(str, command), *options, *OPTIONS], cwd=directory, env=os.environ, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout


def files_of(folder):
    return sorted(path.parent.relative_to(folder) / path.name.split(".")[0] for path in folder.rglob("*.*"))


@pytest.mark.slow
def test_a_job_after_a_better_one_equals_a_process_of_its_own(tmp_path):
    make_corpus(tmp_path / "corpus")
    worse = ("optimization.lr=[0.00001]", "common.seed=2")
    run(tmp_path, "--multirun", "optimization.lr=[0.01],[0.00001]", "common.seed=2",
        "checkpoint.save_dir=sweep/${hydra:job.num}", "hydra.sweep.dir=jobs")  # fmt: skip
    run(tmp_path, *worse, "checkpoint.save_dir=alone", "hydra.run.dir=job")
    sweep, alone = tmp_path / "sweep" / "1", tmp_path / "alone"
    assert files_of(sweep) == files_of(alone) == files_of(tmp_path / "sweep" / "0")
    ours, wanted = (torch.load(folder / "checkpoint_best.pt") for folder in (sweep, alone))
    assert all(torch.equal(ours["model"][name], value) for name, value in wanted["model"].items())
    assert ours["extra_state"]["best"] == wanted["extra_state"]["best"]
    ours, wanted = (read_curves(folder / "tensorboard") for folder in (sweep, alone))
    assert ours.keys() == wanted.keys() >= CURVES
    for name in CURVES:
        assert (ours[name].steps, ours[name].values) == (wanted[name].steps, wanted[name].values), name
