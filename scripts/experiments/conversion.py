"""What is left of a softmax encoder when a linear attention takes its place: by form, steps of transfer and length.

    python -m scripts.experiments.conversion TEACHER DATA OUT --steps 0 100 --lengths 64 128 512 --seeds 1 2

TEACHER and DATA as for lln_fairseq.linearize. Every row is a transfer of its own, measured on the same held-out texts:
the cosine of mean-pooled vectors to the teacher's, and for which share of the texts the nearest other text is the same.
What is in OUT/conversion.json is not run again.
"""

from lln_fairseq.command import UserError, run_main, start

if __name__ == "__main__":
    start(__spec__.name)

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

import lln_fairseq

lln_fairseq.register()  # before all that imports fairseq, which would talk

from data_prep.files import write_bytes  # noqa: E402
from lln_fairseq.linearize import COUNT, read_texts  # noqa: E402
from lln_fairseq.loading import load_model  # noqa: E402
from lln_fairseq.memory import keep_freed_memory  # noqa: E402
from lln_fairseq.students import HeldOut, Students  # noqa: E402
from scripts.columns import aligned  # noqa: E402

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "LLN alone": ("lln", {}),
    "blocks alone": ("block_diag", {}),
    "average": ("lln_diag", {}),
    "joint": ("lln_diag", {"mix": "joint"}),
    "joint_share": ("lln_diag", {"mix": "joint_share"}),
    "joint_offset": ("lln_diag", {"mix": "joint_offset"}),
    "joint_offset, entropy": ("lln_diag", {"mix": "joint_offset", "constants": "entropy"}),
    "joint_offset, gain": ("lln_diag", {"mix": "joint_offset", "gain": "learned"}),
}
WITHOUT_BLOCKS = ("lln",)


class Conversion:
    """Rows of results by (variant, steps, seed), each a list of [cosine, same neighbour] by length."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, args.out / "conversion.json"
        args.out.mkdir(parents=True, exist_ok=True)
        self.settings = {key: getattr(args, key) for key in ("lengths", "tokens", "lr", "block_size")}
        self.settings["teacher"] = str(args.teacher)
        self.rows: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            saved = json.loads(self.file.read_text())
            if saved["settings"] != self.settings:
                raise UserError(f"{self.file} is of other settings: give another OUT")
            self.rows = saved["rows"]
        self.model, task = load_model(str(args.teacher))
        self.train, valid = (read_texts(args.data, split, task.source_dictionary) for split in ("train", "valid"))
        self.held_out = [HeldOut(self.model, valid, COUNT, length) for length in args.lengths]

    def all(self) -> None:
        wanted = [(name, steps, seed) for seed in self.args.seeds for name in self.args.variants
                  for steps in self.args.steps]  # fmt: skip
        for name, steps, seed in tqdm([row for row in wanted if key(*row) not in self.rows], desc="rows", disable=None):
            self.rows[key(name, steps, seed)] = self.row(name, steps, seed)
            content = {"settings": self.settings, "rows": self.rows}
            write_bytes(self.file, (json.dumps(content, indent=1) + "\n").encode())
        print(self.table())

    def row(self, name: str, steps: int, seed: int) -> dict[str, Any]:
        attention, options = VARIANTS[name]
        blocks = {} if attention in WITHOUT_BLOCKS else {"block_size": self.args.block_size}
        students = Students(self.model, attention, {**options, **blocks}, self.args.lr, steps, seed)
        begin = time.process_time()
        for _ in range(steps):
            students.train_step(self.train, self.args.tokens, max(self.args.lengths))
        seconds = time.process_time() - begin
        quality = [list(texts.similarity(list(students.modules))) for texts in self.held_out]
        return {"quality": quality, "cpu_seconds": round(seconds, 1)}

    def table(self) -> str:
        """The means over the seeds."""
        heads = ["", "steps", *(f"{what} {n}" for n in self.args.lengths for what in ("cosine", "neighbour"))]
        lines = [heads]
        for name in self.args.variants:
            for steps in self.args.steps:
                found = [self.rows[key(name, steps, seed)]["quality"] for seed in self.args.seeds]
                by_column = zip(*([x for pair in quality for x in pair] for quality in found), strict=True)
                means = [sum(values) / len(values) for values in by_column]
                lines.append([name, str(steps), *(f"{mean:.3f}" for mean in means)])
        return aligned(lines)


def key(name: str, steps: int, seed: int) -> str:
    return f"{name}; {steps} steps; seed {seed}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.experiments.conversion", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("teacher", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 100], help="of the transfer (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512], help="tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each update (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="of Adam (%(default)s)")
    parser.add_argument("--block-size", type=int, default=32, help="tokens (%(default)s)")
    args = parser.parse_args(argv)
    keep_freed_memory()
    return run_main(lambda: Conversion(args).all(), "\ninterrupted; the same command goes on from here")
