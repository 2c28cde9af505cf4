"""What a user may get wrong ends in one line that says what to do, and leaves the checkpoints alone."""

import errno
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq.trainer import Trainer
from hydra.core.global_hydra import GlobalHydra

from lln_fairseq.errors import InputError, exit_with_one_line
from lln_fairseq.training.settings import TORCHRUN, check_devices
from tests.fairseq_runs import LLN, MASKED_LM, make_corpus, train


def test_another_optimizer_in_the_same_directory(corpus, tmp_path, monkeypatch):
    common = (*MASKED_LM, *LLN, "--max-update")
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *common, 2)
    before = (tmp_path / "a" / "checkpoint_last.pt").read_bytes()
    with pytest.raises(InputError, match=r"does not fit this run: Optimizer does not match.* or another --save-dir"):
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *common, 4, "--bf16")
    assert (tmp_path / "a" / "checkpoint_last.pt").read_bytes() == before


@pytest.mark.parametrize(("content", "message"), [(None, "no such checkpoint"), (b"", "cannot load .*EOFError"),
                                                  (b"export T=1\n", "cannot load ")])  # fmt: skip
def test_a_directory_and_files_that_are_no_checkpoints(content, message, corpus, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--finetune-from-model", path)


def test_damaged_data(tmp_path, monkeypatch):
    data = make_corpus(tmp_path / "data")
    (data / "valid.idx").write_text("")
    with pytest.raises(InputError, match=r"cannot load split 'valid' .*doesn't match expected format"):
        train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *MASKED_LM, *LLN)


def test_a_directory_that_cannot_be_written(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="dummy: Not a directory"):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "file", *MASKED_LM, *LLN)


def torchrun(workers, here):
    return dict.fromkeys(TORCHRUN, "0") | {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(here)}


WORKERS = [  # world size, environment, GPUs -> message, or None where it can work
    ((1, {}, 0), None),
    ((2, {}, 2), None),
    ((3, {}, 2), "3 workers here, but this machine has 2 GPUs: set --distributed-world-size .* to at most 2"),
    ((2, {}, 0), "2 workers here, but this machine has 0 GPUs: .* at most 1"),
    ((16, {"SLURM_JOB_ID": "7"}, 8), None),
    ((16, torchrun(16, 8), 8), None),
    ((16, torchrun(16, 8), 4), "8 workers here, .* 4 GPUs: set torchrun's --nproc-per-node to at most 4"),
    ((2, torchrun(2, 2), 0), "2 workers here, .* 0 GPUs: start one without torchrun"),
    ((1, torchrun(2, 2), 2), "torchrun started 2 workers, and each would train alone: set .* to 2"),
]


@pytest.mark.parametrize(("given", "message"), WORKERS)
def test_more_workers_than_devices(given, message, monkeypatch):
    size, environment, devices = given
    for name in (*TORCHRUN, "LOCAL_WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    distributed = SimpleNamespace(distributed_world_size=size, distributed_init_method=None)
    if message is None:
        check_devices(SimpleNamespace(distributed_training=distributed))
    else:
        with pytest.raises(InputError, match=message):
            check_devices(SimpleNamespace(distributed_training=distributed))


def test_a_directory_that_is_removed_meanwhile_is_named(corpus, tmp_path, monkeypatch):
    save = torch.save

    def removed(*args, **kwargs):
        shutil.rmtree(tmp_path / "a")
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", removed)
    with pytest.raises(InputError, match=r"cannot save .*: .*/a, or what was .* in it, was removed by another program"):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--max-update", 2)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_in_one_line_and_the_run_goes_on(number, code, corpus, tmp_path, monkeypatch, capfd):
    step, interrupt = Trainer.train_step, [4]

    def train_step(self, *args, **kwargs):
        if self.get_num_updates() in interrupt:
            os.kill(os.getpid(), number)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    options = (*MASKED_LM, *LLN, "--save-interval-updates", 2, "--max-update", 6)
    with pytest.raises(SystemExit) as ended:
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options)
    assert ended.value.code == code
    assert capfd.readouterr().err.endswith("interrupted; the same command goes on from the last checkpoint\n")
    interrupt.clear()
    log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *options)
    assert next(row["num_updates"] for row in log["train"]) == "5"


def test_a_full_disk_stops_the_logs_first():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # TensorBoard's, which names no file
    with pytest.raises(InputError, match="cannot write the logs: No space left"), exit_with_one_line():
        raise full
    with pytest.raises(ConnectionError), exit_with_one_line():
        raise ConnectionError("not the user's")


def test_hydra_prints_an_input_error_alone(monkeypatch, capsys):
    monkeypatch.setattr(GlobalHydra.instance(), "is_initialized", lambda: True)
    with pytest.raises(SystemExit) as ended, exit_with_one_line():
        raise InputError("this and that")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: this and that\n"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(InputError), exit_with_one_line():
        raise InputError("this and that")


NUMBERS = [
    (("--max-tokens", 0), r"dataset\.max_tokens is 0, and must be at least 1"),
    (("--dropout", 2), r"model\.dropout is 2\.0, and must be in \[0, 1\]"),
    (("--update-freq", 0), r"optimization\.update_freq is 0, and must be at least 1"),
]


@pytest.mark.parametrize(("options", "message"), NUMBERS, ids=[row[0][0] for row in NUMBERS])
def test_numbers_that_cannot_be_meant(options, message, corpus, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=message):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *options)
    assert not (tmp_path / "a" / "checkpoint_last.pt").exists()


def test_two_kinds_of_half_precision(corpus, tmp_path, monkeypatch, capsys):
    arguments = (monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN)
    with pytest.raises(InputError, match="fp16 and amp exclude each other: set one of them alone"):
        train(*arguments, "--amp", "--fp16")
    with pytest.raises(ValueError, match="fp16") as refused:  # by fairseq-train itself
        train(*arguments, "--bf16", "--fp16")
    sys.excepthook(ValueError, refused.value, None)
    assert capsys.readouterr().err == "error: --fp16 and --bf16 exclude each other: give one of them alone\n"
