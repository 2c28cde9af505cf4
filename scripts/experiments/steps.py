"""Run long experiments as steps. A step is a command that is logged, timed, and skipped once it has succeeded."""

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
from lln_fairseq.linearize.progress_bar import progress_bar
from scripts.experiments.progress import show_update
from scripts.experiments.settings import check_settings, format_override, is_complete, save_settings


class StepFailed(UserError):
    """A step failed, or could not start because the experiment was stopped."""


class Steps:
    """Runs the steps of an experiment. Several threads can run steps at once.

    Wall times and commands are stored in OUT/times.json, and the output of each step in OUT/logs.

    Args:
        out: the directory of the experiment, which is created.
    """

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
        """Run a command as a step, and store its wall time. If the step has already succeeded, only print a message.

        Args:
            name: name of the step, unique in the directory.
            command: program and arguments.
            total_updates: number of updates for the progress bar; None if the step does not train a model.
            environment: environment variables that are added to those of this process.
            timeout: seconds after which the command gets SIGTERM, so that the step fails.

        Raises:
            StepFailed: if the command fails, or if `stop` has been called.
            UserError: if the step has already succeeded with another command.
        """
        # The stored command depends neither on the Python that runs it nor on the name of the output directory.
        words = [word.replace(f"{self.out}/", "OUT/") for word in command[1:]]
        if name in self.times:
            check_settings(f"{self.out} holds {name}", self._commands.get(name, words), words, "--out")
            tqdm.write(f"{name}: done before")
            return
        log = self.out / "logs" / f"{name.replace(' ', '_')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        tqdm.write(f"{name}: output in {log}", file=sys.stderr)
        start = time.monotonic()
        process = self._start(command, environment or {})
        limit = threading.Timer(timeout, process.terminate)
        limit.start()
        try:
            code = self._follow(process, log, name, total_updates)
        finally:
            limit.cancel()
        if code:
            printed = [line for line in log.read_text().splitlines() if line.strip()]
            raise StepFailed(f"{name} failed (exit code {code}): {' '.join(printed[-1:])}\nsee the output in {log}")
        self._store(name, time.monotonic() - start, words)

    def stop(self) -> None:
        """Terminate the running commands. Every later call of `run` that would start a command raises StepFailed."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()

    def _start(self, command: list[str], added_variables: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command with its output in a pipe. Raise StepFailed if `stop` has been called."""
        environment = {**child_environment(), "PYTHONUNBUFFERED": "1", **added_variables}
        with self._lock:
            if self._stopped:
                raise StepFailed("stopped")
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
            self._running.add(process)
        return process

    def _follow(self, process: subprocess.Popen[str], log: Path, name: str, total_updates: int | None) -> int:
        """Append the output of a process to a log, show its progress, and return its exit code.

        If this thread is interrupted, the process is terminated.

        Args:
            process: a process that `_start` has started.
            log: the log file.
            name: label of the progress bar.
            total_updates: number of updates for the progress bar; None if the step does not train a model.
        """
        assert process.stdout is not None  # _start gave it a pipe
        try:
            progress = progress_bar(name, total_updates, "update", leave=True)
            with log.open("a", buffering=1) as file, progress as bar:
                for line in process.stdout:
                    file.write(line)
                    updates = re.search(r'"num_updates": "?(\d+)', line)
                    loss = re.search(r'"(?:train_|valid_)?loss": "?([\d.]+)', line)
                    if updates and loss and "train_inner" in line:
                        show_update(bar, int(updates[1]), loss[1])
            return process.wait()
        finally:
            terminate(process)
            self._running.discard(process)

    def _store(self, name: str, seconds: float, words: list[str]) -> None:
        """Add a step that has succeeded to OUT/times.json. `words` is its command as it is stored."""
        with self._lock:
            self.times[name] = seconds
            self._commands[name] = words
            entries = {}
            for step, step_seconds in self.times.items():
                entries[step] = {"seconds": step_seconds, "command": self._commands.get(step)}
            write_bytes(self.times_file, (json.dumps(entries, indent=2) + "\n").encode())


def call(command: list[str]) -> None:
    """Run a program with its output on this terminal. If this thread is interrupted, the program is terminated.

    Raises:
        UserError: if the program fails. It has then printed the reason itself.
    """
    process = subprocess.Popen(command, env=child_environment())
    try:
        code = process.wait()
    finally:
        terminate(process)
    if code:
        raise UserError(f"a step ended with exit code {code}, see above; run the same command again to continue")


def terminate(process: subprocess.Popen) -> None:
    """Send SIGTERM to a child process and wait until it has ended. Do nothing if it has ended already."""
    if process.poll() is None:
        process.terminate()
        process.wait()


def read_times(file: Path) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Read OUT/times.json.

    Returns:
        A tuple of the wall times in seconds and the commands, both keyed by the name of the step. Both are empty if the
        file does not exist. A step that was not a command, such as the installation, has only a time.
    """
    if not file.exists():
        return {}, {}
    entries = json.loads(file.read_text())
    times = {name: entry["seconds"] for name, entry in entries.items()}
    commands = {name: entry["command"] for name, entry in entries.items() if entry["command"]}
    return times, commands


def training_command(stage: str, save_dir: Path, *overrides: str) -> list[str]:
    """Return the command that trains a model with the recipe configs/STAGE.yaml and resumes an interrupted run.

    Args:
        stage: name of the recipe, such as "pretrain".
        save_dir: directory of the run.
        *overrides: further Hydra overrides.
    """
    return [
        sys.executable,
        "-m",
        "lln_fairseq",
        "train",
        "--config-name",
        stage,
        format_override("checkpoint.save_dir", save_dir),
        "common.log_format=json",
        *overrides,
    ]


def evaluation_command(directory: Path, splits: Iterable[str]) -> list[str]:
    """Return the command that scores DIRECTORY/checkpoint_best.pt and writes DIRECTORY/SPLIT.json for each split."""
    return [
        sys.executable,
        "-m",
        "lln_fairseq",
        "evaluate",
        str(directory / "checkpoint_best.pt"),
        f"--split={','.join(splits)}",
        "--json",
        str(directory / "{split}.json"),
    ]


def finetune_and_score(
    steps: Steps, name: str, directory: Path, overrides: Sequence[str], updates: int
) -> dict[str, dict[str, float]]:
    """Fine-tune a model and evaluate its best checkpoint, as two steps.

    Args:
        steps: runs both steps.
        name: name of the model, unique among the steps.
        directory: directory of the checkpoints and scores.
        overrides: Hydra overrides of the fine-tuning.
        updates: number of updates, for the progress bar.

    Returns:
        The scores that `lln-fairseq evaluate` wrote, for "valid" and "test", in this order.
    """
    splits = ("valid", "test")
    steps.run(f"fine-tune {name}", training_command("finetune", directory, *overrides), updates)
    steps.run(f"evaluate {name}", evaluation_command(directory, splits))
    return {split: json.loads((directory / f"{split}.json").read_text()) for split in splits}


def train_and_score(
    name: str,
    out: Path,
    command: list[str],
    settings: list[str],
    hashes: Mapping[str, str],
    splits: Sequence[str],
) -> None:
    """Train a model and score its best checkpoint. If the scores exist already, only print a message.

    Args:
        name: name of the run, for this message.
        out: directory of the checkpoints and of the scores, SPLIT.json.
        command: command that trains the model.
        settings: the settings on which the scores depend. They are stored next to the scores.
        hashes: the hashes of the data and of the initial model, see `input_hashes`. They are stored too.
        splits: splits of the data to score.

    Raises:
        UserError: if the directory contains scores of other settings or inputs, or if training or evaluation fails.
    """
    last_written = out / f"{splits[-1]}.json"
    if is_complete(last_written, settings, hashes):
        print(f"{name}: done before, see {out}", flush=True)
        return
    call(command)
    save_settings(out, settings, hashes)
    call(evaluation_command(out, splits))


def prepare_demo_data(directory: str, archive: str | None) -> None:
    """Build the demo data in a directory, unless the directory has it already.

    `archive` is the path of a local copy of the source archive; None downloads the archive if necessary.

    Raises:
        UserError: if data_prep.demo fails. It has then printed the reason itself.
    """
    command = [sys.executable, "-m", "data_prep.demo", "--out", directory]
    if archive:
        command += ["--archive", archive]
    call(command)
