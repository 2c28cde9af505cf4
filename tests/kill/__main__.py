"""Kill programs with SIGKILL at random moments and check that they finish with the result of an undisturbed run.

python -m tests.kill --kills 100

A program is killed one to three times in a row, and the same command is then run to its end. Each run is a fork of a
process that has imported everything, so that the kills hit the program's work and not the start of Python.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork has only one thread

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
from lln_fairseq.linearize import progress
from tests.fairseq_runs import LLN, MASKED_LM, TRAINING, make_corpus, train


class Training:
    """fairseq-train with a checkpoint after every update, so that it often is killed while it writes one."""

    def __init__(self, shared):
        self.corpus = make_corpus(shared / "corpus")

    def work(self, folder):
        """Train in `folder`, or resume the training."""
        options = ("--max-update", 8, "--max-epoch", 99, "--save-interval-updates", 1, "--keep-interval-updates", 2)
        sys.argv = ["fairseq-train", *map(str, (self.corpus, *TRAINING, *MASKED_LM, *LLN, *options))]
        sys.argv += ["--save-dir", str(folder), "--encoder-embed-dim", "128"]
        fairseq_cli.train.cli_main()

    def load_result(self, folder):
        """Return what must be equal to the bit."""
        state = torch.load(folder / "checkpoint_last.pt")
        return [state["model"], state["last_optimizer_state"]["state"], state["extra_state"]["val_loss"]]


class Linearization:
    """lln-fairseq linearize with both of its stages, which saves its progress every few steps."""

    def __init__(self, shared):
        self.corpus = make_corpus(shared / "long", sizes=(("train", 60), ("valid", 40)))
        options = (*MASKED_LM, *LLN, "--attention", "softmax", "--max-positions", 64, "--max-update", 1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            train(monkeypatch, shared / "log", self.corpus, shared / "teacher", *options)
        self.teacher = shared / "teacher" / "checkpoint_last.pt"

    def work(self, folder):
        """Linearize the teacher in `folder`, or resume it."""
        progress.LOG_INTERVAL = 5
        progress.SAVE_INTERVAL = 5
        options = ("--steps", 40, "--distill", 20, "--tokens", 64, "--length", 32)
        code = run_program(["linearize", *map(str, (self.teacher, self.corpus, folder, *options))])
        assert code == 0, f"exit code {code}"

    def load_result(self, folder):
        """Return what must be equal to the bit."""
        return torch.load(folder / "model.pt")["model"]


SUBJECTS = {"training": Training, "linearizing": Linearization}


def start_run(subject, folder):
    """Fork a process that runs the subject in `folder`, and return its id.

    The process leads a process group. Its output is appended to FOLDER.log.
    """
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


def run_to_end(subject, folder):
    """Run the subject to its end, and return its result and the names of its checkpoints."""
    status = os.waitpid(start_run(subject, folder), 0)[1]
    assert status == 0, f"{folder.name} fails: {Path(f'{folder}.log').read_text()[-3000:]}"
    return subject.load_result(folder), sorted(path.name for path in folder.glob("*.pt*"))


def run_and_kill(subject, folder, seconds):
    """Run the subject and kill it after some time; return True if it was still running."""
    pid = start_run(subject, folder)
    time.sleep(seconds)
    os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


def new_folder(shared, name):
    folder = shared / name
    folder.mkdir()
    return folder


def kill_subject(name, shared, kills_requested, rng):
    """Kill runs of a subject at least `kills_requested` times, and compare every result with an undisturbed run."""
    subject = SUBJECTS[name](shared)
    begin = time.monotonic()
    expected, expected_files = run_to_end(subject, new_folder(shared, name))
    seconds = time.monotonic() - begin

    kills = 0
    cases = 0
    while kills < kills_requested:
        cases += 1
        folder = new_folder(shared, f"{name}-{cases}")
        for _ in range(rng.randint(1, 3)):
            kills += run_and_kill(subject, folder, rng.uniform(0, seconds))
        result, files = run_to_end(subject, folder)
        assert files == expected_files, f"{folder.name}: files {files}, expected {expected_files}"
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    print(f"{name}: {kills} kills in {cases} cases, no difference ({seconds:.1f} s undisturbed)", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="minimum number of kills per subject (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), help=f"default: {' '.join(SUBJECTS)}")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as shared:
        for name in args.subjects:
            kill_subject(name, Path(shared), args.kills, rng)


if __name__ == "__main__":
    main()
