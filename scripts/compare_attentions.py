"""Pre-trains and fine-tunes attentions on the same data and budget, with several seeds: one table and one plot.

    scripts/compare_attentions.sh --attentions softmax,lln_diag,nystrom --seeds 1 2 --jobs 2
    scripts/compare_attentions.sh --attentions softmax,lln_diag corpus=wikitext103 glue=sst2,qnli model=base run=gpu1
    scripts/compare_attentions.sh --attentions lln_diag,lln_diag:mix=joint,lln_diag:mix=joint,constants=entropy

Hydra overrides go to pre-training and fine-tuning alike, after `pretrain:` or `finetune:` to one of them, as in
pretrain:dataset.batch_size=32. corpus= names the pre-training data, glue= one or several tasks. Without them the demo
data is made and used, with model=nano. What is finished is not done again, and what was interrupted goes on.
"""

import argparse
import itertools
import json
import os
import queue
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
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
from scripts.compare_report import draw, read_rows, run_folder, table
from scripts.experiments.settings import format_override
from scripts.experiments.steps import StepFailed, Steps, evaluation_command, prepare_demo_data, training_command
from scripts.terminal import at_least_one, program_parser

DEMO = "demo"
DEFAULT_ATTENTIONS = "softmax,lln,lln_diag,elu,performer,nystrom"


class Overrides:
    """Hydra overrides by stage; the tasks of glue= and the defaults of what is not given are taken out of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        given = list(args.overrides)
        for default in ("model=nano", f"run={'gpu1' if torch.cuda.is_available() else 'cpu'}"):
            if not any(override.startswith(default.split("=")[0] + "=") for override in given):
                given.append(default)
        self.pretrain, self.finetune, self.corpus, self.tasks = [], [], DEMO, [DEMO]
        for override in given:
            stage, _, rest = override.partition(":")
            group, _, value = override.partition("=")
            if stage in ("pretrain", "finetune"):
                getattr(self, stage).append(rest)
            elif group == "corpus":
                self.corpus = value
            elif group == "glue":
                self.tasks = value.split(",")
            else:
                self.pretrain.append(override)
                self.finetune.append(override)
        self._budget(args)

    def _budget(self, args: argparse.Namespace) -> None:
        if args.updates:
            self.pretrain.append(f"optimization.max_update={args.updates}")
        if args.finetune_updates:
            updates = args.finetune_updates
            self.finetune += [f"optimization.max_update={updates}", f"lr_scheduler.total_num_update={updates}"]
        if self.corpus == DEMO:
            self.pretrain.insert(0, format_override("task.data", f"{args.data}/lm"))

    def of_pretraining(self, row: str, seed: int) -> list[str]:
        return [f"corpus={self.corpus}", *of_attention(row), f"common.seed={seed}", *self.pretrain]

    def of_finetuning(self, row: str, seed: int, task: str, data: str) -> list[str]:
        demo = [format_override("task.data", f"{data}/sentiment")] if task == DEMO else []
        return [f"glue={task}", *of_attention(row), f"common.seed={seed}", *demo, *self.finetune]


def of_attention(row: str) -> list[str]:
    """Hydra's overrides for a row as parse_attention_spec reads it."""
    name, options = parse_attention_spec(row)
    return [f"attention={name}", *(f"model.{name}_{key}={json.dumps(value)}" for key, value in options.items())]


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out, self.overrides = args, args.out, Overrides(args)
        self.pretraining = configuration("pretrain", self.overrides.of_pretraining(args.attentions[0], 1))
        self.tasks = {task: self._task(task) for task in self.overrides.tasks}
        self.steps = Steps(self.out)
        self.slots: queue.Queue[int] = queue.Queue()
        for slot in range(args.jobs):
            self.slots.put(slot)

    def _task(self, task: str) -> Any:
        return configuration("finetune", self.overrides.of_finetuning(self.args.attentions[0], 1, task, self.args.data))

    def one(self, attention: str, seed: int) -> None:
        """Pre-training, then fine-tuning and evaluation on every task. Raises: StepFailed."""
        slot = self.slots.get()
        try:
            self._train(attention, seed, environment(slot, self.args.jobs))
        finally:
            self.slots.put(slot)

    def _train(self, attention: str, seed: int, variables: dict[str, str]) -> None:
        name, folder = f"{attention}, seed {seed}", run_folder(self.out, attention, seed)
        command = training_command("pretrain", folder, *self.overrides.of_pretraining(attention, seed))
        self.steps.run(f"pre-train {name}", command, self.pretraining.optimization.max_update, variables)
        for task, config in self.tasks.items():
            tuned = folder / "glue" / task
            overrides = self.overrides.of_finetuning(attention, seed, task, self.args.data)
            start = format_override("checkpoint.finetune_from_model", folder / "checkpoint_best.pt")
            command = training_command("finetune", tuned, start, *overrides)
            updates = config.optimization.get("max_update") or config.lr_scheduler.total_num_update
            self.steps.run(f"fine-tune {name} on {task}", command, updates, variables)
            command = evaluation_command(tuned, labelled_splits(Path(config.task.data)))
            self.steps.run(f"evaluate {name} on {task}", command, environment=variables)

    def all(self) -> list[str]:
        """Trains everything; returns what went wrong, a line or two for each run that failed."""
        if any(str(config.task.data).startswith(self.args.data) for config in (self.pretraining, *self.tasks.values())):
            prepare_demo_data(self.args.data, self.args.archive)
        failures, runs = [], itertools.product(self.args.seeds, self.args.attentions)
        with ThreadPoolExecutor(self.args.jobs) as pool:
            futures = [pool.submit(self.one, attention, seed) for seed, attention in runs]
            try:
                for future in as_completed(futures):
                    if isinstance(error := future.exception(), StepFailed):
                        failures.append(str(error))
                        print(f"error: {error}", file=sys.stderr)
                    else:
                        future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.steps.stop()
                raise
        return failures

    def report(self) -> None:
        metrics = {task: config.checkpoint.best_checkpoint_metric for task, config in self.tasks.items()}
        rows = read_rows(self.out, self.args.attentions, self.args.seeds, metrics)
        text = table(rows, self.args.seeds)
        (self.out / "comparison.txt").write_text(text + "\n")
        print(f"\n{text}\n\nplot: {draw(self.out / 'comparison.png', rows)}")


def configuration(stage: str, overrides: list[str]) -> Any:
    """What Hydra makes of a stage's YAML and overrides. Raises: InputError for overrides that it does not know."""
    lln_fairseq.register()  # before all that imports fairseq, which would talk
    from fairseq.dataclass.initialize import hydra_init

    hydra_init(stage)  # the schema that fairseq checks against
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about 1.1: what fairseq's command line composes with
            with initialize_config_dir(str(CONFIGS), version_base="1.1"):
                return compose(stage, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(" ".join(str(error).split("\n\n")[0].split())) from None


def environment(slot: int, jobs: int) -> dict[str, str]:
    """Each of several runs at a time has its share of the cores, and its own GPU where there is more than one."""
    if jobs == 1:
        return {}
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))}
    if (count := torch.cuda.device_count()) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % count]
    return variables


def labelled_splits(data: Path) -> list[str]:
    """GLUE's test sets have no labels; the demo's has. Labels are binarised, scores of a regression are text."""
    files = {path.name for path in (data / "label").glob("*")}
    return [split for split in ("valid", "valid1", "test") if {f"{split}.idx", f"{split}.label"} & files]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("scripts/compare_attentions.sh", __doc__)
    parser.add_argument("--attentions", default=DEFAULT_ATTENTIONS, metavar="NAME[:OPTION=VALUE,...],...",
                        help="default: %(default)s")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    parser.add_argument("--updates", type=at_least_one, help="of a pre-training (default: those of the corpus)")
    parser.add_argument("--finetune-updates", type=at_least_one, help="of a fine-tuning (default: those of the task)")
    parser.add_argument(
        "--jobs", type=at_least_one, default=1, help="runs at a time; small models on a CPU: one for each core"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="default: %(default)s")
    parser.add_argument("--data", default="data-bin/demo", help="where the demo data is or will be (%(default)s)")
    parser.add_argument("--archive", help="the demo's source archive, for machines without a network")
    args, rest = parser.parse_known_args(argv)
    if unknown := [word for word in rest if word.startswith("-") or "=" not in word]:
        parser.error(f"neither an option nor a Hydra override: {' '.join(unknown)}")
    # A name or a seed that is given twice is one run.
    rows = re.split(r",(?!\w+=)", args.attentions)  # a comma before an option belongs to the row
    args.attentions = list(dict.fromkeys(rows))
    args.seeds = list(dict.fromkeys(args.seeds))
    args.overrides = rest
    for row in args.attentions:
        try:
            check_attention_spec(row)
        except ValueError as error:
            parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_main(lambda: compare(args), "\ninterrupted; the same command goes on from here")


def compare(args: argparse.Namespace) -> int:
    """The exit code: 1 where a run failed, else 0."""
    comparison = Comparison(args)
    failures = comparison.all()
    comparison.report()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
