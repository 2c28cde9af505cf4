"""Pre-train and fine-tune several attentions with the same data, budget and seeds. Write a table and a plot.

    scripts/compare_attentions.sh --attentions softmax,lln_diag,nystrom --seeds 1 2 --jobs 2
    scripts/compare_attentions.sh --attentions softmax,lln_diag corpus=wikitext103 glue=sst2,qnli model=base run=gpu1
    scripts/compare_attentions.sh --attentions lln_diag,lln_diag:mix=joint_offset

Hydra overrides apply to pre-training and fine-tuning. The prefix `pretrain:` or `finetune:` limits an override to one
of them, as in pretrain:dataset.batch_size=32. corpus= names the pre-training data, and glue= names one or more tasks.
With glue=none, nothing is fine-tuned. The default is model=nano and the demo data, which is built if necessary.
Finished runs are not repeated, and interrupted runs resume.
"""

import argparse
import json
import os
import queue
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import lln_fairseq
from lln_fairseq.attention.layers import check_attention_spec
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import run_main
from lln_fairseq.errors import InputError
from lln_fairseq.training.recipes import CONFIGS
from scripts.compare_report import comparison_table, plot_comparison, read_results, run_directory
from scripts.experiments.settings import format_override
from scripts.experiments.steps import StepFailed, Steps, evaluation_command, prepare_demo_data, training_command
from scripts.terminal import at_least_one, program_parser

DEMO = "demo"
NO_TASK = "none"
DEFAULT_ATTENTIONS = "softmax,lln,lln_diag,elu,performer,nystrom"


class Overrides:
    """The corpus, the tasks and the Hydra overrides that the command line selects for all runs.

    Attributes:
        corpus: the value of corpus=, by default "demo".
        tasks: the values of glue=, by default a list with only "demo". It is empty if the value is "none".
        pretrain: overrides of all pre-training runs.
        finetune: overrides of all fine-tuning runs.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.corpus = DEMO
        self.tasks = [DEMO]
        self.pretrain: list[str] = []
        self.finetune: list[str] = []
        for override in self._with_defaults(args.overrides):
            stage, _, stage_override = override.partition(":")
            group, _, value = override.partition("=")
            if stage == "pretrain":
                self.pretrain.append(stage_override)
            elif stage == "finetune":
                self.finetune.append(stage_override)
            elif group == "corpus":
                self.corpus = value
            elif group == "glue":
                self.tasks = [] if value == NO_TASK else value.split(",")
            else:
                self.pretrain.append(override)
                self.finetune.append(override)
        if args.updates:
            self.pretrain.append(f"optimization.max_update={args.updates}")
        if args.finetune_updates:
            self.finetune.append(f"optimization.max_update={args.finetune_updates}")
            self.finetune.append(f"lr_scheduler.total_num_update={args.finetune_updates}")
        if self.corpus == DEMO:
            self.pretrain.insert(0, format_override("task.data", f"{args.data}/lm"))

    @staticmethod
    def _with_defaults(overrides: list[str]) -> list[str]:
        """Return the overrides, followed by model=nano and run=cpu if these options are missing.

        On a machine with a GPU, run=gpu1 is added instead of run=cpu.
        """
        groups = {override.partition("=")[0] for override in overrides}
        completed = list(overrides)
        if "model" not in groups:
            completed.append("model=nano")
        if "run" not in groups:
            completed.append("run=gpu1" if torch.cuda.is_available() else "run=cpu")
        return completed

    def for_pretraining(self, attention: str, seed: int) -> list[str]:
        """Return all overrides of one pre-training run; `attention` is an attention spec."""
        return [f"corpus={self.corpus}", *attention_overrides(attention), f"common.seed={seed}", *self.pretrain]

    def for_finetuning(self, attention: str, seed: int, task: str, data: str) -> list[str]:
        """Return all overrides of one fine-tuning run.

        Args:
            attention: attention spec.
            seed: seed of the run.
            task: name of a recipe in configs/glue.
            data: directory of the demo data. Other tasks than "demo" ignore it.
        """
        overrides = [f"glue={task}", *attention_overrides(attention), f"common.seed={seed}"]
        if task == DEMO:
            overrides.append(format_override("task.data", f"{data}/sentiment"))
        return overrides + self.finetune


def attention_overrides(attention: str) -> list[str]:
    """Return the Hydra overrides for an attention spec such as "lln_diag:mix=joint_offset"."""
    name, options = parse_attention_spec(attention)
    overrides = [f"attention={name}"]
    for key, value in options.items():
        overrides.append(f"model.{name}_{key}={json.dumps(value)}")
    return overrides


class Comparison:
    """Runs a comparison. The constructor composes all recipes, so that wrong overrides are reported at once.

    Raises:
        InputError: if Hydra rejects an override.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out = args.out
        self.overrides = Overrides(args)
        attention = args.attentions[0]
        self.pretraining = compose_config("pretrain", self.overrides.for_pretraining(attention, 1))
        self.tasks: dict[str, Any] = {}  # the composed recipe of every task
        for task in self.overrides.tasks:
            overrides = self.overrides.for_finetuning(attention, 1, task, args.data)
            self.tasks[task] = compose_config("finetune", overrides)
        self.steps = Steps(self.out)
        self.free_slots: queue.Queue[int] = queue.Queue()  # numbers of the jobs that may start
        for slot in range(args.jobs):
            self.free_slots.put(slot)

    def run_all(self) -> list[str]:
        """Build the demo data if needed, then run all attentions with all seeds, args.jobs of them at a time.

        A run that fails does not stop the others. Its error message is printed at once.

        Returns:
            The error messages of all runs that failed.
        """
        if self._needs_demo_data():
            prepare_demo_data(self.args.data, self.args.archive)
        failures = []
        with ThreadPoolExecutor(self.args.jobs) as pool:
            futures = []
            for seed in self.args.seeds:
                for attention in self.args.attentions:
                    futures.append(pool.submit(self.run_attention, attention, seed))
            try:
                for future in as_completed(futures):
                    try:
                        future.result()
                    except StepFailed as error:
                        failures.append(str(error))
                        print(f"error: {error}", file=sys.stderr)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.steps.stop()
                raise
        return failures

    def _needs_demo_data(self) -> bool:
        """Return True if a recipe reads its data from the directory of the demo data."""
        configs = [self.pretraining, *self.tasks.values()]
        return any(str(config.task.data).startswith(self.args.data) for config in configs)

    def run_attention(self, attention: str, seed: int) -> None:
        """Pre-train an attention with one seed, then fine-tune and evaluate it on every task.

        This waits until fewer than args.jobs runs are active. Finished steps are skipped. Raises StepFailed if a step
        fails.
        """
        slot = self.free_slots.get()
        try:
            self._run_steps(attention, seed, job_environment(slot, self.args.jobs))
        finally:
            self.free_slots.put(slot)

    def _run_steps(self, attention: str, seed: int, variables: dict[str, str]) -> None:
        """Run the steps of `run_attention` with additional environment variables."""
        name = f"{attention}, seed {seed}"
        directory = run_directory(self.out, attention, seed)
        pretraining = training_command("pretrain", directory, *self.overrides.for_pretraining(attention, seed))
        self.steps.run(f"pre-train {name}", pretraining, self.pretraining.optimization.max_update, variables)
        for task, config in self.tasks.items():
            task_directory = directory / "glue" / task
            overrides = self.overrides.for_finetuning(attention, seed, task, self.args.data)
            checkpoint = format_override("checkpoint.finetune_from_model", directory / "checkpoint_best.pt")
            finetuning = training_command("finetune", task_directory, checkpoint, *overrides)
            updates = config.optimization.get("max_update") or config.lr_scheduler.total_num_update
            self.steps.run(f"fine-tune {name} on {task}", finetuning, updates, variables)
            evaluate = evaluation_command(task_directory, labeled_splits(Path(config.task.data)))
            self.steps.run(f"evaluate {name} on {task}", evaluate, environment=variables)

    def report(self) -> None:
        """Write OUT/comparison.txt and OUT/comparison.png from the finished runs, and print the table."""
        metrics = {task: config.checkpoint.best_checkpoint_metric for task, config in self.tasks.items()}
        results = read_results(self.out, self.args.attentions, self.args.seeds, metrics)
        table = comparison_table(results, self.args.seeds)
        (self.out / "comparison.txt").write_text(table + "\n")
        plot = plot_comparison(self.out / "comparison.png", results)
        print(f"\n{table}\n\nplot: {plot}")


def compose_config(recipe: str, overrides: list[str]) -> Any:
    """Return the configuration of a recipe of configs/, such as "pretrain", with Hydra overrides applied to it.

    The result is the configuration that fairseq's command line builds.

    Raises:
        InputError: if Hydra rejects an override.
    """
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    from fairseq.dataclass.initialize import hydra_init

    hydra_init(recipe)  # registers the schema that fairseq checks against
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra warns about version_base 1.1, which fairseq's command line uses
            with initialize_config_dir(str(CONFIGS), version_base="1.1"):
                return compose(recipe, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        first_paragraph = str(error).split("\n\n")[0]
        raise InputError(" ".join(first_paragraph.split())) from None


def job_environment(slot: int, jobs: int) -> dict[str, str]:
    """Return additional environment variables for one of several concurrent jobs.

    Each job gets an equal share of the CPU cores, unless OMP_NUM_THREADS is set. If the machine has several GPUs, each
    job gets one of them. If `jobs` is 1, the result is empty, so that the job can use the whole machine.

    Args:
        slot: number of the job, from 0 to `jobs` - 1.
        jobs: number of concurrent jobs.
    """
    if jobs == 1:
        return {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads)}
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % num_gpus]
    return variables


def labeled_splits(data: Path) -> list[str]:
    """Return the names of the splits with labels, out of "valid", "valid1" and "test", in this order.

    `data` is the data directory of a task. It contains the labels of a classification as label/SPLIT.idx and the scores
    of a regression as label/SPLIT.label. GLUE's test sets have no labels.
    """
    label_files = {path.name for path in (data / "label").glob("*")}
    return [split for split in ("valid", "valid1", "test") if label_files & {f"{split}.idx", f"{split}.label"}]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Repeated attentions and seeds are dropped.

    In the result, `attentions` is a list, and `overrides` is the list of the Hydra overrides.
    """
    parser = program_parser("scripts/compare_attentions.sh", __doc__)
    parser.add_argument(
        "--attentions",
        default=DEFAULT_ATTENTIONS,
        metavar="NAME[:OPTION=VALUE,...],...",
        help="attentions to compare, the first of which is the baseline (default: %(default)s)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2], help="seeds of every attention (default: 1 2)")
    parser.add_argument("--updates", type=at_least_one, help="updates of pre-training (default: the corpus decides)")
    parser.add_argument(
        "--finetune-updates", type=at_least_one, help="updates of fine-tuning (default: the task decides)"
    )
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        default=1,
        help="number of concurrent runs (default: 1); for small models on a CPU, use the number of cores",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare"), help="output directory (default: %(default)s)"
    )
    parser.add_argument(
        "--data", default="data-bin/demo", help="directory of the demo data, made if needed (default: %(default)s)"
    )
    parser.add_argument("--archive", help="source archive of the demo data, for machines without internet access")
    args, overrides = parser.parse_known_args(argv)
    unknown = [word for word in overrides if word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"neither an option nor a Hydra override: {' '.join(unknown)}")
    args.overrides = overrides
    # A comma before OPTION= separates the options of an attention; any other comma separates attentions.
    attentions = re.split(r",(?!\w+=)", args.attentions)
    args.attentions = list(dict.fromkeys(attentions))
    args.seeds = list(dict.fromkeys(args.seeds))
    for attention in args.attentions:
        try:
            check_attention_spec(attention)
        except ValueError as error:
            parser.error(str(error))
    return args


def compare_attentions(args: argparse.Namespace) -> int:
    """Run and report a comparison. Return the exit code: 1 if a run failed, otherwise 0."""
    comparison = Comparison(args)
    failures = comparison.run_all()
    comparison.report()
    return 1 if failures else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parse_arguments(argv)
    return run_main(partial(compare_attentions, args), "\ninterrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
