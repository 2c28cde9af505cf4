"""Run the project's programs one after another on one thread, and describe the machine that they run on."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.command import child_environment
from lln_fairseq.errors import UserError
from lln_fairseq.files import lock_file, write_bytes

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16")
TRAIN = ("lln_fairseq", "train")


class ProgramFailed(UserError):
    """A program ended with an error. `reason` is the last line that it printed, without "error: ".

    Args:
        step: the step of the unit.
        code: the exit code.
        log: the file with its messages, to which earlier attempts may have written.
        start: where in this file its own messages begin, in bytes.
    """

    def __init__(self, step: str, code: int, log: Path, start: int) -> None:
        own = log.read_bytes()[start:].decode(errors="replace")
        printed = [line for line in own.splitlines() if line.strip()]
        self.reason = "".join(printed[-1:]).removeprefix("error: ")
        super().__init__(f"{step} ended with exit code {code}: {self.reason} (see {log})")


class Programs:
    """Runs the programs of a unit (see units.py). A unit that was killed and is started again goes on where it was.

    Args:
        directory: the unit's directory in --work, which is created. It gets logs/.
        places: the name that replaces a path in `commands`, by path. The path may be None, which replaces nothing.
    """

    def __init__(self, directory: Path, places: Mapping[Any, str]) -> None:
        self.directory = directory
        self.places = places
        self.commands: dict[str, str] = {}  # the command lines by the names of the steps
        (directory / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, step: str, arguments: Sequence[object], output: Path | None) -> None:
        """Run `python -m ARGUMENTS`, unless its output exists. Its messages are appended to a file in logs/.

        A program that fails raises ProgramFailed.

        Args:
            step: the name of the step, unique in the unit.
            arguments: the module and its arguments.
            output: the file that the program writes last. With None, it always runs, and skips itself what is done.
        """
        words = [str(argument) for argument in arguments]
        self.commands[step] = " ".join(words)
        for path, name in self.places.items():
            if path is not None:
                self.commands[step] = self.commands[step].replace(str(path), name)
        if output is not None and output.exists():
            return
        log = self.directory / "logs" / f"{step.replace(' ', '_')}.log"
        print(f"{step}: {log}", flush=True)
        environment = {**child_environment(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as stream:
            start = stream.tell()
            command = [sys.executable, "-m", *words]
            process = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        if process.returncode:
            raise ProgramFailed(step, process.returncode, log, start)


@contextmanager
def locked(file: Path, wait: bool = True) -> Iterator[bool]:
    """Lock an empty file in the `with` block. Yield False if another process holds the lock and `wait` is False."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        is_ours = lock_file(stream.fileno())
        if not is_ours and wait:
            print(f"waiting for another unit: {file}", flush=True)
            is_ours = lock_file(stream.fileno(), wait=True)
        yield is_ours


def processor() -> dict[str, Any]:
    """Return the processor's name and instructions for fast products, torch's number of threads, and the GPU if any."""
    text = Path("/proc/cpuinfo").read_text()
    name = platform.processor()
    flags: list[str] = []
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() == "flags":
            flags = value.split()
    instructions = [flag for flag in INSTRUCTIONS if flag in flags]
    content = {"name": name, "instructions": instructions, "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        content["gpu"] = torch.cuda.get_device_name()
    return content


def choose_precision() -> str:
    """Return "bfloat16" if the GPU has instructions for it, or the CPU if there is no GPU; otherwise "float32"."""
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    instructions = processor()["instructions"]
    if any(instruction in instructions for instruction in FAST_BFLOAT16):
        return "bfloat16"
    return "float32"


def precision_overrides() -> list[str]:
    """Return the Hydra overrides with which a training computes in `choose_precision()`.

    On a GPU, autocast converts the float32 weights. On a CPU, that takes too long, so the weights are bfloat16, too.
    """
    option = "task.autocast" if torch.cuda.is_available() else "common.bf16"
    return ["common.fp16=false", f"{option}={str(choose_precision() == 'bfloat16').lower()}"]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the results, and this project's commit."""
    packages = {name: version(name) for name in ("torch", "ve-fairseq", "numpy", "lln-fairseq")}
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {"python": platform.python_version(), **packages, "commit": commit}


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result file, an entry per line, with the versions and the processor added to the content."""
    content = {**content, "versions": versions(), "processor": processor()}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    write_bytes(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    print(f"wrote {path}", flush=True)
