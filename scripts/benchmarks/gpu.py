"""Test the kernels and time attentions, models and training on a CUDA machine, within a time limit. Write a report.

    scripts/gpu_run.sh                                 # all steps, within half an hour
    scripts/gpu_run.sh kernels attention --minutes 10
    scripts/gpu_run.sh --rehearse                      # tiny sizes on a CPU, to check that everything runs

kernels    tests of the Triton kernels
attention  time and memory by length, compared with SDPA and with the time to move the bytes
model      time and memory of a training step of RoBERTa-base
training   two minutes of pre-training for each of three attentions, then SST-2; needs data-bin/wikitext-103
           and data-bin/glue

A step that fails or takes too long does not stop the next one. If you run the same command again, it skips the steps
that have succeeded, repeats the other steps, and resumes training runs. The output of each step is in OUT/logs, and the
last lines of each output are in OUT/report.txt.
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

MINUTES = {"kernels": 6, "attention": 5, "model": 5, "training": 13}  # the limit of each step
TESTS = Path(__file__).parents[2] / "tests/ops"
KERNEL_TESTS = [str(TESTS / "test_backends.py"), str(TESTS / "backends/test_triton.py")]
ATTENTIONS = ["lln", "lln_diag", "lln_diag:mix=joint_offset"]
REPORTED_LINES = 60  # number of lines of each step's output in the report

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
# A rehearsal interprets the kernels even on a machine with a GPU.
REHEARSAL_VARIABLES = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with the current Python."""
    return [sys.executable, "-m", module, *arguments]


def step_commands(out: Path) -> dict[str, list[str]]:
    """Return the command of each step on a GPU, in the order of MINUTES."""
    return {
        "kernels": module_command("pytest", "-q", "-p", "no:cacheprovider", "-n", "8", *KERNEL_TESTS),
        "attention": module_command(
            "scripts.benchmarks.attention",
            *("--dtype", "float16", "--tokens", "32768", "--attentions", *ATTENTIONS),
            *("--lengths", "512", "1024", "2048", "4096", "8192", "16384", "32768"),
            *("--json", str(out / "attention.json")),
        ),
        "model": module_command(
            "scripts.benchmarks.model",
            *("--preset", "base", "--attentions", "softmax_matrix", "softmax", "nystrom:conv_kernel=33", *ATTENTIONS),
            *("--json", str(out / "model.json")),
        ),
        "training": module_command(
            "scripts.compare_attentions",
            *("--attentions", "softmax,lln,lln_diag", "--seeds", "1", "--out", str(out / "compare")),
            *PRETRAINING,
            *FINETUNING,
        ),
    }


def rehearsal_commands(out: Path) -> dict[str, list[str]]:
    """Return the commands of the steps in `step_commands` with tiny sizes, for a CPU."""
    one_fast_test = "without_variance_and_without_tokens"
    smoke_options = ["--smoke", "--no-memory", "--attentions", *ATTENTIONS]
    return {
        "kernels": module_command("pytest", "-q", "-p", "no:cacheprovider", "-k", one_fast_test, *KERNEL_TESTS),
        "attention": module_command("scripts.benchmarks.attention", *smoke_options),
        "model": module_command("scripts.benchmarks.model", *smoke_options),
        "training": module_command(
            "scripts.compare_attentions",
            *("--attentions", "lln_diag", "--seeds", "1", "--out", str(out / "compare")),
            *REHEARSED_TRAINING,
        ),
    }


def run_steps(args: argparse.Namespace) -> int:
    """Run the requested steps that have not succeeded yet, then write and print the report.

    Returns:
        The exit code: 1 if a requested step failed or had no time left, otherwise 0.

    Raises:
        UserError: if there is no GPU and this is not a rehearsal.
    """
    if args.rehearse:
        commands = rehearsal_commands(args.out)
        environment = REHEARSAL_VARIABLES
    elif torch.cuda.is_available():
        commands = step_commands(args.out)
        environment = {}
    else:
        raise UserError("torch finds no CUDA device; use --rehearse to run tiny sizes on a CPU")
    steps = Steps(args.out)
    end = time.monotonic() + 60 * args.minutes
    for name in args.steps:
        seconds = min(60 * MINUTES[name], end - time.monotonic())
        if seconds <= 0:
            print(f"{name}: not started, the limit of {args.minutes:g} minutes has passed")
            continue
        print(f"{name} ...", flush=True)
        try:
            steps.run(name, commands[name], environment=environment, timeout=seconds)
        except StepFailed as error:
            print(f"error: {error}", file=sys.stderr)
    report = report_text(steps, list(commands))
    write_bytes(args.out / "report.txt", report.encode())
    print(f"\n{report}\nreport: {args.out / 'report.txt'}")
    return int(any(name not in steps.times for name in args.steps))


def report_text(steps: Steps, names: list[str]) -> str:
    """Return the device and the versions, and for each step its time and the last REPORTED_LINES lines of its output.

    A step that has not succeeded is marked "NOT COMPLETE".
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}"
    parts = [f"{device}; CUDA {torch.version.cuda}; {versions}"]
    for name in names:
        log = steps.out / "logs" / f"{name}.log"
        lines = []
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()
        state = "NOT COMPLETE"
        if name in steps.times:
            state = f"{steps.times[name]:.0f} s"
        parts.append("\n".join([f"== {name}: {state}", *lines[-REPORTED_LINES:]]))
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = program_parser("scripts/gpu_run.sh", __doc__)
    parser.add_argument("steps", nargs="*", metavar="step", help=f"{', '.join(MINUTES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=29.0, help="time limit of all steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: runs/gpu; runs/rehearsal with --rehearse")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    args = parser.parse_args(argv)
    if unknown := set(args.steps) - set(MINUTES):
        parser.error(f"unknown step: {', '.join(sorted(unknown))} (choose from {', '.join(MINUTES)})")
    args.steps = args.steps or list(MINUTES)
    args.out = args.out or Path("runs/rehearsal" if args.rehearse else "runs/gpu")
    return run_main(lambda: run_steps(args), "\ninterrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
