"""Fine-tune all-MiniLM-L6-v2 on a task of the units, with softmax or another attention.

A fine-tuning unit trains an attention with the labels of a long task. Each long task names a shorter one. Every
attention, softmax too, starts from the softmax model of the shorter task, so that all see the same rows equally often.
"""

import json
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.attention import MECHANISMS
from lln_fairseq.attention.registry import parse_attention_spec
from scripts.research.programs import TRAIN, Programs, choose_precision, locked, precision_overrides, write_result
from scripts.research.units import ENCODER_POSITIONS, FINE_TUNING, SOFTMAX, TASKS, Unit
from scripts.training import attention_overrides, format_override, run_override

TRANSFER_STEPS = 300
VALIDATE_INTERVAL = 73  # updates; 7,000 rows are 219 updates
SPLITS = ("valid", "test")  # GLUE's dev rows, and rows of its training file that are not trained on
TRAINED = "trained"  # the key of a fine-tuning unit's scores


def run_fine_tuning(unit: Unit, work: Path, results: Path, glue: str | None) -> None:
    """Run what is missing of a unit, and write its result. The arguments are those of `conversion.run_conversion`.

    An attention that can learn from softmax in a transfer does so first.
    """
    directory = work / FINE_TUNING / unit.name
    programs = Programs(directory, {work: "WORK", glue: "GLUE"})
    data = make_data(unit.task, work, glue, programs)
    if unit.attention == SOFTMAX:
        checkpoint = make_teacher(unit.task, unit.seed, work, glue, programs)
    else:
        start = make_start(unit.task, unit.seed, work, glue, programs)
        attention, _ = parse_attention_spec(unit.spec)
        if MECHANISMS[attention].cls.learns_transfer:
            start = linearize(programs, "linearized", unit, start, data, TRANSFER_STEPS)
        trained = directory / "trained"
        words = training_words(unit.task, unit.spec, unit.seed, data, start, trained)
        if unit.softmax_layers:
            words.append(f"model.softmax_layers='{unit.softmax_layers}'")
        programs.run("train", words, trained / f"scores_{SPLITS[-1]}.json")
        checkpoint = trained / "checkpoint_last.pt"
    scores = score(programs, "score", checkpoint, data)
    dev = read_curves(checkpoint.parent / "tensorboard")["valid/accuracy"]
    content = {
        **describe_unit(unit, data),
        "precision": choose_precision(),
        "scores": {TRAINED: scores},
        "dev_accuracy": {step: round(value, 1) for step, value in zip(dev.steps, dev.values, strict=True)},
        "commands": programs.commands,
    }
    write_result(unit.result(results), content)


def describe_unit(unit: Unit, data: Path) -> dict[str, Any]:
    """Return the first entries of a unit's result: what it is, and the rows of its task."""
    manifest = json.loads((data / "manifest.json").read_text())
    dev = [splits["valid"] for name, splits in manifest["datasets"].items() if name != "label"]
    return {
        "kind": unit.kind,
        "task": unit.task,
        "attention": unit.attention,
        "spec": unit.spec,
        "seed": unit.seed,
        "rows": {split: counts["rows"] for split, counts in manifest["counts"].items()},
        "source": manifest["settings"]["source"],
        "mean_tokens": round(sum(text["tokens"] for text in dev) / dev[0]["samples"]),  # of a dev row, all its texts
    }


def make_encoder(work: Path, programs: Programs) -> Path:
    """Return the checkpoint of the published encoder, and download and convert it if it is missing.

    Whoever needs the same encoder, data or teacher meanwhile, waits until it is made.
    """
    source = work / "minilm"
    encoder = work / "encoder"
    with locked(work / "encoder.lock"):
        programs.run("download", ["data_prep.encoders", "minilm", "--out", source], source / "model.safetensors")
        words = [
            "lln_fairseq",
            "convert",
            source,
            encoder,
            f"--attention={SOFTMAX}",
            f"--positions={ENCODER_POSITIONS}",
        ]
        programs.run("convert", words, encoder / "model.pt")
    return encoder / "model.pt"


def make_data(name: str, work: Path, glue: str | None, programs: Programs) -> Path:
    """Return the directory of a task's rows, and write them if they are missing."""
    task = TASKS[name]
    tokenizer = make_encoder(work, programs).parent
    data = work / "data" / name
    with locked(work / "data" / f"{name}.lock"):
        words = ["data_prep.glue_held_out", task.glue, "--tokenizer", tokenizer, "--out", data, "--workers=1"]
        words += [f"--train={task.train}", f"--test={task.held_out}", f"--sentences={task.sentences}"]
        if glue:
            words += ["--source", glue]
        programs.run(f"data {name}", words, data / "manifest.json")
    return data


def make_start(name: str, seed: int, work: Path, glue: str | None, programs: Programs) -> Path:
    """Return the checkpoint from which the fine-tuning of a task starts: the shorter task's teacher, or the encoder."""
    shorter = TASKS[name].start
    if shorter is None:
        return make_encoder(work, programs)
    return make_teacher(shorter, seed, work, glue, programs)


def make_teacher(name: str, seed: int, work: Path, glue: str | None, programs: Programs) -> Path:
    """Return the checkpoint of the fine-tuned softmax encoder of a task and seed, and make what is missing of it.

    It is also scored, with files next to the checkpoint.
    """
    data = make_data(name, work, glue, programs)
    start = make_start(name, seed, work, glue, programs)
    teacher = work / "teachers" / f"{name}_seed{seed}"
    words = training_words(name, SOFTMAX, seed, data, start, teacher)
    with locked(work / "teachers" / f"{name}_seed{seed}.lock"):
        programs.run(f"train {name}", words, teacher / f"scores_{SPLITS[-1]}.json")
        score(programs, f"score {name}", teacher / "checkpoint_last.pt", data)
    return teacher / "checkpoint_last.pt"


def training_words(name: str, spec: str, seed: int, data: Path, start: Path, out: Path) -> list[str]:
    """Return the module and the arguments that fine-tune an attention on a task."""
    task = TASKS[name]
    words = [
        *TRAIN,
        "--config-name=finetune",
        f"glue={task.glue.lower().replace('-', '')}",
        "recipe=small",
        run_override(),
        format_override("task.data", data),
        f"task.max_positions={task.positions}",
        f"dataset.batch_size={task.batch_size}",
        "dataset.valid_subset=valid",
        f"optimization.max_epoch={task.epochs}",
        f"common.seed={seed}",
        format_override("checkpoint.finetune_from_model", start),
        format_override("checkpoint.save_dir", out),
    ]
    if spec != SOFTMAX:  # the teacher's softmax comes with its checkpoint
        words += attention_overrides(spec)
    if task.start is not None or torch.cuda.is_available():
        words += precision_overrides()
    if task.start is None:
        words += ["dataset.disable_validation=true", "checkpoint.save_interval_updates=50"]
        return [*words, "model.load_checkpoint_heads=false"]
    return [
        *words,
        "model.load_checkpoint_heads=true",
        "model.attention_dropout=0",
        "model.pooler_dropout=0",
        f"dataset.validate_interval_updates={VALIDATE_INTERVAL}",
        f"checkpoint.save_interval_updates={VALIDATE_INTERVAL}",
        "checkpoint.no_epoch_checkpoints=true",
    ]


def linearize(
    programs: Programs, step: str, unit: Unit, teacher: Path, data: Path, steps: int, distill: int = 0
) -> Path:
    """Return the checkpoint of the teacher with the unit's attention, after so many steps of `linearize`; 0 swap it in.

    `steps` are those of the transfer, `distill` those of the distillation. `step` is the name of the checkpoint's
    directory.
    """
    attention, options = parse_attention_spec(unit.spec)
    out = programs.directory / step
    words = ["lln_fairseq", "linearize", teacher, data, out, f"--attention={attention}"]
    words += [f"--steps={steps}", f"--distill={distill}", f"--seed={unit.seed}", "--evaluate-rows=1"]
    if TASKS[unit.task].start is not None:
        words.append(f"--tokens={TASKS[unit.task].positions}")
    if unit.softmax_layers:
        words += ["--softmax-layers", unit.softmax_layers]
    if options:
        words += ["--option", *(f"{key}={value}" for key, value in options.items())]
    programs.run(step, words, out / "model.pt")
    return out / "model.pt"


def score(programs: Programs, step: str, checkpoint: Path, data: Path) -> dict[str, Any]:
    """Return the accuracies of a classifier on each of SPLITS and on all their rows together ("all"), between 0 and 1.

    They are written to scores_SPLIT.json next to the checkpoint. If these files exist, they are trusted.
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
