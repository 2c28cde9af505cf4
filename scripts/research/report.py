"""Write the tables and the picture of the units whose results exist."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from lln_fairseq.errors import UserError
from scripts.research.conversion import LONG_STAGES
from scripts.research.fine_tuning import TRAINED
from scripts.research.summaries import markdown, mean_and_range, read_results, save, select
from scripts.research.units import (
    CONVERSION,
    CONVERTED,
    FINE_TUNED,
    FINE_TUNING,
    FLOOR,
    LONG_TASKS,
    PRETRAINED,
    PRETRAINING,
    SHORT_TASKS,
    SOFTMAX,
    TASKS,
    TF_IDF,
)

# The names of the converted attentions, in the order of the tables.
LABELS = {
    "joint_offset_global": "LLN+Diag, joint, first text global",
    "joint_offset": "LLN+Diag, joint",
    "lln_diag": "LLN+Diag, average (the paper's)",
    "block_diag": "blocks only",
    "window": "window of 16 (own and both neighboring blocks)",
    "lln": "LLN only",
    "hedgehog_blocks": "Hedgehog averaged with blocks",
    "hedgehog": "Hedgehog",
    "t2r_blocks": "T2R averaged with blocks",
    "t2r": "T2R",
    "performer": "Performer",
    "elu": "ELU",
    "cosformer": "cosFormer",
    "linformer": "Linformer",
    "nystrom": "Nyströmformer",
    "longformer": "Longformer",
    "reformer": "Reformer",
    "flash": "FLASH",
    "tnn": "TNN",
}
FLOOR_LABEL = "TF-IDF and logistic regression"
CONTROL_LABEL = "blocks only, first text global"  # the part "Diag only" of joint_offset_global
CONTROL_SPEC = "block_diag:block_size=32,global_tokens=first_segment"
LABELS_OF_FINE_TUNED = {
    **LABELS,
    SOFTMAX: "softmax",
    "block_diag_global": CONTROL_LABEL,
    "window_global": "window of 48, first text global",
}
CONVERSION_TIMES = Path("times/conversion.json")  # written by scripts.benchmarks.prediction, as the next one
FINE_TUNING_TIMES = Path("times/fine_tuning.json")
PRESET = "minilm"
SAME_AS_SOFTMAX = 0.0005  # the relative error of the transfer below which `conversion_cell` marks softmax's outputs


def write_report(results: Path) -> None:
    """Print the tables, and write them to table1.md and the picture to pretraining.png in the directory `results`.

    If there are no results, UserError is raised.
    """
    conversions = read_results(results / CONVERSION)
    pretrainings = read_results(results / PRETRAINING)
    floors = read_results(results / FLOOR)
    fine_tunings = read_results(results / FINE_TUNING)
    short = [result for result in conversions if result["task"] in SHORT_TASKS]
    if not conversions and not fine_tunings and not pretrainings:
        raise UserError(f"{results} has no results: run `python -m scripts.research.table1 all --work DIRECTORY` first")
    sections = []
    if short:
        sections.append(conversion_table(short, floors, read_times(results / CONVERSION_TIMES)))
    times = read_times(results / FINE_TUNING_TIMES)
    for task in select_tasks(LONG_TASKS, [*fine_tunings, *conversions]):
        trained = select(fine_tunings, task=task)
        converted = select(conversions, task=task)
        sections.append(long_pairs_table(task, trained, converted, times, select(floors, task=task)))
    for interval in dict.fromkeys(result["updates"][0] for result in pretrainings):
        sections.append(pretraining_table([result for result in pretrainings if result["updates"][0] == interval]))
    if pretrainings:
        draw_pretraining(pretrainings, results / "pretraining.png")
    text = "\n\n".join(sections) + "\n"
    (results / "table1.md").write_text(text, encoding="utf-8")
    print(text, end="")


def select_tasks(tasks: Iterable[str], results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tasks that have a result."""
    return [task for task in tasks if select(results, task=task)]


def accuracies(results: Sequence[dict[str, Any]], stage: str, split: str = "all") -> list[float]:
    """Return an accuracy in percent for each result that has this stage.

    The split "all" has the rows of valid and test together. No setting was chosen on those of "test".
    """
    return [100 * result["scores"][stage][split] for result in results if stage in result["scores"]]


def conversion_table(
    results: list[dict[str, Any]], floors: list[dict[str, Any]], times: dict[str, dict[str, float]]
) -> str:
    """Return the table of accuracies: swapped in, and linearized, for each task. The last row is the floor.

    The last columns have the share of softmax's time.
    """
    tasks = select_tasks(SHORT_TASKS, results)
    titles = ["accuracy [%]: swapped in → linearized"]
    softmax = [SOFTMAX]
    for task in tasks:
        titles.append(task_title(task, select(results, task=task)))
        softmax.append(mean_and_range(accuracies(one_per_seed(select(results, task=task)), SOFTMAX)))
    titles += [f"time / softmax's, {length} tokens" for length in times]
    softmax += ["1" for _ in times]
    rows = [titles, softmax]
    notes = []
    for attention, label in LABELS.items():
        cells = [conversion_cell(select(results, task=task, attention=attention)) for task in tasks]
        if any(cells):
            rows.append([label, *cells, *time_shares(times, CONVERTED[attention])])
        for result in select(results, attention=attention):
            if "refused" in result:
                notes.append(f"- {label}: {result['refused']}")
        if attention == "joint_offset_global" and any(cells):
            parts = [select(results, task=task, attention=attention) for task in tasks]
            cells = [mean_and_range(accuracies(part, "Diag only")) for part in parts]
            rows.append([CONTROL_LABEL, *cells, *time_shares(times, CONTROL_SPEC)])
    floor_cells = [mean_and_range(accuracies(select(floors, task=task), TF_IDF)) for task in tasks]
    if any(floor_cells):
        rows.append([FLOOR_LABEL, *floor_cells, *("" for _ in times)])
    if any(cell.endswith("=") for row in rows for cell in row):
        notes.append("- =: the outputs are those of softmax (relative error 0) at the length of this task")
    if any(row[0] == CONTROL_LABEL for row in rows):
        notes.append(f"- {CONTROL_LABEL}: the row above it without LLN; nothing of it can be trained")
    return "\n\n".join([markdown(rows), "\n".join(notes)]).strip()


def task_title(task: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the name of a task and the mean number of tokens of its rows: "QNLI among 16, 564 tokens"."""
    name = TASKS[task].glue
    if TASKS[task].sentences > 1:
        name += f" among {TASKS[task].sentences}"
    return f"{name}, {results[0]['mean_tokens']} tokens"


def one_per_seed(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a result for each seed to read the scores of the softmax model from: that of softmax itself, if any.

    Every result has these scores, but those of another machine can differ.
    """
    ordered = sorted(results, key=lambda result: result["attention"] == SOFTMAX)
    return list({result["seed"]: result for result in ordered}.values())


def conversion_cell(results: Sequence[dict[str, Any]]) -> str:
    """Return "swapped → linearized" for the seeds of one attention and task, or "" if there is no score."""
    if not accuracies(results, "linearized"):
        return ""
    swapped = statistics.fmean(accuracies(results, "swapped"))
    cell = f"{swapped:.1f} → {mean_and_range(accuracies(results, 'linearized'))}"
    errors = [result.get("relative_error") for result in results]
    if all(error is not None and error < SAME_AS_SOFTMAX for error in errors):
        cell += " ="
    return cell


def read_times(path: Path) -> dict[str, dict[str, float]]:
    """Return {length: {attention spec: milliseconds of a text}}, or {} if they were not measured."""
    if not path.exists():
        return {}
    return json.loads(path.read_text())["milliseconds"][PRESET]


def time_shares(times: dict[str, dict[str, float]], spec: str) -> list[str]:
    """Return the time of an attention divided by softmax's at each length, or "" where it was not measured."""
    shares = []
    for milliseconds in times.values():
        shares.append(f"{milliseconds[spec] / milliseconds[SOFTMAX]:.2f}" if spec in milliseconds else "")
    return shares


def long_pairs_table(
    task: str,
    results: list[dict[str, Any]],
    conversions: list[dict[str, Any]],
    times: dict[str, dict[str, float]],
    floors: list[dict[str, Any]],
) -> str:
    """Return the table of the attentions of a long task: `conversions` without its labels, `results` with them.

    Accuracies are those on test. The last columns have the time of a text, and its share of softmax's time.
    """
    titles = [f"accuracy [%], {task_title(task, [*results, *conversions])}", *LONG_STAGES, "labels"]
    titles += [f"ms, {length} tokens" for length in times]
    rows = [titles]
    for attention, spec in FINE_TUNED.items():
        converted = select(conversions, spec=spec)
        trained = select(results, attention=attention)
        cells = [mean_and_range(accuracies(converted, stage, "test")) for stage in LONG_STAGES]
        cells.append(mean_and_range(accuracies(trained, TRAINED, "test")))
        if not any(cells):
            continue
        for milliseconds, share in zip(times.values(), time_shares(times, spec), strict=True):
            cells.append(f"{milliseconds[spec]} ({share})" if share else "")
        rows.append([LABELS_OF_FINE_TUNED[attention], *cells])
    for accuracy in accuracies(floors, TF_IDF, "test"):
        rows.append([FLOOR_LABEL, *("" for _ in LONG_STAGES), f"{accuracy:.1f}", *("" for _ in times)])
    return markdown(rows)


def pretraining_table(results: list[dict[str, Any]]) -> str:
    """Return the table of the bits per masked token at every validation.

    The results must have been validated at the same intervals. A cell is empty if no seed got that far.
    """
    updates = max((result["updates"] for result in results), key=len)
    millions = [f"{update * results[0]['tokens_per_update'] / 1e6:.1f}" for update in updates]
    rows = [["bits after million tokens", *millions]]
    for attention in PRETRAINED:
        chosen = select(results, attention=attention)
        if not chosen:
            continue
        cells = []
        for index in range(len(updates)):
            cells.append(mean_and_range([result["bits"][index] for result in chosen if index < len(result["bits"])], 2))
        rows.append([attention, *cells])
    return markdown(rows)


def draw_pretraining(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the bits, and the layers' mean row entropy and spectral gap, against tokens."""
    figure, (losses, entropies, gaps) = plt.subplots(1, 3, figsize=(15, 4.5))
    for result in results:
        color = plt.colormaps["tab20"](list(PRETRAINED).index(result["attention"]))
        style = "-" if result["seed"] == 1 else ":"
        scale = result["tokens_per_update"] / 1e6
        tokens = [update * scale for update in result["updates"]]
        losses.plot(tokens, result["bits"], style, color=color, label=f"{result['attention']}, {result['seed']}")
        for name, axes in (("entropy", entropies), ("spectral_gap", gaps)):
            if name in result["probe"]:
                curves = dict(result["probe"][name])
                tokens = [update * scale for update in curves.pop("updates")]
                means = [statistics.fmean(values) for values in zip(*curves.values(), strict=True)]
                axes.plot(tokens, means, style, color=color)
    for axes in (losses, entropies, gaps):
        axes.set_xlabel("tokens [million]")
    losses.set_ylabel("held-out loss [bits per masked token]")
    entropies.set_ylabel("row entropy [bits]")
    gaps.set_ylabel("spectral gap")
    losses.legend(title="attention, seed", ncols=2, fontsize="small")
    save(figure, path)
