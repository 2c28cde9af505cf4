"""Longer experiments as steps: commands that run once, are logged, and are skipped when they ended well before."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]


class StepFailed(Exception):
    """A step ended with an error that its own output explains."""


class Steps:
    """Runs steps, from any number of threads; keeps their wall times in OUT/times.json, their output in OUT/logs."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.times_file = out, out / "times.json"
        self.times: dict[str, float] = json.loads(self.times_file.read_text()) if self.times_file.exists() else {}
        self._lock, self._running, self._stopped = threading.Lock(), set(), False

    def run(self, name: str, command: list[str], total_updates: int | None = None,
            environment: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """Runs a command once: its wall time is written down when it ends well, and it is not run again.

        `total_updates` of a training: its progress is shown as a bar. Raises: StepFailed with the last line it printed.
        """
        if name in self.times:
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
            self.times[name] = time.monotonic() - start
            self.times_file.write_text(json.dumps(self.times, indent=2) + "\n")

    def stop(self) -> None:
        """Ends what is running and lets nothing start any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()

    def _start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | environment
        with self._lock:
            if self._stopped:
                raise StepFailed("stopped")
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                       env=environment)  # fmt: skip
            self._running.add(process)
        return process

    def _follow(self, command: list[str], log: Path, name: str, total_updates: int | None,
                environment: Mapping[str, str]) -> int:  # fmt: skip
        """Runs a command with its output in a log; shows the updates of a training as a progress bar. Its exit code."""
        process = self._start(command, environment)
        try:
            with (
                log.open("a", buffering=1) as file,
                tqdm(total=total_updates, desc=name, unit="update", dynamic_ncols=True, disable=None) as bar,
            ):
                for line in process.stdout:
                    file.write(line)
                    updates = re.search(r'"num_updates": "?(\d+)', line)
                    loss = re.search(r'"(?:train_|valid_)?loss": "?([\d.]+)', line)
                    if updates and loss and "train_inner" in line:
                        bar.set_postfix_str(f"loss {loss[1]} bits")
                        bar.update(int(updates[1]) - bar.n)
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            self._running.discard(process)


def training(stage: str, save_dir: Path, *overrides: str) -> list[str]:
    """The command of a training with configs/STAGE.yaml (pretrain or finetune), which resumes if it was interrupted."""
    configs = ["--config-dir", str(ROOT / "configs"), "--config-name", stage]
    settings = [f"checkpoint.save_dir={save_dir}", "common.log_format=json"]
    return [sys.executable, "-m", "lln_fairseq.train", *configs, *settings, *overrides]


def evaluation(checkpoint: Path, split: str, result: Path) -> list[str]:
    """The command that scores a fine-tuned checkpoint on a split of the data that it was fine-tuned on, as JSON."""
    command = [sys.executable, "-m", "lln_fairseq.evaluate", str(checkpoint)]
    return [*command, "--split", split, "--json", str(result)]


def prepare_demo_data(directory: str, archive: str | None) -> None:
    """Makes the demo data unless it is there. Raises: StepFailed; the command has said why."""
    command = [sys.executable, "-m", "data_prep.demo", "--out", directory]
    if subprocess.run([*command, *(["--archive", archive] if archive else [])]).returncode:
        raise StepFailed("data preparation failed, see above; run the same command again to go on")
