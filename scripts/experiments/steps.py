"""Longer experiments as steps: commands that run once, are logged, and are skipped when they ended well before."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from lln_fairseq.command import UserError, child_environment
from lln_fairseq.data.files import write_bytes
from scripts.experiments.progress import progress_bar, report_update
from scripts.experiments.settings import check_settings, done_before, keep_settings, setting


class StepFailed(UserError):
    """A step ended with an error that its own output explains."""


class Steps:
    """Runs steps, from any number of threads; keeps their wall times and commands in OUT/times.json, their output in
    OUT/logs."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.times_file = out / "times.json"
        self.times, self._commands = read_times(self.times_file)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(
        self,
        name: str,
        command: list[str],
        total_updates: int | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = threading.TIMEOUT_MAX,
    ) -> None:
        """Run a command once: when it ends well its wall time is written down, and it is not run again.

        Args:
            name: of the step, unique in the directory.
            command: program and arguments.
            total_updates: number of updates, if the step is a training.
            environment: variables added to those of this process.
            timeout: after so many seconds the step is ended with SIGTERM and has failed.

        Raises:
            StepFailed: if the command failed, with the last line that it printed.
            UserError: if the step ended well before, with another command.
        """
        words = [word.replace(f"{self.out}/", "OUT/") for word in command[1:]]  # whatever the Python and the directory
        if name in self.times:
            check_settings(f"{self.out} holds {name}", self._commands.get(name, words), words, "--out")
            tqdm.write(f"{name}: done before")
            return
        log = self.out / "logs" / f"{name.replace(' ', '_')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        process = self._start(command, environment or {})
        limit = threading.Timer(timeout, process.terminate)
        limit.start()
        try:
            code = self._follow(process, log, name, total_updates)
        finally:
            limit.cancel()
        if code:
            tail = [line for line in log.read_text().splitlines() if line.strip()][-1:]
            raise StepFailed(f"{name} failed (exit code {code}): {' '.join(tail)}\nthe whole output is in {log}")
        with self._lock:
            self.times[name], self._commands[name] = time.monotonic() - start, words
            entries = {step: {"seconds": seconds, "command": self._commands.get(step)}
                       for step, seconds in self.times.items()}  # fmt: skip
            write_bytes(self.times_file, (json.dumps(entries, indent=2) + "\n").encode())

    def stop(self) -> None:
        """Ends what is running and lets nothing start any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()

    def _start(self, command: list[str], added_variables: Mapping[str, str]) -> subprocess.Popen[str]:
        environment = {**child_environment(), "PYTHONUNBUFFERED": "1", **added_variables}
        with self._lock:
            if self._stopped:
                raise StepFailed("stopped")
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                       env=environment)  # fmt: skip
            self._running.add(process)
        return process

    def _follow(self, process: subprocess.Popen[str], log: Path, name: str, total_updates: int | None) -> int:
        """Write the output of a process to a log, show its progress and return its exit code."""
        assert process.stdout is not None  # _start gave it a pipe
        try:
            with log.open("a", buffering=1) as file, progress_bar(name, total_updates) as bar:
                for line in process.stdout:
                    file.write(line)
                    updates = re.search(r'"num_updates": "?(\d+)', line)
                    loss = re.search(r'"(?:train_|valid_)?loss": "?([\d.]+)', line)
                    if updates and loss and "train_inner" in line:
                        report_update(bar, int(updates[1]), loss[1])
            return process.wait()
        finally:
            end(process)
            self._running.discard(process)


def call(command: list[str]) -> None:
    """Runs a program of ours, its output on this terminal. Raises: UserError; the program has said why."""
    process = subprocess.Popen(command, env=child_environment())
    try:
        code = process.wait()
    finally:
        end(process)
    if code:
        raise UserError(f"a step ended with exit code {code}, see above; the same command goes on from here")


def end(process: subprocess.Popen) -> None:
    """End a child that is still running as Ctrl-C would, and wait for that."""
    if process.poll() is None:
        process.terminate()
        process.wait()


def read_times(file: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return wall times in seconds and commands by step, none if the file is missing.

    An entry without a command is a time that somebody added, such as that of the installation.
    """
    entries = json.loads(file.read_text()) if file.exists() else {}
    times = {name: entry["seconds"] for name, entry in entries.items()}
    return times, {name: entry["command"] for name, entry in entries.items() if entry["command"]}


def training(stage: str, save_dir: Path, *overrides: str) -> list[str]:
    """The command of a training with configs/STAGE.yaml (pretrain or finetune), which resumes if it was interrupted."""
    settings = [setting("checkpoint.save_dir", save_dir), "common.log_format=json"]
    return [sys.executable, "-m", "lln_fairseq", "train", "--config-name", stage, *settings, *overrides]


def evaluation(folder: Path, splits: Iterable[str]) -> list[str]:
    """The command that scores the best checkpoint of a fine-tuning on splits of its data: FOLDER/SPLIT.json."""
    command = [sys.executable, "-m", "lln_fairseq", "evaluate", str(folder / "checkpoint_best.pt")]
    return [*command, f"--split={','.join(splits)}", "--json", str(folder / "{split}.json")]


def finetune_and_score(
    steps: Steps, name: str, folder: Path, overrides: Sequence[str], updates: int
) -> dict[str, dict[str, float]]:
    """Fine-tune with so many updates, each stage a step, and return the scores of valid and test."""
    splits = ("valid", "test")
    steps.run(f"fine-tune {name}", training("finetune", folder, *overrides), updates)
    steps.run(f"evaluate {name}", evaluation(folder, splits))
    return {split: json.loads((folder / f"{split}.json").read_text()) for split in splits}


def train_and_score(name: str, out: Path, command: list[str], settings: list[str], splits: Sequence[str]) -> None:
    """Run a training, then score its best checkpoint on the splits, unless that has been done before.

    Args:
        name: what is said to be done before.
        out: directory of the training and of the scores, SPLIT.json.
        command: starts the training.
        settings: what the scores depend on; they are kept beside them.
        splits: of the data.

    Raises:
        UserError: if it was done with other settings, or if the training or the evaluation fails.
    """
    last_written = out / f"{splits[-1]}.json"
    if done_before(last_written, settings):
        print(f"{name}: done before, see {out}", flush=True)
        return
    call(command)
    keep_settings(out, settings)
    call(evaluation(out, splits))


def prepare_demo_data(directory: str, archive: str | None) -> None:
    """Makes the demo data unless it is there. Raises: UserError; the command has said why."""
    command = [sys.executable, "-m", "data_prep.demo", "--out", directory]
    call([*command, *(["--archive", archive] if archive else [])])
