"""Everything that a GPU is to show, step by step; run by scripts/gpu_run.sh.

    scripts/gpu_run.sh                            # all steps, within half an hour
    scripts/gpu_run.sh --steps 1-3 --minutes 10   # some, and what is left of them the next time
    scripts/gpu_run.sh --rehearse                 # tiny sizes on a CPU: does everything run?
    scripts/gpu_run.sh --pack carry               # a folder to take to a machine without a network

1 device, 2 kernel tests, 3 time of the attention and tiles, 4 time and memory of a model, 5 trainings, 6 the report.
A step that fails or takes too long does not stop the next. What ended is not run again by the same command; what was
cut off goes on. The steps may take longer together than --minutes allow: then the last ones are cut off, but the report
is made. OUT/logs has the output, OUT/report.txt the results.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from lln_fairseq.command import UserError, child_environment, run_main
from lln_fairseq.data.files import write_bytes
from scripts.experiments.steps import end
from scripts.gpu.schedule import STEPS, Command, Step

GRACE = 10  # seconds between the request to end and the end
CUT_OFF = "cut off"
FILES = ("steps.json", "rehearsal.json")  # of a run and of a rehearsal, whose results are none


class Run:
    """The steps of one output directory: a file in it has the exit code of every command that ended."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.steps = [STEPS[number - 1] for number in args.steps]
        kept = sum(step.minutes for step in self.steps if step.always)
        self.end = time.monotonic() + 60 * (args.minutes - kept)
        self.file, other = (self.out / name for name in FILES[:: -1 if args.rehearse else 1])
        if other.exists():
            raise UserError(f"{other}: a rehearsal and a run on a GPU do not share a directory, choose another --out")
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        self.results = read_results(self.file)

    def all(self) -> int:
        """The exit code: 1 where a command failed or was cut off."""
        for step in self.steps:
            self.step(step)
        failed = {name: code for name, code in self.results.items() if code}
        for name, code in failed.items():
            print(f"{name}: {code if code == CUT_OFF else f'exit code {code}'}, see {self.out / 'logs' / name}.log")
        return int(bool(failed))

    def step(self, step: Step) -> None:
        until = time.monotonic() + 60 * step.minutes
        until = until if step.always else min(self.end, until)
        for number, command in enumerate(step.commands(self.out, self.args.rehearse), start=1):
            name = f"{step.name}-{number}"
            if not step.always and self.results.get(name, CUT_OFF) != CUT_OFF:
                print(f"{name}: done before")
                continue
            print(f"{name}: {' '.join(command[2:5])} ...", flush=True)
            begin = time.monotonic()
            self.results[name] = self.run(command, name, until - begin)
            write_bytes(self.file, (json.dumps(self.results, indent=1) + "\n").encode())
            print(f"{name}: {self.results[name] or 'ok'}, {time.monotonic() - begin:.0f} s", flush=True)

    def run(self, command: Command, name: str, seconds: float) -> int | str:
        """The exit code of a command, its output in a log and, at the end, here."""
        if seconds <= 0:
            return CUT_OFF
        log = self.out / "logs" / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(self.args))
            try:
                code: int | str = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = CUT_OFF
            finally:
                end(process, GRACE)
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-self.args.tail :]), flush=True)
        return code


def read_results(file: Path) -> dict[str, int | str]:
    """Exit codes by command; none where the file is missing or damaged."""
    try:
        results = json.loads(file.read_text()) if file.exists() else {}
        return {name: code if code == CUT_OFF else int(code) for name, code in results.items()}
    except (ValueError, TypeError, AttributeError):
        print(f"{file} is damaged: its commands are run again")
        return {}


def environment(args: argparse.Namespace) -> dict[str, str]:
    """The rehearsal interprets the kernels, whether there is a GPU or not."""
    trial = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if args.rehearse else {}
    return {**child_environment(), **trial, "PYTHONUNBUFFERED": "1"}


def numbers(text: str) -> list[int]:
    """[2, 1, 3, 6] of "2,1-3,6": in the order in which they are named."""
    chosen = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        chosen += range(int(first), int(last or first) + 1)
    if not chosen or set(chosen) - set(range(1, len(STEPS) + 1)):
        raise argparse.ArgumentTypeError(f"steps are 1 to {len(STEPS)}, as in 1-3 or 2,6; not {text}")
    return list(dict.fromkeys(chosen))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_run.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--steps", type=numbers, default=numbers(f"1-{len(STEPS)}"), help="as in 1-3 or 2,6 (all)")
    parser.add_argument("--minutes", type=float, default=29.0, help="for all steps together (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: runs/gpu; runs/rehearsal with --rehearse")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--tail", type=int, default=12, help="lines of every command's output shown here (%(default)s)")
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs/rehearsal" if args.rehearse else "runs/gpu")
    return run_main(lambda: Run(args).all(), "\ninterrupted; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
