"""Pre-train and fine-tune several attentions with the same data, budget and seeds. Write a table, a plot and JSON.

    scripts/compare_attentions.sh --attentions softmax,lln_diag,nystrom --seeds 1 2
    scripts/compare_attentions.sh --attentions softmax,lln_diag corpus=wikitext103 glue=sst2,qnli model=base run=gpu1
    scripts/compare_attentions.sh --attentions lln_diag,lln_diag:mix=joint_offset,block_size=32

Hydra overrides apply to pre-training and fine-tuning. The prefix `pretrain:` or `finetune:` limits an override to one
of them, as in pretrain:dataset.batch_size=32. corpus= names the pre-training data, and glue= names one or more tasks.
With glue=none, nothing is fine-tuned. The default is model=nano and the demo data, which is built if necessary.
Run an interrupted command again to continue it. To train several models at a time, start this program several times
with other --attentions or --seeds and the same --out, and at the end once with all of them, for the whole table.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from lln_fairseq.analysis.events import Curve, read_curves
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.provenance import describe_provenance, write_result
from lln_fairseq.terminal import at_least_one, program_parser, text_table
from lln_fairseq.training.recipes import format_override
from scripts.benchmarks.meter import model_argument, split_specs
from scripts.tables import mean_and_range
from scripts.train_tasks import (
    attention_overrides,
    call_logged,
    compose_config,
    prepare_demo_data,
    run_override,
    score,
    seed_list,
    train_words,
)

DEMO = "demo"
DEFAULT_ATTENTIONS = "softmax,lln,lln_diag,elu,performer,nystrom"
STARTS = "provenance.json"  # in the directory of a run: the provenance of every start that differs from the one before


class Overrides:
    """The corpus, the tasks and the Hydra overrides that the command line selects for all runs.

    Attributes:
        corpus: the value of corpus=.
        tasks: the values of glue=, empty for glue=none.
        pretrain: overrides of all pre-training runs.
        finetune: overrides of all fine-tuning runs.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.corpus = DEMO
        self.tasks = [DEMO]
        self.pretrain: list[str] = []
        self.finetune: list[str] = []
        groups = {override.partition("=")[0].replace("+", "") for override in args.overrides}
        options = (("attention", "--attentions"), ("model.attention", "--attentions"), ("common.seed", "--seeds"))
        for key, option in options:
            if groups & {key, f"pretrain:{key}", f"finetune:{key}"}:
                raise UserError(f"use {option} instead of {key}=, which would be the same for all runs")
        for key in ("corpus", "glue"):
            if groups & {f"pretrain:{key}", f"finetune:{key}"}:
                raise UserError(f"leave out the prefix of {key}=, which only one of the two stages has")
        # Of several values, the last one counts.
        for override in ["model=nano", run_override(), *args.overrides]:
            stage, _, stage_override = override.partition(":")
            group, _, value = override.partition("=")
            if stage == "pretrain":
                self.pretrain.append(stage_override)
            elif stage == "finetune":
                self.finetune.append(stage_override)
            elif group == "corpus":
                self.corpus = value
            elif group == "glue":
                self.tasks = [] if value == "none" else value.split(",")
            else:
                self.pretrain.append(override)
                self.finetune.append(override)
        if self.corpus != DEMO and DEMO in self.tasks:
            raise UserError(
                f"corpus={self.corpus} has another tokenizer than the demo's task: give glue=, such as glue=none"
            )
        if args.updates:
            self.pretrain.append(f"optimization.max_update={args.updates}")
        if args.finetune_updates:
            self.finetune.append(f"optimization.max_update={args.finetune_updates}")
            self.finetune.append(f"lr_scheduler.total_num_update={args.finetune_updates}")
        if self.corpus == DEMO:
            self.pretrain.insert(0, format_override("task.data", f"{args.data}/lm"))

    def for_pretraining(self, attention: str, seed: int) -> list[str]:
        """Return all overrides of one pre-training run; `attention` is an attention spec."""
        return [f"corpus={self.corpus}", *attention_overrides(attention), f"common.seed={seed}", *self.pretrain]

    def for_finetuning(self, attention: str, seed: int, task: str, data: str) -> list[str]:
        """Return all overrides of one fine-tuning run. `data` is the directory of the demo data."""
        overrides = [f"glue={task}", *attention_overrides(attention), f"common.seed={seed}"]
        if task == DEMO:
            overrides.append(format_override("task.data", f"{data}/sentiment"))
        return overrides + self.finetune


def run_directory(out: Path, attention: str, seed: int) -> Path:
    """Return OUT/ATTENTION/seedN, with one "-" for adjacent characters that are no letters, digits or "_"."""
    return out / re.sub(r"\W+", "-", attention) / f"seed{seed}"


def run_attention(
    args: argparse.Namespace, overrides: Overrides, recipes: dict[str, Any], attention: str, seed: int
) -> None:
    """Pre-train an attention with one seed, then fine-tune and evaluate it on every task.

    `recipes` are the composed recipes of "pretrain" and of each task, for their numbers of updates and their data.
    Every training is started; a finished one ends at once. The logs are in logs/ of the `run_directory`.
    """
    directory = run_directory(args.out, attention, seed)

    def step(name: str, words: Sequence[str], updates: int | None = None) -> None:
        log = directory / "logs" / f"{name.replace(' ', '_')}.log"
        call_logged(f"{name}: {attention}, seed {seed}", words, log, updates)

    check_budget(directory, recipes["pretrain"].optimization.max_update)
    record_start(directory)
    pretrain_words = train_words("pretrain", directory, overrides.for_pretraining(attention, seed))
    step("pre-train", pretrain_words, recipes["pretrain"].optimization.max_update)
    start = format_override("checkpoint.finetune_from_model", directory / "checkpoint_best.pt")
    for task in overrides.tasks:
        config = recipes[task]
        updates = config.optimization.get("max_update") or config.lr_scheduler.total_num_update
        task_directory = directory / "glue" / task
        check_budget(task_directory, updates)
        task_overrides = overrides.for_finetuning(attention, seed, task, args.data)
        step(f"fine-tune on {task}", train_words("finetune", task_directory, [start, *task_overrides]), updates)
        score(task_directory, labeled_splits(Path(config.task.data)), partial(step, f"evaluate on {task}"))


def record_start(directory: Path) -> None:
    """Add this program's provenance to STARTS in the directory of a run, unless the last entry is the same."""
    starts = read_starts(directory)
    provenance = describe_provenance()
    if starts[-1:] != [provenance]:
        write_bytes(directory / STARTS, json.dumps([*starts, provenance], indent=1).encode())


def read_starts(directory: Path) -> list[dict[str, Any]]:
    file = directory / STARTS
    return json.loads(file.read_text()) if file.exists() else []


def check_budget(directory: Path, updates: int) -> None:
    """Raise UserError if a directory has a run with another number of updates, which would be continued or not run."""
    config = directory / "config.yaml"
    if not config.exists():
        return
    stored = OmegaConf.load(config)
    previous = stored.optimization.get("max_update") or stored.lr_scheduler.total_num_update
    if previous != updates:
        raise UserError(f"{directory} has a run of {previous} updates, not {updates}: give another --out")


def labeled_splits(data: Path) -> list[str]:
    """Return which of valid, valid1 and test have labels in the directory of a task. GLUE's test sets have none."""
    label_files = {path.name for path in (data / "label").glob("*")}
    return [split for split in ("valid", "valid1", "test") if label_files & {f"{split}.idx", f"{split}.label"}]


def compare_attentions(args: argparse.Namespace) -> int:
    """Run a comparison, print the table, and write OUT/comparison.txt, comparison.json and comparison.png.

    A run that fails does not stop the others, and is not in the results. If all runs fail, nothing is written. Returns
    the exit code: 1 if a run failed, otherwise 0.
    """
    overrides = Overrides(args)
    # All recipes are composed first, so that wrong overrides are reported at once.
    attention = args.attentions[0]
    recipes = {"pretrain": compose_config("pretrain", overrides.for_pretraining(attention, 1))}
    for task in overrides.tasks:
        recipes[task] = compose_config("finetune", overrides.for_finetuning(attention, 1, task, args.data))
    if any(str(config.task.data).startswith(args.data) for config in recipes.values()):
        prepare_demo_data(args.data, args.archive)
    code = 0
    finished: dict[str, list[int]] = {attention: [] for attention in args.attentions}
    for seed in args.seeds:
        for attention in args.attentions:
            try:
                run_attention(args, overrides, recipes, attention, seed)
                finished[attention].append(seed)
            except UserError as error:
                code = 1
                print(f"error: {error}", file=sys.stderr)
    if not any(finished.values()):
        return code
    metrics = {task: recipes[task].checkpoint.best_checkpoint_metric for task in overrides.tasks}
    results = read_results(args.out, finished, metrics)
    table = comparison_table(results, args.seeds)
    (args.out / "comparison.txt").write_text(table + "\n")
    content = {"overrides": args.overrides, "runs": list_runs(results)}
    write_result(args.out / "comparison.json", content, describe_provenance())
    plot_losses(args.out / "comparison.png", results)
    print(f"\n{table}\n\nplot: {args.out / 'comparison.png'}")
    return code


@dataclass
class AttentionResults:
    """The results of one attention. Seeds without results are missing in the dicts.

    A column is a column of the table: a task and a split, such as "sst2 valid".

    Attributes:
        attention: the attention spec.
        train: the curve of the training loss in pre-training, in bits per masked token, by seed.
        valid: the same of the validation loss.
        scores: the fine-tuning scores in percent, by column and then by seed.
        majority: the accuracy in percent of always predicting the most frequent class, by column.
        starts: see STARTS, by seed.
    """

    attention: str
    train: dict[int, Curve] = field(default_factory=dict)
    valid: dict[int, Curve] = field(default_factory=dict)
    scores: dict[str, dict[int, float]] = field(default_factory=dict)
    majority: dict[str, float] = field(default_factory=dict)
    starts: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def losses_above(self, baseline: "AttentionResults") -> list[float]:
        """Return how much higher the last validation loss is than the baseline's, for every seed that both have.

        Runs with the same seed see the same text in the same order, so these differences can show effects that are
        smaller than the differences between seeds. A seed whose last validations were at different updates is left out.
        """
        differences = []
        for seed, curve in self.valid.items():
            baseline_curve = baseline.valid.get(seed)
            if baseline_curve is not None and curve.steps[-1] == baseline_curve.steps[-1]:
                differences.append(curve.values[-1] - baseline_curve.values[-1])
        return differences


def read_results(out: Path, seeds: Mapping[str, Sequence[int]], metrics: dict[str, str]) -> list[AttentionResults]:
    """Read the results of the `seeds` of each attention from the directories of `run_directory`, an entry for each.

    The losses are read from tensorboard/, and the scores from glue/TASK/SPLIT.json, whose column is "TASK SPLIT". What
    is missing is left out. `metrics` has the metric of each task. "pearson_spearman" is not in the files: it is the
    mean of both.
    """
    results = []
    for attention, own_seeds in seeds.items():
        result = AttentionResults(attention)
        for seed in own_seeds:
            directory = run_directory(out, attention, seed)
            result.starts[seed] = read_starts(directory)
            curves = read_curves(directory / "tensorboard")
            if "train_inner/loss" in curves:
                result.train[seed] = curves["train_inner/loss"]
            if "valid/loss" in curves:
                result.valid[seed] = curves["valid/loss"]
            for task, metric in metrics.items():
                for file in sorted((directory / "glue" / task).glob("*.json"), reverse=True):  # valid before test
                    values = json.loads(file.read_text())
                    column = f"{task} {file.stem}"
                    value = statistics.fmean(values[name] for name in metric.split("_"))
                    result.scores.setdefault(column, {})[seed] = 100 * value
                    if metric == "accuracy":
                        result.majority[column] = 100 * values["majority"]
        results.append(result)
    return results


def comparison_table(results: Sequence[AttentionResults], seeds: Sequence[int]) -> str:
    """Return a table with a row per attention and one of the majority class, and a line that explains it.

    The first attention is the baseline. The last column is the number of seeds that have all results.
    """
    baseline = results[0]
    columns: dict[str, None] = {}
    majority: dict[str, float] = {}
    for result in results:
        columns.update(dict.fromkeys(result.scores))
        majority |= result.majority
    titles = [f"{column} [%]" for column in columns]
    lines = [["attention", "valid loss [bits]", f"above {baseline.attention}", *titles, "seeds"]]
    for result in results:
        loss = mean_and_range([curve.values[-1] for curve in result.valid.values()], 2) or "-"
        above = ""
        if result is not baseline:
            above = mean_and_range(result.losses_above(baseline), 3, "+") or "-"
        finished_seeds = set(result.valid)
        scores = []
        for column in columns:
            score_by_seed = result.scores.get(column, {})
            finished_seeds &= set(score_by_seed)
            scores.append(mean_and_range(list(score_by_seed.values())) or "-")
        lines.append([result.attention, loss, above, *scores, str(len(finished_seeds))])
    if majority:
        cells = [f"{majority[column]:.1f}" if column in majority else "-" for column in columns]
        lines.append(["(majority class)", "-", "", *cells, ""])
    note = (
        f"mean (lowest–highest) over the seeds {', '.join(map(str, seeds))}; valid loss: the last one of "
        f"pre-training; above {baseline.attention}: its difference from {baseline.attention} with the same seed"
    )
    return f"{text_table(lines)}\n{note}"


def list_runs(results: Sequence[AttentionResults]) -> list[dict[str, Any]]:
    """Return an entry per validated run.

    "bits" has the validation losses at its "updates", "scores" are in percent, and "starts" is explained at STARTS.
    """
    runs = []
    for result in results:
        for seed, curve in result.valid.items():
            scores = {column: round(by_seed[seed], 2) for column, by_seed in result.scores.items() if seed in by_seed}
            run = {
                "attention": result.attention,
                "seed": seed,
                "updates": curve.steps,
                "bits": [round(bits, 4) for bits in curve.values],
                "scores": scores,
                "starts": result.starts[seed],
            }
            runs.append(run)
    return runs


def plot_losses(path: Path, results: Sequence[AttentionResults]) -> None:
    figure = Figure(figsize=(6.5, 5), layout="tight")
    axes = figure.subplots()
    for number, result in enumerate(results):
        color = f"C{number}"
        _plot_curves(axes, result.train, "-", color=color, linewidth=0.6, alpha=0.6)
        marker_size = max(9 - 1.5 * number, 3)  # later curves have smaller markers, because curves often coincide
        _plot_curves(
            axes, result.valid, "o-", color=color, linewidth=1.8, markersize=marker_size, label=result.attention
        )
    title = "loss in training (thin) and validation (points), range over seeds"
    axes.set(xlabel="update", ylabel="loss [bits per masked token]", title=title)
    axes.legend(title="last validation")
    figure.savefig(path, dpi=120)


def _plot_curves(axes: Axes, curves: dict[int, Curve], style: str, color: str, label: str = "", **options: Any) -> None:
    """Plot the mean and the range of the curves of all seeds at the updates that all of them have.

    The legend has the label, if it is not empty, with the mean at the last update.
    """
    losses_by_seed = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves.values()]
    if not losses_by_seed:
        return
    steps = sorted(set.intersection(*map(set, losses_by_seed)))
    losses = [[losses[step] for losses in losses_by_seed] for step in steps]
    means = list(map(statistics.fmean, losses))
    lowest = list(map(min, losses))
    highest = list(map(max, losses))
    if label and means:
        label = f"{label}: {means[-1]:.3f}"
    axes.plot(steps, means, style, color=color, label=label, **options)
    axes.fill_between(steps, lowest, highest, color=color, alpha=0.15, linewidth=0)
    if len(steps) == 1:  # a filled range has no width
        axes.vlines(steps, lowest, highest, color=color)


def models_argument(text: str) -> list[str]:
    return [model_argument(spec) for spec in split_specs(text)]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. `overrides` becomes the list of all Hydra overrides, also of those after --seeds."""
    parser = program_parser("scripts/compare_attentions.sh", __doc__)
    parser.add_argument(
        "--attentions",
        type=models_argument,
        default=DEFAULT_ATTENTIONS,
        metavar="NAME[:OPTION=VALUE,...],...",
        help="attentions to compare, or layouts; the first one is the baseline (default: %(default)s)",
    )
    parser.add_argument("--seeds", nargs="+", default=["1", "2"], help="seeds of every attention (default: 1 2)")
    parser.add_argument("--updates", type=at_least_one, help="updates of pre-training (default: the corpus decides)")
    parser.add_argument("--finetune-updates", type=at_least_one, help="updates of fine-tuning (default: the task's)")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="directory (default: %(default)s)")
    parser.add_argument("--data", default="data-bin/demo", help="the demo data, made if needed (default: %(default)s)")
    parser.add_argument("--archive", help="source archive of the demo data, for machines without internet access")
    args, overrides = parser.parse_known_args(argv)
    overrides += [word for word in args.seeds if "=" in word]  # argparse takes all words behind --seeds
    try:
        args.seeds = list(dict.fromkeys(seed_list(" ".join(word for word in args.seeds if "=" not in word))))
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --seeds: {error}")
    unknown = [word for word in overrides if word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"neither an option nor a Hydra override: {' '.join(unknown)}")
    args.overrides = overrides
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_main(partial(compare_attentions, args), "\ninterrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
