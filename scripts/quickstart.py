"""Demo data, pre-training, fine-tuning, evaluation, a table and a picture. Run through scripts/quickstart.sh.

Every step that finished is kept: a second run does only what is missing, and an interrupted training resumes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from scripts.quickstart_report import draw, table

ATTENTION, BASELINE = "lln_diag", "softmax"


@dataclass
class Variant:
    """One column of the table."""

    name: str
    attention: str
    pretrained: bool = True


class StepFailed(Exception):
    """A step ended with an error that its own output explains."""


class Quickstart:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.run = "gpu1" if torch.cuda.is_available() else "cpu"
        self.times_file = self.out / "times.json"
        self.times: dict[str, float] = json.loads(self.times_file.read_text()) if self.times_file.exists() else {}

    def step(self, name: str, command: list[str], total_updates: int | None = None) -> None:
        """Runs a command once: its wall time is written down when it ends well, and it is not run again."""
        if name in self.times:
            print(f"{name}: done before")
            return
        log = self.out / "logs" / f"{name.replace(' ', '_')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with log.open("a") as file:
            code = follow(command, file, name, total_updates)
        if code:
            tail = [line for line in log.read_text().splitlines() if line.strip()][-1:]
            raise StepFailed(f"{name} failed (exit code {code}): {' '.join(tail)}\nthe whole output is in {log}")
        self.times[name] = time.monotonic() - start
        self.times_file.write_text(json.dumps(self.times, indent=2) + "\n")

    def data(self) -> None:
        command = [sys.executable, "-m", "data_prep.demo", "--out", self.args.data]
        command += ["--archive", self.args.archive] if self.args.archive else []
        start = time.monotonic()
        if subprocess.run(command).returncode:
            raise StepFailed("data preparation failed, see above; run the same command again to go on")
        self.times.setdefault("data", time.monotonic() - start)

    def pretrain(self, attention: str) -> Path:
        folder = self.out / f"pretrain_{attention}"
        updates = self.args.updates or OmegaConf.load("configs/corpus/demo.yaml").optimization.max_update
        overrides = ["corpus=demo", f"task.data={self.args.data}/lm", f"optimization.max_update={updates}"]
        self.step(f"pre-train {attention}", self.train("pretrain", attention, folder, overrides), updates)
        return folder / "checkpoint_best.pt"

    def finetune(self, variant: Variant) -> Path:
        folder = self.out / f"finetune_{variant.name}"
        overrides = ["glue=demo", f"task.data={self.args.data}/sentiment"]
        if variant.pretrained:
            overrides.append(
                f"checkpoint.finetune_from_model={self.out}/pretrain_{variant.attention}/checkpoint_best.pt"
            )
        updates = OmegaConf.load("configs/glue/demo.yaml").lr_scheduler.total_num_update
        if self.args.updates:
            updates = min(updates, self.args.updates)
            overrides.append(f"optimization.max_update={updates}")
        self.step(f"fine-tune {variant.name}", self.train("finetune", variant.attention, folder, overrides), updates)
        return folder / "checkpoint_best.pt"

    def evaluate(self, variant: Variant, checkpoint: Path, split: str) -> dict:
        result = self.out / f"finetune_{variant.name}" / f"{split}.json"
        command = [sys.executable, "-m", "lln_fairseq.evaluate", str(checkpoint), f"{self.args.data}/sentiment"]
        self.step(f"evaluate {variant.name} on {split}", [*command, "--split", split, "--json", str(result)])
        return json.loads(result.read_text())

    def train(self, config: str, attention: str, folder: Path, overrides: list[str]) -> list[str]:
        hydra = [sys.executable, "-m", "fairseq_cli.hydra_train", "--config-dir", "configs", "--config-name", config]
        settings = ["model=tiny", f"attention={attention}", f"run={self.run}", f"checkpoint.save_dir={folder}"]
        return [*hydra, *settings, "common.log_format=json", *overrides]

    def all(self) -> None:
        variants = [Variant(ATTENTION, ATTENTION)]
        if self.args.compare:
            variants += [Variant(BASELINE, BASELINE), Variant("no_pretraining", ATTENTION, pretrained=False)]
        self.data()
        rows = {}
        for variant in variants:
            if variant.pretrained:
                self.pretrain(variant.attention)
            checkpoint = self.finetune(variant)
            rows[variant.name] = {split: self.evaluate(variant, checkpoint, split) for split in ("valid", "test")}
        runs = {variant.name: variant.attention if variant.pretrained else None for variant in variants}
        print("\n" + table(self.out, rows, runs, self.times))
        picture = draw(self.out, runs)
        print(f"\ncurves: {picture}\nTensorBoard: {self.out}, watch it with: tensorboard --logdir {self.out}")


def follow(command: list[str], log: object, name: str, total_updates: int | None) -> int:
    """Runs a command with its output in a log; shows the updates of a training as a progress bar. Returns its code."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        with tqdm(total=total_updates, desc=name, unit="update", dynamic_ncols=True, disable=None) as bar:
            for line in process.stdout:
                log.write(line)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="also softmax, and fine-tuning without pre-training")
    parser.add_argument("--archive", help="the demo's source archive, for machines without a network")
    parser.add_argument(
        "--data", default="data-bin/demo", help="where the demo data is or will be (default: %(default)s)"
    )
    parser.add_argument("--out", default="runs/quickstart", help="checkpoints, logs, picture (default: %(default)s)")
    parser.add_argument("--updates", type=int, help="at most so many updates a training: a quick try of everything")
    args = parser.parse_args()
    try:
        quickstart = Quickstart(args)
        quickstart.out.mkdir(parents=True, exist_ok=True)
        if seconds := int(os.environ.get("LLN_INSTALL_SECONDS", "0")):
            quickstart.times["install"] = seconds
        quickstart.all()
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (StepFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
