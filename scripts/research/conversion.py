"""A conversion unit: fine-tune an encoder with softmax, make it linear with `linearize`, and score both.

The scores are accuracies on the dev rows and on held-out rows of the training file, which nothing is chosen on. The
encoder is all-MiniLM-L6-v2. Units of one task and seed share the fine-tuned encoder, their teacher.
"""

import json
import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.text.special_symbols import NUM_SPECIAL
from scripts.benchmarks.meter import interleaved
from scripts.research.programs import TRAIN, ProgramFailed, Programs, locked, write_result
from scripts.research.units import CONVERSION, SOFTMAX, TASKS, Unit

LINEARIZED = "linearized"
STAGES = {"swapped": 0, LINEARIZED: 300}  # steps of the transfer
POSITIONS = 1024
LONG = 512  # tokens of the longer timed text
FIRST_TEXT = 16  # tokens of its first text, <s> and </s> included
REPEATS = 15
SPLITS = ("valid", "test")
# linearize prints these if the attention cannot be used. Other errors, such as a full disk, end the unit.
REFUSALS = ("cannot replace a teacher's attention", "diverged to NaN")


def run_conversion(unit: Unit, work: Path, results: Path, glue: str | None) -> None:
    """Run what is missing of a unit, and write its result. The checkpoints of the transfer are deleted afterwards.

    Args:
        unit: the unit.
        work: directory of the encoder, the data, the teachers and this unit.
        results: directory of the results.
        glue: archive or directory in GLUE's layout; None downloads the published one.
    """
    directory = work / CONVERSION / unit.name
    programs = Programs(directory, {work: "WORK", glue: "GLUE"})
    teacher = make_teacher(unit.task, unit.seed, work, glue, programs)
    data = work / "data" / unit.task
    manifest = json.loads((data / "manifest.json").read_text())
    content: dict[str, Any] = {
        "kind": CONVERSION,
        "task": unit.task,
        "attention": unit.attention,
        "spec": unit.spec,
        "seed": unit.seed,
        "precision": "float32",
        "rows": {split: counts["rows"] for split, counts in manifest["counts"].items()},
        "source": manifest["settings"]["source"],
        "mean_tokens": mean_tokens(manifest),
    }
    scores = {SOFTMAX: score(programs, f"score {unit.task}", teacher, data)}
    content["scores"] = scores
    if unit.attention != SOFTMAX:
        try:
            linearize(unit, programs, teacher, data)
        except ProgramFailed as error:
            if not any(refusal in error.reason for refusal in REFUSALS):
                raise
            content["refused"] = error.reason
        else:
            linear = directory / LINEARIZED / "model.pt"
            for label in STAGES:
                scores[label] = score(programs, f"score {label}", directory / label / "model.pt", data)
            scores |= score_parts(linear, data)
            content["relative_error"] = relative_error(directory / LINEARIZED)
            content["milliseconds"] = time_calls({SOFTMAX: teacher, unit.attention: linear}, content["mean_tokens"])
    content["commands"] = programs.commands
    content["thread_seconds"] = programs.thread_seconds
    write_result(unit.result(results), content)
    for label in STAGES:  # 200 MB; the logs stay
        shutil.rmtree(directory / label, ignore_errors=True)


def make_teacher(name: str, seed: int, work: Path, glue: str | None, programs: Programs) -> Path:
    """Return the checkpoint of the fine-tuned softmax encoder of a task and seed, and make what is missing of it.

    The encoder is downloaded. A second unit that needs the same encoder, data or teacher waits until they are made.
    """
    task = TASKS[name]
    encoder = work / "encoder"
    with locked(work / "encoder.lock"):
        source = work / "minilm"
        programs.run("download", ["data_prep.encoders", "minilm", "--out", source], source / "model.safetensors")
        arguments = ["lln_fairseq", "convert", source, encoder, f"--attention={SOFTMAX}", f"--positions={POSITIONS}"]
        programs.run("convert", arguments, encoder / "model.pt")
    data = work / "data" / name
    with locked(work / "data" / f"{name}.lock"):
        arguments = ["data_prep.glue_held_out", task.glue, "--tokenizer", encoder, "--out", data, "--workers=1"]
        arguments += [f"--train={task.train}", f"--test={task.held_out}", f"--sentences={task.sentences}"]
        if glue:
            arguments += ["--source", glue]
        programs.run(f"data {name}", arguments, data / "manifest.json")
    start = encoder / "model.pt"
    if task.start:
        start = make_teacher(task.start, seed, work, glue, programs)
    teacher = work / "teachers" / f"{name}_seed{seed}"
    arguments = [
        *TRAIN,
        "--config-name=finetune",
        f"glue={task.glue.lower().replace('-', '')}",
        "recipe=small",
        "run=cpu",
        f"task.data={data}",
        f"task.max_positions={POSITIONS}",
        f"dataset.batch_size={task.batch_size}",
        "dataset.valid_subset=valid",
        "dataset.disable_validation=true",
        f"optimization.max_epoch={task.epochs}",
        f"common.seed={seed}",
        f"model.load_checkpoint_heads={str(task.start is not None).lower()}",
        f"checkpoint.finetune_from_model={start}",
        "checkpoint.save_interval_updates=50",
        f"checkpoint.save_dir={teacher}",
    ]
    with locked(work / "teachers" / f"{name}_seed{seed}.lock"):
        programs.run(f"train {name}", arguments, teacher / f"scores_{SPLITS[-1]}.json")
        score(programs, f"score {name}", teacher / "checkpoint_last.pt", data)
    return teacher / "checkpoint_last.pt"


def score(programs: Programs, step: str, checkpoint: Path, data: Path) -> dict[str, Any]:
    """Return the accuracies of a classifier on each of SPLITS and on all their rows together, between 0 and 1.

    They are written to scores_SPLIT.json next to the checkpoint. If these files exist, nothing is computed.
    """
    out = checkpoint.parent
    arguments = ["lln_fairseq", "evaluate", checkpoint, data, f"--split={','.join(SPLITS)}"]
    arguments += ["--json", out / "scores_{split}.json"]
    programs.run(step, arguments, out / f"scores_{SPLITS[-1]}.json")
    return pool({split: json.loads((out / f"scores_{split}.json").read_text()) for split in SPLITS})


def pool(scores: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the accuracy of each split and that of all their rows ("all"), from the scores of `evaluate` by split."""
    accuracies = {split: round(values["accuracy"], 5) for split, values in scores.items()}
    correct = sum(values["accuracy"] * values["rows"] for values in scores.values())
    rows = sum(values["rows"] for values in scores.values())
    return {**accuracies, "all": round(correct / rows, 5)}


def linearize(unit: Unit, programs: Programs, teacher: Path, data: Path) -> None:
    """Swap the unit's attention in twice: without training into swapped/, and with it into linearized/."""
    attention, options = parse_attention_spec(unit.spec)
    for label, steps in STAGES.items():
        out = programs.directory / label
        arguments = ["lln_fairseq", "linearize", teacher, data, out, f"--attention={attention}"]
        arguments += [f"--steps={steps}", f"--seed={unit.seed}", "--evaluate-rows=1"]
        if options:
            arguments += ["--option", *(f"{key}={value}" for key, value in options.items())]
        programs.run(label, arguments, out / "model.pt")


def relative_error(directory: Path) -> float:
    """Return the error of the attentions' outputs at the end of a transfer, the mean over the layers."""
    curves = read_curves(directory / "tensorboard")
    errors = [curve.values[-1] for name, curve in curves.items() if name.startswith("./transfer_error/")]
    return round(statistics.fmean(errors), 4)


def score_parts(checkpoint: Path, data: Path) -> dict[str, Any]:
    """Return the accuracies as in `score` with one part of a hybrid attention at a time, by the name of the part.

    `linearize` prints them on the dev rows only. The result is empty for an attention that has no parts.
    """
    from lln_fairseq.inference.evaluate import compute_outputs, compute_scores, load_finetuned_model
    from lln_fairseq.linearize.attention_transfer import swapped_attention

    model, task = load_finetuned_model(str(checkpoint), str(data))
    layers = list(model.encoder.sentence_encoder.layers)
    attentions = [layer.self_attn.attention for layer in layers]
    scores = {}
    for name in attentions[0].branches():
        accuracies = {}
        with swapped_attention(layers, [attention.branches()[name].eval() for attention in attentions]):
            for split in SPLITS:
                accuracies[split] = compute_scores(task, compute_outputs(model, task, split))
        scores[name] = pool(accuracies)
    return scores


def time_calls(checkpoints: dict[str, Path], mean_length: int) -> dict[str, dict[str, float]]:
    """Return the medians of the times in ms of one text, by its length (mean_length and LONG) and by the attention.

    The models are called in turn, on one thread.
    """
    from lln_fairseq.inference.evaluate import load_finetuned_model

    models = {name: load_finetuned_model(str(path)) for name, path in checkpoints.items()}
    times: dict[str, dict[str, float]] = {}
    for length in (mean_length, LONG):
        calls = {name: classification(model.cpu(), task, length) for name, (model, task) in models.items()}
        measured = interleaved(calls, "cpu", REPEATS)
        times[str(length)] = {name: round(statistics.median(values), 2) for name, values in measured.items()}
    return times


def classification(model: Any, task: Any, length: int) -> Callable[[], object]:
    """Return a function that classifies a pair of random texts of `length` tokens in total."""
    dictionary = task.source_dictionary
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_SPECIAL, len(dictionary) - 1, (1, length), generator=generator)
    ids[0, 0] = dictionary.bos()
    ids[0, FIRST_TEXT - 1 : FIRST_TEXT + 1] = dictionary.eos()
    ids[0, -1] = dictionary.eos()
    head = task.cfg.classification_head_name
    return torch.inference_mode()(partial(model, ids, features_only=True, classification_head_name=head))


def mean_tokens(manifest: dict[str, Any]) -> int:
    """Return the mean number of tokens of a dev row, both texts of a pair together."""
    counts = [splits["valid"] for name, splits in manifest["datasets"].items() if name != "label"]
    return round(sum(count["tokens"] for count in counts) / counts[0]["samples"])
