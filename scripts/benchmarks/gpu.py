"""Checks and times everything on a CUDA machine, step by step within a time limit, and writes a report.

    scripts/gpu_run.sh                                 # all steps, within half an hour
    scripts/gpu_run.sh kernels attention --minutes 10
    scripts/gpu_run.sh --rehearse                      # tiny sizes on a CPU: does everything run?

kernels    tests of the Triton kernels
attention  time and memory by length, compared with SDPA and with the bytes that must move
model      time and memory of a training step of RoBERTa-base
training   two minutes of pre-training for each of three attentions, then SST-2; needs data-bin/wikitext-103 and glue

A step that fails or takes too long does not stop the next. The same command skips the steps that ended well, starts the
others again and resumes the trainings. OUT/logs has the output of each step, OUT/report.txt the end of each.
"""

import argparse
import platform
import sys
import time
from pathlib import Path

import torch
import triton

from lln_fairseq.command import UserError, run_main
from lln_fairseq.data.files import write_bytes
from scripts.experiments.steps import StepFailed, Steps
from scripts.terminal import program_parser

MINUTES = {"kernels": 6, "attention": 5, "model": 5, "training": 13}
TESTS = Path(__file__).parents[2] / "tests/ops"
KERNEL_TESTS = [str(TESTS / name) for name in ("test_backends.py", "backends/test_triton.py", "backends/test_gpu.py")]
ATTENTIONS = ["lln", "lln_diag", "lln_diag:mix=joint_offset"]
REPORTED_LINES = 60

PRETRAINING = [
    "corpus=wikitext103",
    "model=small",
    "run=gpu1",
    "pretrain:optimization.stop_time_hours=0.035",
    "pretrain:optimization.max_update=200000",
    "pretrain:lr_scheduler.warmup_updates=500",
    "pretrain:optimization.lr=[0.001]",
    "pretrain:dataset.batch_size=64",
    "pretrain:task.global_batch=64",
    "pretrain:common.log_interval=50",
    "pretrain:dataset.validate_interval_updates=500",
    "pretrain:+dataset.max_valid_steps=10",
]
FINETUNING = [
    "glue=sst2",
    "finetune:optimization.max_update=1500",
    "finetune:lr_scheduler.total_num_update=1500",
    "finetune:lr_scheduler.warmup_updates=150",
    "finetune:optimization.lr=[0.0002]",
]
REHEARSED_TRAINING = [
    "corpus=wikitext103",
    "model=nano",
    "run=cpu",
    "pretrain:optimization.max_update=2",
    "pretrain:task.global_batch=4",
    "pretrain:dataset.batch_size=4",
    "pretrain:task.tokens_per_sample=32",
    "pretrain:+dataset.max_valid_steps=1",
    "glue=sst2",
    "finetune:optimization.max_update=2",
]
# The kernels are interpreted even where there is a GPU.
REHEARSAL_VARIABLES = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def program(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def step_commands(out: Path) -> dict[str, list[str]]:
    """Return the command of each step on a GPU."""
    return {
        "kernels": program("pytest", "-q", "-p", "no:cacheprovider", "-n", "8", *KERNEL_TESTS),
        "attention": program(
            "scripts.benchmarks.attention",
            *("--dtype", "float16", "--tokens", "32768", "--attentions", *ATTENTIONS),
            *("--lengths", "512", "1024", "2048", "4096", "8192", "16384", "32768"),
            *("--json", str(out / "attention.json")),
        ),
        "model": program(
            "scripts.benchmarks.model",
            *("--preset", "base", "--attentions", "softmax_matrix", "softmax", "nystrom:conv_kernel=33", *ATTENTIONS),
            *("--json", str(out / "model.json")),
        ),
        "training": program(
            "scripts.compare_attentions",
            *("--attentions", "softmax,lln,lln_diag", "--seeds", "1", "--out", str(out / "compare")),
            *PRETRAINING,
            *FINETUNING,
        ),
    }


def rehearsal_commands(out: Path) -> dict[str, list[str]]:
    """Return the commands of the same steps with tiny sizes, for a CPU."""
    return {
        "kernels": program(
            "pytest", "-q", "-p", "no:cacheprovider", "-k", "without_variance_and_without_tokens", *KERNEL_TESTS
        ),
        "attention": program("scripts.benchmarks.attention", "--smoke", "--no-memory", "--attentions", *ATTENTIONS),
        "model": program("scripts.benchmarks.model", "--smoke", "--no-memory", "--attentions", *ATTENTIONS),
        "training": program(
            "scripts.compare_attentions",
            *("--attentions", "lln_diag", "--seeds", "1", "--out", str(out / "compare")),
            *REHEARSED_TRAINING,
        ),
    }


def run_steps(args: argparse.Namespace) -> int:
    """Run the steps that are left and write the report. Return 1 if a step failed or had no time, else 0."""
    if not args.rehearse and not torch.cuda.is_available():
        raise UserError("torch finds no CUDA device; --rehearse runs tiny sizes on a CPU")
    commands = rehearsal_commands(args.out) if args.rehearse else step_commands(args.out)
    steps = Steps(args.out)
    end = time.monotonic() + 60 * args.minutes
    for name in args.steps:
        seconds = min(60 * MINUTES[name], end - time.monotonic())
        if seconds <= 0:
            print(f"{name}: no time left")
            continue
        print(f"{name} ...", flush=True)
        try:
            steps.run(name, commands[name], environment=REHEARSAL_VARIABLES if args.rehearse else {}, timeout=seconds)
        except StepFailed as error:
            print(f"error: {error}", file=sys.stderr)
    report = report_text(steps, list(commands))
    write_bytes(args.out / "report.txt", report.encode())
    print(f"\n{report}\nreport: {args.out / 'report.txt'}")
    return int(any(name not in steps.times for name in args.steps))


def report_text(steps: Steps, names: list[str]) -> str:
    """Return the device, and for each step its time and the last lines of its output."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}"
    parts = [f"{device}; CUDA {torch.version.cuda}; {versions}"]
    for name in names:
        log = steps.out / "logs" / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        state = f"{steps.times[name]:.0f} s" if name in steps.times else "NOT COMPLETE"
        parts.append("\n".join([f"== {name}: {state}", *lines[-REPORTED_LINES:]]))
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("scripts/gpu_run.sh", __doc__)
    parser.add_argument("steps", nargs="*", metavar="step", help=f"of {', '.join(MINUTES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=29.0, help="for all steps together (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: runs/gpu; runs/rehearsal with --rehearse")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    args = parser.parse_args(argv)
    if unknown := set(args.steps) - set(MINUTES):
        parser.error(f"no such step: {', '.join(sorted(unknown))} (there are {', '.join(MINUTES)})")
    args.steps = args.steps or list(MINUTES)
    args.out = args.out or Path("runs/rehearsal" if args.rehearse else "runs/gpu")
    return run_main(lambda: run_steps(args), "\ninterrupted; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
