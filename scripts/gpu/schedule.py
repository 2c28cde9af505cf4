"""The steps of scripts/gpu_run.sh: what each runs, and for how long at most. In the rehearsal all sizes are tiny."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Command = list[str]

ATTENTIONS = "softmax,lln,lln_diag"
ROOT = Path(__file__).parents[2]
KERNEL_TESTS = [ROOT / f"tests/ops/backends/{name}.py" for name in ("test_triton", "test_triton_joint", "test_gpu")]
# The shape that flash-bidirectional-linear-attention published figures for.
PUBLISHED = ["--mechanisms", "lln", "--heads", "16", "--tokens", str(8 * 32768), "--lengths", "32768"]
TRIAL = ["--device", "cpu", "--repeats", "1", "--heads", "1", "--dim", "16", "--dtype", "float32"]


class Step(NamedTuple):
    """A name, the most minutes it may take, and its commands for an output directory and a rehearsal or none.

    `always`: it runs again every time, and its minutes are kept for it.
    """

    name: str
    minutes: float
    commands: Callable[[Path, bool], list[Command]]
    always: bool = False


def program(module: str, *arguments: str | Path) -> Command:
    return [sys.executable, "-m", module, *map(str, arguments)]


def device(out: Path, rehearsal: bool) -> list[Command]:
    return [program("scripts.gpu.device", out / "device.json", *(["--device", "cpu"] if rehearsal else []))]


def kernels(out: Path, rehearsal: bool) -> list[Command]:
    tests = program("pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={out / 'kernels.xml'}", *KERNEL_TESTS)
    return [[*tests, "-k", "of_constant_and_of_no_tokens"] if rehearsal else [*tests, "-n", "8"]]


def attention(out: Path, rehearsal: bool) -> list[Command]:
    benchmark, tiles = "scripts.benchmarks.gpu", "scripts.benchmarks.tiles"
    if rehearsal:
        size = [*TRIAL, "--tokens", "32"]
        return [
            program(benchmark, *size, "--mechanisms", "lln", "--lengths", "32", "--block-size", "16",
                    "--json", out / "attention_float16.json"),
            program(tiles, *size, "--length", "32", "--kernels", "state", "--candidates", "1", "--jobs", "1",
                    "--patch", out / "tiles.patch"),
        ]  # fmt: skip
    return [
        program(benchmark, "--json", out / "attention_float16.json"),
        program(benchmark, *PUBLISHED, "--json", out / "attention_published.json"),
        program(tiles, "--minutes", "3", "--patch", out / "tiles.patch"),
        program(benchmark, "--dtype", "bfloat16", "--lengths", "512", "4096", "16384",
                "--json", out / "attention_bfloat16.json"),
    ]  # fmt: skip


def model(out: Path, rehearsal: bool) -> list[Command]:
    rows = ["softmax_matrix", "softmax", "nystrom:conv_kernel=33", "lln", "lln_diag", "lln_diag:mix=joint_offset"]
    size = ["--smoke"] if rehearsal else ["--preset", "base"]
    rows = ["--attentions", *(["lln_diag"] if rehearsal else rows)]
    plain = program("scripts.benchmarks.model", *size, *rows, "--json", out / "model.json", "--png", out / "model.png")
    compiled = program("scripts.benchmarks.model", *size, *rows, "--compile", "--json", out / "model_compiled.json")
    return [plain] if rehearsal else [plain, compiled]  # torch.compile takes a minute on a CPU


def training(out: Path, rehearsal: bool) -> list[Command]:
    attentions = "lln_diag" if rehearsal else ATTENTIONS
    compare = program("scripts.experiments.compare_attentions", "--attentions", attentions, "--seeds", "1",
                      "--out", out / "compare", *pretraining(rehearsal), *finetuning(rehearsal))  # fmt: skip
    runs = [f"{name}={out / 'compare' / name / 'seed1'}" for name in attentions.split(",")]
    figures = program("scripts.paper_figures", "--only", "1", "8", "9", "--out", out / "figures", "--run", *runs)
    killed = program("scripts.gpu.resume", out / "resume", *pretraining(rehearsal))
    return [killed, compare, figures]


def pretraining(rehearsal: bool) -> list[str]:
    """Hydra overrides: the same minutes for every attention, a learning rate that is constant after its rise."""
    if rehearsal:
        return ["corpus=wikitext103", "model=nano", "run=cpu", "pretrain:optimization.max_update=4",
                "pretrain:common.log_interval=2",
                "pretrain:task.probe_interval=2", "pretrain:task.global_batch=4", "pretrain:dataset.batch_size=4",
                "pretrain:task.tokens_per_sample=32", "pretrain:+dataset.max_valid_steps=1"]  # fmt: skip
    return ["corpus=wikitext103", "model=small", "run=gpu1", "pretrain:optimization.stop_time_hours=0.05",
            "pretrain:optimization.max_update=200000", "pretrain:lr_scheduler.warmup_updates=500",
            "pretrain:optimization.lr=[0.001]", "pretrain:dataset.batch_size=64", "pretrain:task.global_batch=64",
            "pretrain:task.probe_interval=200", "pretrain:common.log_interval=50",
            "pretrain:dataset.validate_interval_updates=500", "pretrain:+dataset.max_valid_steps=10"]  # fmt: skip


def finetuning(rehearsal: bool) -> list[str]:
    tasks = "sst2" if rehearsal else "sst2,qnli"
    updates = 2 if rehearsal else 1500
    schedule = "finetune:lr_scheduler"
    return [f"glue={tasks}", f"finetune:optimization.max_update={updates}", f"{schedule}.total_num_update={updates}",
            f"{schedule}.warmup_updates={updates // 10}", "finetune:optimization.lr=[0.0002]"]  # fmt: skip


def report(out: Path, rehearsal: bool) -> list[Command]:
    return [program("scripts.gpu.results", out)]


STEPS = (
    Step("device", 1, device),
    Step("kernels", 6, kernels),
    Step("attention", 6, attention),
    Step("model", 5, model),
    Step("training", 18, training),
    Step("report", 1, report, always=True),
)
