"""Write what a search found: report.md, report.json, report.png and rows.tsv."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln_fairseq.files import write_bytes
from lln_fairseq.provenance import describe_provenance, format_result
from lln_fairseq.speedup.original import Original
from lln_fairseq.speedup.quality import Cosine, rows_needed
from lln_fairseq.speedup.runtimes import BFLOAT16, ONNX_FILES, ONNX_INT8
from lln_fairseq.speedup.search import Entry, Search

JSON = "report.json"
MODEL = "model"  # the directory of the choice in OUT
ONNX_CODE = """import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{directory}")
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = {threads}
model = onnxruntime.InferenceSession("{file}", options)
outputs = model.run(None, dict(tokenizer({texts}, truncation=True, return_tensors="np")))"""


def summarize(search: Search, entry: Entry | None, final: dict[str, Any] | None, chosen: bool) -> str:
    """Return the last line: what was chosen, how fast and how good it is; or what came nearest and why it is a no."""
    tokens = f"texts of {np.median(search.original.lengths):.0f} tokens"
    if entry is None or final is None:
        return f"no: nothing was both faster and good enough. {_nearest(search)}"
    before = final["milliseconds"]["original"]
    after = final["milliseconds"]["model"]
    quality = (
        f"{final['metric']} {final['original']:.1f} -> {final['score']:.1f} on {final['rows']:,} held-out "
        f"rows (change, 95 % interval: {final['score'] - final['original']:+.1f} ± {final['half_width']:.1f})"
    )
    speed = f"{final['times_as_fast']:.2f} times as fast ({before:.1f} -> {after:.1f} ms for {tokens})"
    if _has_too_few_rows(final):
        quality += ", too few rows to be sure"
    if chosen:
        return f"yes: {entry.model} in {entry.runtime} is {speed}; {quality}"
    if final["drop"] <= final["limit"]:
        return f"no: {entry.model} in {entry.runtime} is only {speed}; {quality}"
    return f"no: {entry.model} in {entry.runtime} is {speed}, but loses too much: {quality}"


def _has_too_few_rows(final: dict[str, Any]) -> bool:
    """Return True if the drop can be more or less than the limit, because the interval is wider than it."""
    half_width = final["half_width"]
    return bool(half_width > final["limit"] and abs(final["drop"] - final["limit"]) < half_width)


def _nearest(search: Search) -> str:
    """Return a sentence about the entry that came nearest."""
    scored = [entry for entry in search.entries[1:] if entry.drop is not None]
    if scored:
        best = min(scored, key=_finite_drop)
        speed = search.original.milliseconds / best.milliseconds
        return f"The nearest is {best.name}: {speed:.1f} times as fast, and it loses {best.drop:.1f} points."
    timed = search.entries[1:]
    if not timed:
        return "Nothing else could be tried."
    fastest = min(timed, key=lambda entry: entry.milliseconds)
    speed = search.original.milliseconds / fastest.milliseconds
    return f"The fastest is {fastest.name}, with {speed:.2f} times the speed."


def _finite_drop(entry: Entry) -> float:
    """Return the drop, and infinity if there is none or it is not finite."""
    if entry.drop is None or not math.isfinite(entry.drop):
        return math.inf
    return entry.drop


def caveats(search: Search, final: dict[str, Any] | None) -> list[str]:
    """Return what a reader of the numbers must know."""
    lines = list(search.notes)
    lines.append("If the model was trained with these rows, they flatter it: give rows that it has not seen.")
    if final is not None and _has_too_few_rows(final) and final["limit"] > 0:
        needed = rows_needed(final["rows"], final["half_width"], final["limit"])
        lines.append(
            f"The interval is wider than the limit of {final['limit']:g} points: it would take about {needed:,} "
            "test rows to tell such a drop from none."
        )
    return lines


def opening_code(search: Search, entry: Entry, directory: str) -> str:
    """Return Python code that opens the chosen model from a directory."""
    if entry.runtime in ONNX_FILES:
        file = f"{directory}/{ONNX_FILES[entry.runtime]}"
        is_pair = len(search.original.rows.texts[0]) == 2
        texts = '["a text"], ["its second text"]' if is_pair else '["a text"]'
        return ONNX_CODE.format(directory=directory, file=file, threads=torch.get_num_threads(), texts=texts)
    if search.original.is_encoder:
        names = "from sentence_transformers import SentenceTransformer"
        options = ", model_kwargs={'dtype': 'bfloat16'}" if entry.runtime == BFLOAT16 else ""
        call = f'SentenceTransformer("{directory}"{options})'
    else:
        names = "from transformers import AutoModelForSequenceClassification"
        options = ', dtype="bfloat16"' if entry.runtime == BFLOAT16 else ""
        call = f'AutoModelForSequenceClassification.from_pretrained("{directory}"{options})'
    return f"import lln_fairseq.hub\n{names}\n\nmodel = {call}"


def commands(search: Search, entry: Entry) -> list[str]:
    """Return the commands that do by hand what led to an entry."""
    args = search.args
    model = str(args.model)
    rows = str(args.rows or args.texts)
    lines = []
    if args.model.is_file():
        lines.append(["lln-fairseq", "export", model, "steps/stock"])
        model = "steps/stock"
    lines.append(["lln-fairseq", "convert", model, "steps/softmax", "--attention", "softmax"])
    exported = "steps/softmax/model.pt"
    trial = entry.trial
    if trial is not None:
        candidate = trial.candidate
        data = "steps/rows"
        if args.texts:
            words = ["python", "-m", "data_prep.wikitext103", "--source", "FOLDER_WITH_WIKI_TRAIN_AND_VALID_RAW"]
            lines.append([*words, "--tokenizer", "steps/softmax", "--out", data])
        else:
            words = ["python", "-m", "data_prep.tsv", "--train", rows, "--valid", rows, "--text", *args.text]
            words += ["--label", args.label or "A_COLUMN_OF_LABELS", "--tokenizer", "steps/softmax", "--out", data]
            words += ["--no-header"] if args.no_header else []
            words += ["--labels", "steps/softmax"] if search.original.teacher.labels else ["--regression"]
            lines.append([*words, *_rename_options(search.original)])
        options = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in candidate.options.items()]
        words = ["lln-fairseq", "linearize", exported, data, "steps/linear", "--attention", candidate.attention]
        steps = str(trial.steps or 0)
        words += ["--option", *options, "--steps", steps, "--distill", steps, "--seed", str(args.seed)]
        words += ["--tokens", str(search.linearizer.tokens)]
        if candidate.softmax_layers:
            words += ["--softmax-layers", candidate.softmax_layers]
        lines.append(words)
        exported = "steps/linear/model.pt"
    words = ["lln-fairseq", "export", exported, "steps/exported"]
    if entry.runtime in ONNX_FILES:
        words.append("--int8" if entry.runtime == ONNX_INT8 else "--onnx")
    lines.append(words)
    return [shlex.join(words) for words in lines]


def _rename_options(original: Original) -> list[str]:
    """Return options that name the classes of rows whose labels are their numbers."""
    names = original.teacher.labels
    options: list[str] = []
    if original.rows.labels and names and not set(original.rows.labels) <= set(names):
        for number, name in enumerate(names):
            options += ["--rename", str(number), name]
    return options


def write_reports(
    search: Search, entry: Entry | None, final: dict[str, Any] | None, chosen: bool, last_line: str
) -> None:
    """Write the four files to OUT; `entry` is what was measured on the test rows, and `chosen` if it passed."""
    out: Path = search.args.out
    if entry is not None:
        _write_rows(search, entry, out / "rows.tsv")
    lines = caveats(search, final)
    write_bytes(out / "report.md", _markdown(search, entry, chosen, lines, last_line).encode())
    _draw(search, entry if chosen else None, out / "report.png")
    lengths = search.original.lengths
    tokens = {"median": np.median(lengths), "90 %": np.quantile(lengths, 0.9), "longest": lengths.max()}
    content = {
        "chosen": entry.name if chosen and entry else None,
        "summary": last_line,
        "test": final,
        "notes": lines,
        "seed": search.args.seed,
        "rows": {split: len(numbers) for split, numbers in search.original.scored.items()},
        "tokens": {name: int(value) for name, value in tokens.items()},
        "minutes": round(search.journal.seconds() / 60, 1),
        "commands": commands(search, entry) if entry else [],
        "models": [_describe(row) for row in search.entries],
    }
    write_bytes(out / JSON, format_result(content, describe_provenance()).encode())


def _describe(entry: Entry) -> dict[str, Any]:
    trial = entry.trial
    row: dict[str, Any] = {"model": entry.model, "runtime": entry.runtime}
    row |= {"milliseconds": round(entry.milliseconds, 2), "memory_mb": entry.memory}
    row |= {"score": entry.score, "drop": entry.drop}
    if trial is not None:
        row |= {"attention": trial.candidate.attention, "options": trial.candidate.options}
        row |= {"distance": trial.distance, "steps": trial.steps, "layers": trial.layers}
    return row


def _write_rows(search: Search, entry: Entry, path: Path) -> None:
    """Write the outputs of the original and of an entry for every test row, or of encoders 100 times their cosine."""
    quality = search.original.quality("test")
    outputs = search.original.outputs_of(entry.name, search.load(entry), "test")
    numbers = search.original.scored["test"]
    if isinstance(quality, Cosine):
        lines = ["row\tcosine"]
        for number, value in zip(numbers, quality.values(outputs), strict=True):
            lines.append(f"{number + 1}\t{value:.2f}")
    else:
        lines = ["row\tlabel\toriginal\tmodel"]
        for number, before, after in zip(numbers, quality.original, outputs, strict=True):
            label = search.original.rows.labels[number] if search.original.rows.labels else ""
            lines.append(f"{number + 1}\t{label}\t{_cell(search, before)}\t{_cell(search, after)}")
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def _cell(search: Search, output: Tensor) -> str:
    if search.original.teacher.labels:
        return search.original.teacher.labels[int(output.argmax())]
    return f"{output.item():.5g}"


def _markdown(search: Search, entry: Entry | None, chosen: bool, lines: list[str], last_line: str) -> str:
    metric = search.original.quality("valid").name
    text = [f"# {search.args.model}", "", last_line, ""]
    text += [
        f"| model | runtime | ms per text | times as fast | memory, MB | {metric} | drop |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in search.entries:
        score = "" if row.score is None else f"{row.score:.1f}"
        drop = "" if row.drop is None else f"{row.drop:.1f}"
        memory = "" if row.memory is None else f"{row.memory:.0f}"
        speed = search.original.milliseconds / row.milliseconds
        text.append(
            f"| {row.model} | {row.runtime} | {row.milliseconds:.1f} | {speed:.2f} | {memory} | {score} | {drop} |"
        )
    lengths = search.original.lengths
    scored = len(search.original.scored["valid"])
    text += [
        "",
        f"Median time of a text, {search.args.batch} at once. Rows have {np.median(lengths):.0f} tokens (median), "
        f"{np.quantile(lengths, 0.9):.0f} (90 %) and {lengths.max()} (longest). Memory is that of the longest text, "
        f"without weights. The scores are those of {scored:,} validation rows; the line above has test rows, and times "
        "that were measured once more. Models without a score are not faster by a tenth than a good one or than the "
        "same attention in another runtime, or there was no time to train them.",
        "",
        *(f"- {line}" for line in lines),
    ]
    if entry is not None:
        if chosen:
            code = opening_code(search, entry, str(search.args.out / MODEL))
            text += ["", "To open the model:", "", "```python", code, "```"]
        text += ["", "By hand, in a checkout, with other splits of the rows:", "", "```bash", *commands(search, entry)]
        text.append("```")
    return "\n".join(text) + "\n"


def _draw(search: Search, chosen: Entry | None, path: Path) -> None:
    """Draw the score against the time of every model that was scored."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    for entry in search.entries:
        if entry.score is None or not math.isfinite(entry.score):
            continue
        name = f"{entry.name} (chosen)" if entry is chosen else entry.name
        marker = "*" if entry is chosen else "o"
        if entry is search.entries[0]:
            marker = "s"
        axes.plot(entry.milliseconds, entry.score, marker, markersize=14 if entry is chosen else 8, label=name)
    quality = search.original.quality("valid")
    axes.axhline(quality.score(quality.original) - quality.limit, color="gray", linestyle=":", label="limit")
    axes.set_xlabel("ms per text")
    axes.set_ylabel(f"{quality.name} on validation rows")
    axes.margins(y=0.15)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
