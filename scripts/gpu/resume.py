"""A pre-training that is killed and started again goes on: the same command twice, SIGKILL between.

python -m scripts.gpu.resume OUT [Hydra overrides, after pretrain: or for both stages]
"""

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from lln_fairseq.command import UserError, child_environment, run_main
from scripts.experiments.steps import training

SAVE_EVERY, UPDATES = 10, 50
PATIENCE = 300  # seconds until the first checkpoint
RESUMED = re.compile(r"Loaded checkpoint .* @ (\d+) updates")


def kill_and_resume(out: Path, overrides: list[str]) -> None:
    """Raises: UserError where no checkpoint comes, or the second run does not go on from it."""
    stage = [text.removeprefix("pretrain:") for text in overrides if not text.startswith(("finetune:", "glue="))]
    budget = [f"optimization.max_update={UPDATES}", f"checkpoint.save_interval_updates={SAVE_EVERY}"]
    command = training("pretrain", out, "attention=lln_diag", *stage, *budget)
    log, last = out / "log.txt", out / "checkpoint_last.pt"
    out.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        first = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=child_environment())
        try:
            wait_for(last, first, log)
        finally:
            first.kill()
            first.wait()
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=child_environment()).returncode
    text = log.read_text(errors="replace")
    found = RESUMED.findall(text)
    if code or not found or not SAVE_EVERY <= int(found[-1]) < UPDATES:
        raise UserError(f"the killed training did not go on (exit code {code}): see {log}")
    print(f"killed after a checkpoint, resumed at update {found[-1]}, complete at {UPDATES}")


def wait_for(checkpoint: Path, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not checkpoint.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise UserError(f"the training wrote no checkpoint: see {log}")
        time.sleep(0.02)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.resume", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("out", type=Path)
    args, overrides = parser.parse_known_args(argv)
    return run_main(lambda: kill_and_resume(args.out, overrides))


if __name__ == "__main__":
    sys.exit(main())
