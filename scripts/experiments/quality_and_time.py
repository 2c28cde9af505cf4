"""Plot the accuracy of linear classifiers against the time that they take for one text.

    python -m scripts.experiments.quality_and_time runs/quality_and_time --teacher runs/qnli_seed1/checkpoint_best.pt \\
        --results 256=runs/linear_qnli4 1024=runs/linear_qnli16

--results takes output directories of scripts.experiments.linear_classifiers. The number before a directory is the
length in tokens of the pair of texts that is timed. The first text of the pair has 16 tokens. For each directory, the
program prints a table and draws a panel with one entry per variant. An entry has the mean test accuracy over the
teachers, and the time that the model of the first teacher takes for the pair. The models are timed in turn, repeat by
repeat, and the times are medians.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lln_fairseq
from lln_fairseq.command import run_main
from lln_fairseq.data.special_symbols import NUM_SPECIAL
from lln_fairseq.errors import InputError
from scripts.benchmarks.meter import interleaved
from scripts.experiments.linear_classifiers import SPLIT, VARIANTS
from scripts.figures.sheet import Panel, Sheet
from scripts.terminal import aligned, at_least_one, program_parser

FIRST_TEXT = 16  # tokens of the first text of the timed pair, <s> and </s> included
SOFTMAX = "softmax"


def mean_accuracy(results: Sequence[Path]) -> float:
    """Return the mean accuracy in percent of at least one result file of `lln-fairseq evaluate --json`."""
    return 100 * statistics.mean(json.loads(path.read_text())["accuracy"] for path in results)


def find_results(directory: Path) -> dict[str, list[Path]]:
    """Return the result files in an output directory of linear_classifiers, one file for each teacher.

    The key is "softmax" for the results of the teachers, and the name of the variant for the results of a variant.
    Variants without results are left out.

    Raises:
        InputError: if the teachers have no results, or no variant has any.
    """
    results = {SOFTMAX: sorted(directory.glob("teacher*.json"))}
    for variant in VARIANTS:
        folder = variant.replace(", ", "_").replace(" ", "_")
        results[variant] = sorted(directory.glob(f"{folder}_teacher_*/{SPLIT}.json"))
    found = {name: files for name, files in results.items() if files}
    if SOFTMAX not in found or len(found) == 1:
        raise InputError(f"{directory} has no results of scripts.experiments.linear_classifiers")
    return found


def pair_of_texts(tokens: int, task: Any) -> Tensor:
    """Return the token ids of a random pair of texts, which is the same in every call.

    The pair has the form <s> A </s></s> B </s>, and <s> A </s> has FIRST_TEXT tokens.

    Returns:
        Token ids, int64 (1, tokens).
    """
    dictionary = task.source_dictionary
    ids = torch.randint(NUM_SPECIAL, len(dictionary) - 1, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = dictionary.bos()
    ids[0, FIRST_TEXT - 1 : FIRST_TEXT + 1] = dictionary.eos()
    ids[0, -1] = dictionary.eos()
    return ids


def classification(checkpoint: Path, tokens: int) -> Callable[[], object]:
    """Load a classifier. Return a function that classifies one random pair of texts with it on the CPU.

    The pair has `tokens` tokens in total. No gradients are computed.
    """
    from lln_fairseq.inference.evaluate import load_finetuned_model

    model, task = load_finetuned_model(str(checkpoint))
    model = model.cpu()
    ids = pair_of_texts(tokens, task)
    classify = partial(model, ids, features_only=True, classification_head_name=task.cfg.classification_head_name)
    return torch.inference_mode()(classify)


def measure(directory: Path, teacher: Path, tokens: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the time in ms and the accuracy in percent of softmax and of every variant in `directory`, by name.

    Args:
        directory: an output directory of linear_classifiers.
        teacher: the softmax checkpoint to time.
        tokens: the length of the pair of texts that is timed.
        repeats: number of timed repeats.
    """
    results = find_results(directory)
    runs = {SOFTMAX: classification(teacher, tokens)}
    for name in results:
        if name != SOFTMAX:
            runs[name] = classification(results[name][0].parent / "model.pt", tokens)
    times = interleaved(runs, "cpu", repeats)
    return {name: (statistics.median(times[name]), mean_accuracy(results[name])) for name in results}


def plot(points: dict[int, dict[str, tuple[float, float]]], path: Path) -> None:
    """Draw a panel for each length with a point for each model, and write the figure and its data.

    Args:
        points: for each length in tokens, the time in ms and the accuracy in percent of each model by its name.
        path: the file to write. Its suffix is replaced by .png and by .csv.
    """
    panels = [Panel(f"{tokens} tokens", "time of one pair of texts [ms]", "test accuracy [%]") for tokens in points]
    sheet = Sheet(panels, size=(6.4, 4.8))
    for panel, models in enumerate(points.values()):
        for number, (name, (milliseconds, accuracy)) in enumerate(models.items()):
            marker = "k*" if name == SOFTMAX else f"C{number % 10}{'os^D'[number // 10]}"
            sheet.line(panel, name, [milliseconds], [accuracy], marker, markersize=8)
        slowest = max(milliseconds for milliseconds, _ in models.values())
        sheet.axes[panel].set_xlim(0, 1.05 * slowest)
        sheet.legend(panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def run_experiment(args: argparse.Namespace) -> None:
    """Measure, print and plot all models."""
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    points = {}
    for tokens, directory in args.results:
        points[tokens] = measure(directory, args.teacher, tokens, args.repeats)
        rows = [[f"{tokens} tokens", "ms", f"{SPLIT} accuracy [%]"]]
        for name, (milliseconds, accuracy) in points[tokens].items():
            rows.append([name, f"{milliseconds:.0f}", f"{accuracy:.1f}"])
        print(aligned(rows), end="\n\n", flush=True)
    plot(points, args.out)
    print(f"plot: {args.out.with_suffix('.png')}")


def length_and_directory(text: str) -> tuple[int, Path]:
    """Return the length and the directory in an argument TOKENS=DIR.

    Use this function as the `type` of an argparse argument. It raises ArgumentTypeError for a text of another form, or
    if TOKENS is not greater than FIRST_TEXT.
    """
    tokens, separator, directory = text.partition("=")
    if not separator or not tokens.isdigit() or int(tokens) <= FIRST_TEXT:
        raise argparse.ArgumentTypeError(f"must be TOKENS=DIR with more than {FIRST_TEXT} tokens, got '{text}'")
    return int(tokens), Path(directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = program_parser("python -m scripts.experiments.quality_and_time", __doc__)
    parser.add_argument("out", type=Path, help="name of the figure without .png, and of its numbers without .csv")
    parser.add_argument("--teacher", type=Path, required=True, help="a fine-tuned softmax checkpoint to time")
    parser.add_argument(
        "--results", type=length_and_directory, nargs="+", required=True, metavar="TOKENS=DIR", help="see above"
    )
    parser.add_argument("--repeats", type=at_least_one, default=15, help="timed calls of each model (%(default)s)")
    args = parser.parse_args(argv)
    return run_main(lambda: run_experiment(args), "")


if __name__ == "__main__":
    sys.exit(main())
