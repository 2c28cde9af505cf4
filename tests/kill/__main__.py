"""Kills programs with SIGKILL at random moments: the same command finishes with the result of an undisturbed run.

python -m tests.kill --kills 100

A program is killed one to three times in a row, then left alone. Each run is a fork of one process that has imported
everything, so that the moments fall into the work and not into the start of Python.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a fork has one thread; before torch is imported

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import fairseq_cli.train
import pytest
import torch

from lln_fairseq.__main__ import main as run_program
from lln_fairseq.linearize import linearize
from tests.fairseq_runs import LLN, MASKED_LM, TRAINING, make_corpus, train


class Training:
    """fairseq-train with a checkpoint after every update: much of the time goes into writing them."""

    def __init__(self, shared):
        self.corpus = make_corpus(shared / "corpus")

    def work(self, folder):
        options = ("--max-update", 8, "--max-epoch", 99, "--save-interval-updates", 1, "--keep-interval-updates", 2)
        sys.argv = ["fairseq-train", *map(str, (self.corpus, *TRAINING, *MASKED_LM, *LLN, *options))]
        sys.argv += ["--save-dir", str(folder), "--encoder-embed-dim", "128"]
        fairseq_cli.train.cli_main()

    def result(self, folder):
        state = torch.load(folder / "checkpoint_last.pt")
        return [state["model"], state["last_optimizer_state"]["state"], state["extra_state"]["val_loss"]]


class Linearizing:
    """lln-fairseq linearize with both of its stages, saved every few steps."""

    def __init__(self, shared):
        self.corpus = make_corpus(shared / "long", sizes=(("train", 60), ("valid", 40)))
        options = (*MASKED_LM, *LLN, "--attention", "softmax", "--max-positions", 64, "--max-update", 1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            train(monkeypatch, shared / "log", self.corpus, shared / "teacher", *options)
        self.teacher = shared / "teacher" / "checkpoint_last.pt"

    def work(self, folder):
        linearize.LOG_INTERVAL = linearize.SAVE_INTERVAL = 5
        options = ("--steps", 40, "--distill", 20, "--tokens", 64, "--length", 32)
        code = run_program(["linearize", *map(str, (self.teacher, self.corpus, folder, *options))])
        assert code == 0, f"exit code {code}"

    def result(self, folder):
        return torch.load(folder / "model.pt")["model"]


SUBJECTS = {"training": Training, "linearizing": Linearizing}


def start(subject, folder):
    """The process id of a run, which leads a process group; its output is appended to FOLDER.log."""
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        subject.work(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def finish(subject, folder):
    """Run to the end and return the result and the names of the files."""
    status = os.waitpid(start(subject, folder), 0)[1]
    assert status == 0, f"{folder.name} fails: {Path(f'{folder}.log').read_text()[-3000:]}"
    return subject.result(folder), sorted(path.name for path in folder.glob("*.pt*"))


def kill(subject, folder, seconds):
    """Kill a run after some time; whether it was still running."""
    pid = start(subject, folder)
    time.sleep(seconds)
    os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


def new_folder(shared, name):
    folder = shared / name
    folder.mkdir()
    return folder


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="at least so many of each subject (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name)
        for name in args.subjects:
            subject = SUBJECTS[name](shared)
            begin = time.monotonic()
            expected, expected_files = finish(subject, new_folder(shared, name))
            seconds = time.monotonic() - begin
            kills = cases = 0
            while kills < args.kills:
                cases += 1
                folder = new_folder(shared, f"{name}-{cases}")
                for _ in range(rng.randint(1, 3)):
                    kills += kill(subject, folder, rng.uniform(0, seconds))
                found, files = finish(subject, folder)
                assert files == expected_files, f"{folder.name}: files {files}, undisturbed {expected_files}"
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
            print(f"{name}: {kills} kills in {cases} cases, no difference ({seconds:.1f} s undisturbed)", flush=True)


if __name__ == "__main__":
    main()
