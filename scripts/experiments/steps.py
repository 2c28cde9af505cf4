"""Longer experiments as steps: commands that run once, are logged, and are skipped when they ended well before."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from tqdm import tqdm

from lln_fairseq.command import UserError, child_environment
from lln_fairseq.data.files import write_bytes
from scripts.experiments.progress import Progress
from scripts.experiments.settings import check_settings, setting


class StepFailed(UserError):
    """A step ended with an error that its own output explains."""


class Steps:
    """Runs steps, from any number of threads; keeps their wall times and commands in OUT/times.json, their output in
    OUT/logs."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.times_file = out, out / "times.json"
        self.times, self._commands = read_times(self.times_file)
        self._lock, self._running, self._stopped = threading.Lock(), set(), False

    def run(self, name: str, command: list[str], total_updates: int | None = None,
            environment: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """Runs a command once: its wall time is written down when it ends well, and it is not run again.

        `total_updates`: those of a training. Raises: StepFailed with the last line it printed, UserError where the step
        ended well before, with another command.
        """
        words = [word.replace(f"{self.out}/", "OUT/") for word in command[1:]]  # whatever the Python and the directory
        if name in self.times:
            check_settings(f"{self.out} holds {name}", self._commands.get(name, words), words, "--out")
            tqdm.write(f"{name}: done before")
            return
        log = self.out / "logs" / f"{name.replace(' ', '_')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        code = self._follow(command, log, name, total_updates, environment or {})
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

    def _start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
        environment = child_environment() | {"PYTHONUNBUFFERED": "1"} | environment
        with self._lock:
            if self._stopped:
                raise StepFailed("stopped")
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                       env=environment)  # fmt: skip
            self._running.add(process)
        return process

    def _follow(self, command: list[str], log: Path, name: str, total_updates: int | None,
                environment: Mapping[str, str]) -> int:  # fmt: skip
        """Runs a command with its output in a log; shows the progress. Its exit code."""
        process = self._start(command, environment)
        try:
            with log.open("a", buffering=1) as file, Progress(name, total_updates) as progress:
                for line in process.stdout:
                    file.write(line)
                    updates = re.search(r'"num_updates": "?(\d+)', line)
                    loss = re.search(r'"(?:train_|valid_)?loss": "?([\d.]+)', line)
                    if updates and loss and "train_inner" in line:
                        progress.update(int(updates[1]), loss[1])
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


def end(process: subprocess.Popen, grace: float | None = None) -> None:
    """Ends a child that is still running as Ctrl-C would, and waits for that; after `grace` seconds it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_times(file: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Wall times in seconds and commands by step, none where the file is missing or damaged. Without a command: what is
    no step, and what an earlier version did, whose files hold the seconds alone."""
    if not file.exists():
        return {}, {}
    try:
        entries = {name: entry if isinstance(entry, dict) else {"seconds": entry}
                   for name, entry in json.loads(file.read_text()).items()}  # fmt: skip
        times = {name: float(entry["seconds"]) for name, entry in entries.items()}
        return times, {name: entry["command"] for name, entry in entries.items() if entry.get("command")}
    except (ValueError, TypeError, AttributeError, KeyError):
        tqdm.write(f"{file} is damaged: its steps are done again, and a training that is complete ends at once")
        return {}, {}


def training(stage: str, save_dir: Path, *overrides: str) -> list[str]:
    """The command of a training with configs/STAGE.yaml (pretrain or finetune), which resumes if it was interrupted."""
    settings = [setting("checkpoint.save_dir", save_dir), "common.log_format=json"]
    return [sys.executable, "-m", "lln_fairseq", "train", "--config-name", stage, *settings, *overrides]


def evaluation(folder: Path, splits: Iterable[str]) -> list[str]:
    """The command that scores the best checkpoint of a fine-tuning on splits of its data: FOLDER/SPLIT.json."""
    command = [sys.executable, "-m", "lln_fairseq", "evaluate", str(folder / "checkpoint_best.pt")]
    return [*command, f"--split={','.join(splits)}", "--json", str(folder / "{split}.json")]


def prepare_demo_data(directory: str, archive: str | None) -> None:
    """Makes the demo data unless it is there. Raises: UserError; the command has said why."""
    command = [sys.executable, "-m", "data_prep.demo", "--out", directory]
    call([*command, *(["--archive", archive] if archive else [])])
