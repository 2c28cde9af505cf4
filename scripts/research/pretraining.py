"""A pre-training unit: train a small encoder from scratch on Wikipedia text, with configs/corpus/wikipedia_cpu.yaml.

The units see the same tokens in the same order, with the same masks: these depend on the data and the seed only.
Most of them end early, with the learning rates of the whole schedule until then.
"""

import json
from pathlib import Path

from omegaconf import OmegaConf

from lln_fairseq.analysis.events import Curve, read_curves
from lln_fairseq.attention import LAYER_REGISTRY
from lln_fairseq.attention.registry import parse_attention_spec
from scripts.research.programs import TRAIN, Programs, choose_precision, locked, precision_overrides, write_result
from scripts.research.units import PRETRAINING, TO_THE_END, Unit
from scripts.training import attention_overrides, format_override, run_override

UPDATES = 5000
EARLY = 5  # a unit that ends early stops after a fifth of the updates
VALIDATIONS = 10  # evenly spaced; checkpoints are saved at the same updates
VOCABULARY = 8000
MODEL = "small"
PROBED = ("entropy", "spectral_gap")  # means over the heads and sequences of a layer


def run_pretraining(unit: Unit, work: Path, results: Path, text: str | None, updates: int = UPDATES) -> None:
    """Run what is missing of a unit, and write its result.

    Args:
        unit: the unit.
        work: directory of the data and of this unit.
        results: directory of the results.
        text: archive or directory of text in WikiText's form; None downloads WikiText-103.
        updates: number of updates of the schedule, see `last_update`.
    """
    directory = work / PRETRAINING / unit.name
    programs = Programs(directory, {work: "WORK", text: "TEXT"})
    data = work / "data" / "wikipedia"
    with locked(work / "data" / "wikipedia.lock"):
        arguments = ["data_prep.wikitext103", "--tokenizer=sentencepiece", f"--vocab-size={VOCABULARY}", "--workers=1"]
        arguments += ["--out", str(data)]
        if text:
            arguments += ["--source", text]
        programs.run("data", arguments, data / "manifest.json")
    programs.run("train", training_arguments(unit, data, directory, updates), None)
    curves = read_curves(directory / "tensorboard")
    bits = curves["valid/loss"]
    config = OmegaConf.load(directory / "config.yaml")
    manifest = json.loads((data / "manifest.json").read_text())
    content = {
        "kind": PRETRAINING,
        "attention": unit.attention,
        "spec": unit.spec,
        "seed": unit.seed,
        "precision": choose_precision(),
        "source": manifest["settings"]["source"],
        "updates": bits.steps,
        "tokens_per_update": config.task.global_batch * config.task.tokens_per_sample,
        "bits": [round(value, 4) for value in bits.values],
        "probe": read_probe(curves),
        "commands": programs.commands,
    }
    write_result(unit.result(results), content)


def last_update(unit: Unit, updates: int) -> int:
    """Return the last update of a unit: `updates` for the first seed of TO_THE_END, an early one for all others."""
    if unit.attention in TO_THE_END and unit.seed == 1:
        return updates
    return max(1, updates // EARLY)


def training_arguments(unit: Unit, data: Path, directory: Path, updates: int) -> list[str]:
    """Return the module and the arguments that train the unit, or continue its training."""
    attention, _ = parse_attention_spec(unit.spec)
    interval = max(1, updates // VALIDATIONS)
    arguments = [
        *TRAIN,
        "--config-name=pretrain",
        "corpus=wikipedia_cpu",
        f"model={MODEL}",
        run_override(),
        *precision_overrides(),
        *attention_overrides(unit.spec),
        format_override("task.data", data),
        f"optimization.max_update={last_update(unit, updates)}",
        f"lr_scheduler.total_num_update={updates}",
        f"lr_scheduler.warmup_updates={updates // 50}",
        f"dataset.validate_interval_updates={interval}",
        f"checkpoint.save_interval_updates={interval}",
        f"common.seed={unit.seed}",
        "common.log_format=json",
        format_override("checkpoint.save_dir", directory),
    ]
    if attention in LAYER_REGISTRY:  # they have positions of their own, and no matrix per head to measure
        arguments.append("model.rotary=false")
    else:
        arguments.append(f"task.probe_interval={interval}")
    if unit.softmax_layers:
        arguments.append(f"model.softmax_layers='{unit.softmax_layers}'")
    return arguments


def read_probe(curves: dict[str, Curve]) -> dict[str, dict[str, list[float]]]:
    """Return the curves of PROBED by name: the "updates", and the values of every layer as "layer_00" and so on."""
    probe: dict[str, dict[str, list[float]]] = {}
    for name in PROBED:
        layers = {key.rpartition("/")[2]: curve for key, curve in curves.items() if key.startswith(f"probe/{name}/")}
        for layer, curve in sorted(layers.items()):
            values = probe.setdefault(name, {"updates": list(curve.steps)})
            values[layer] = [round(value, 4) for value in curve.values]
    return probe
