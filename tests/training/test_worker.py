"""What a worker of a training does before and after fairseq's main: one training at a time in a directory."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lln_fairseq import command
from lln_fairseq.checkpoints.saving import LOCK
from lln_fairseq.errors import InputError
from lln_fairseq.training import worker
from lln_fairseq.training.worker import lock_save_dir
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train

HOLD = """
import fcntl, os, sys, time
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(f"process {os.getpid()} on this\\n"); file.flush()
if os.fork(): print("held", flush=True)  # as a training with a loader process
time.sleep(60)
"""


def settings(save_dir, rank=0, no_save=False, model="lln_roberta_tiny"):
    return OmegaConf.create({
        "model": model and {"_name": model},
        "checkpoint": {"save_dir": str(save_dir), "no_save": no_save},
        "distributed_training": {"distributed_init_method": "env://", "distributed_rank": rank},
    })  # fmt: skip


@pytest.fixture
def holder(tmp_path):
    """A process of another training, which has the directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / LOCK], stdout=subprocess.PIPE,
                               text=True, start_new_session=True)  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_second_training_is_refused_until_the_first_is_killed(holder, tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path / "corpus")
    message = rf"{tmp_path} belongs to a training that is running \(process {holder.pid} on this\): wait .* --save-dir"
    with pytest.raises(InputError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path, *MASKED_LM, *LLN)
    holder.kill()
    holder.wait()
    train(monkeypatch, tmp_path / "log", corpus, tmp_path, *MASKED_LM, *LLN)
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("option", [{"rank": 1}, {"rank": 8}, {"no_save": True}, {"model": None}])
def test_workers_of_one_run_and_who_writes_nothing_need_no_lock(option, holder, tmp_path):
    with lock_save_dir(settings(tmp_path, **option)):
        pass
    with pytest.raises(InputError), lock_save_dir(settings(tmp_path)):
        pass


def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, caplog):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with lock_save_dir(settings(tmp_path)):
        pass
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"{tmp_path} cannot be locked (No locks available): do not start a second training in it"


def test_the_lock_is_free_after_the_training(tmp_path):
    free = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", free, tmp_path / LOCK]
    with lock_save_dir(settings(tmp_path)):
        assert subprocess.run(command, capture_output=True).returncode == 1
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_spawned_workers_end_with_the_process_that_spawned_them(monkeypatch):
    ended_with = []
    monkeypatch.setattr(command, "end_with", ended_with.append)
    assert worker.run_worker(lambda cfg: cfg, "done") == "done"
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    assert worker.run_worker(lambda cfg: cfg, "done") == "done"
    assert ended_with == [7]
