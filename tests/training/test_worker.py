"""A worker finds its rank and locks its directory before fairseq's main, and a spawned worker ends with its parent."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from lln_fairseq import command
from lln_fairseq.checkpoints.saving import LOCK
from lln_fairseq.errors import UserError
from lln_fairseq.training import start
from lln_fairseq.training.worker import find_workers, lock_save_dir
from tests.fairseq_runs import train
from tests.training.conftest import RUN_OPTIONS

# Lock the file in the first argument and fork, like a training with a loader process.
HOLD_LOCK = """
import fcntl, os, sys, time
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(f"process {os.getpid()} on this\\n"); file.flush()
if os.fork(): print("locked", flush=True)
time.sleep(60)
"""
# End with exit code 0 if the file in the first argument can be locked, else with 1.
TRY_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
# Run a worker that succeeds or fails, as the first argument says, in a process group of its own.
RUN_IN_GROUP = """
import sys
import torch.distributed as dist
from lln_fairseq.training.start import run_worker

destroy = dist.destroy_process_group
def destroy_and_report():
    destroy()
    print("destroyed")
dist.destroy_process_group = destroy_and_report

def main(cfg):
    if sys.argv[1] == "fail":
        raise ValueError("failed")

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
run_worker(main, None)
print("alive", dist.is_initialized())
"""


def configuration(save_dir, rank=0, no_save=False, model="lln_roberta_tiny"):
    """Return the configuration of a training; `model` is None for a program that does not train."""
    return OmegaConf.create(
        {
            "model": model and {"_name": model},
            "checkpoint": {"save_dir": str(save_dir), "no_save": no_save},
            "distributed_training": {"distributed_init_method": "env://", "distributed_rank": rank},
        }
    )


def slurm_node(folder, monkeypatch, node, **variables):
    """Set Slurm's variables of a node of two with eight GPUs, and put a stub of scontrol into the PATH."""
    scontrol = folder / "scontrol"
    scontrol.write_text("#!/bin/sh\necho first\necho second\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    values = {"SLURM_NODEID": node, "SLURM_NNODES": 2, "SLURM_NTASKS": 2, "SLURM_STEP_NODELIST": "[first,second]"}
    for name, value in (values | variables).items():
        monkeypatch.setenv(name, str(value))


def distributed(**options):
    """Return a configuration with these options of distributed training, and fairseq's defaults for the others."""
    defaults = {
        "device_id": 0,
        "distributed_init_method": None,
        "distributed_no_spawn": False,
        "distributed_num_procs": 1,
        "distributed_port": -1,
        "distributed_rank": 0,
        "pipeline_model_parallel": False,
        "tpu": False,
    }
    return OmegaConf.create({"distributed_training": defaults | options})


SLURM = {"distributed_port": 29500, "distributed_world_size": 2}  # as in configs/run/slurm.yaml
TORCHRUN = {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "WORLD_SIZE": "16", "RANK": "8"}


@pytest.mark.parametrize("node", [0, 1])
def test_slurm_starts_a_worker_for_each_gpu_of_every_node(node, tmp_path, monkeypatch):
    slurm_node(tmp_path, monkeypatch, node)
    cfg = distributed(**SLURM)

    find_workers(cfg)

    found = cfg.distributed_training
    assert found.distributed_init_method == "tcp://first:29500"
    assert found.distributed_world_size == 16
    assert found.distributed_rank == 8 * node  # of the first worker on this node
    assert found.distributed_num_procs == 8


def test_torchrun_replaces_the_number_of_workers_of_a_recipe(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    cfg = distributed(distributed_world_size=8)  # run=gpu8

    find_workers(cfg)

    found = cfg.distributed_training
    assert (found.distributed_world_size, found.distributed_rank, found.device_id) == (16, 8, 0)
    assert found.distributed_no_spawn


def test_bf16_of_fairseq_train_starts_all_workers(corpus, tmp_path, monkeypatch):
    """The flag means a TPU for fairseq, which then starts one worker."""
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda nprocs, **kwargs: started.append(nprocs))
    (tmp_path / "log").write_text("")

    options = ("--bf16", "--distributed-world-size", 4)
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *RUN_OPTIONS, *options)

    assert started == [4]


def test_slurm_job_with_a_task_for_each_gpu_is_rejected(tmp_path, monkeypatch):
    slurm_node(tmp_path, monkeypatch, 0, SLURM_NTASKS=16)
    with pytest.raises(UserError, match=r"cannot start 2 workers: 8, 2, 2. .* one task per node"):
        find_workers(distributed(**SLURM))


def test_slurm_job_without_a_number_of_tasks_is_rejected(tmp_path, monkeypatch):
    slurm_node(tmp_path, monkeypatch, 0)
    monkeypatch.delenv("SLURM_NTASKS")
    with pytest.raises(UserError, match=r"cannot start 8 workers: SLURM_NTASKS is not set\. .*--ntasks-per-node=1"):
        find_workers(distributed(distributed_world_size=8))


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_launcher_on_a_machine_without_gpu_is_rejected(launcher, tmp_path, monkeypatch):
    if launcher == "slurm":
        slurm_node(tmp_path, monkeypatch, 0)
    else:
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"cannot start a worker for each GPU: torch finds no GPU here"):
        find_workers(distributed(**SLURM))


def test_slurm_recipe_outside_of_slurm_is_rejected():
    with pytest.raises(UserError, match=r"nothing has started 2 workers: use srun"):
        find_workers(distributed(**SLURM))


def test_more_workers_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"cannot start 8 workers: world size is 8 but have 1 available devices"):
        find_workers(distributed(distributed_world_size=8))


@pytest.fixture
def lock_holder(tmp_path):
    """A process that has locked tmp_path."""
    command = [sys.executable, "-c", HOLD_LOCK, tmp_path / LOCK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_second_training_is_rejected_until_first_is_killed(lock_holder, corpus, tmp_path, monkeypatch):
    message = rf"{tmp_path} .* running \(process {lock_holder.pid} on this\).* --save-dir"
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path, *RUN_OPTIONS)

    lock_holder.kill()
    lock_holder.wait()
    train(monkeypatch, tmp_path / "log", corpus, tmp_path, *RUN_OPTIONS)
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("setting", [{"rank": 1}, {"rank": 8}, {"no_save": True}, {"model": None}])
def test_processes_that_do_not_save_need_no_lock(setting, lock_holder, tmp_path):
    with lock_save_dir(configuration(tmp_path, **setting)):
        pass


def test_first_worker_needs_the_lock(lock_holder, tmp_path):
    with pytest.raises(UserError), lock_save_dir(configuration(tmp_path)):
        pass


def test_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with lock_save_dir(configuration(tmp_path)):
        pass
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path} cannot be locked (No locks available)")


def test_lock_is_released_after_training(tmp_path):
    command = [sys.executable, "-c", TRY_LOCK, tmp_path / LOCK]
    with lock_save_dir(configuration(tmp_path)):
        assert subprocess.run(command, capture_output=True).returncode == 1
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_spawned_worker_ends_with_its_parent(monkeypatch):
    parents = []
    monkeypatch.setattr(command, "exit_with_parent", parents.append)

    assert start.run_worker(lambda cfg: cfg, "done") == "done"
    assert parents == []  # this process was not spawned

    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    assert start.run_worker(lambda cfg: cfg, "done") == "done"
    assert parents == [7]


@pytest.mark.parametrize(("outcome", "output", "code"), [("succeed", "alive True\ndestroyed\n", 0), ("fail", "", 1)])
def test_process_group_is_destroyed_when_a_successful_process_ends(outcome, output, code, tmp_path):
    command = [sys.executable, "-c", RUN_IN_GROUP, outcome, str(tmp_path / "store")]

    result = subprocess.run(command, capture_output=True, text=True)

    assert result.stdout == output, result.stderr
    assert result.returncode == code
