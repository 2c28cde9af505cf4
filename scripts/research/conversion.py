"""A conversion unit: fine-tune an encoder with softmax, make it linear with `linearize`, and score both.

Units of one task and seed share the fine-tuned encoder, their teacher. See scripts.research.fine_tuning for the scores.
"""

import shutil
import statistics
from pathlib import Path
from typing import Any

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.attention import MECHANISMS
from lln_fairseq.attention.registry import parse_attention_spec
from scripts.research.fine_tuning import (
    SPLITS,
    TRANSFER_STEPS,
    describe_unit,
    linearize,
    make_data,
    make_teacher,
    pool,
    score,
)
from scripts.research.programs import ProgramFailed, Programs, write_result
from scripts.research.units import CONVERSION, NOT_CONVERTIBLE, SOFTMAX, TASKS, Unit

LINEARIZED = "linearized"
STAGES = {"swapped": (0, 0), LINEARIZED: (TRANSFER_STEPS, 0)}  # steps of the transfer and of the distillation
LONG_STAGES = {**STAGES, "distilled": (TRANSFER_STEPS, 200)}  # of long tasks, those that start from a shorter task
# If linearize prints one of these, the result has its message as "refused". Other errors, such as a full disk, end the
# unit.
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
    data = make_data(unit.task, work, glue, programs)
    content = describe_unit(unit, data)
    scores = {SOFTMAX: score(programs, f"score {unit.task}", teacher, data)}
    content["scores"] = scores
    stages = unit_stages(unit)
    if unit.attention != SOFTMAX:
        try:
            for stage, steps in stages.items():
                model = linearize(programs, stage, unit, teacher, data, *steps)
                scores[stage] = score(programs, f"score {stage}", model, data)
                if stage == LINEARIZED:
                    scores |= score_parts(model, data)
                    content["relative_error"] = relative_error(model.parent)
            if LINEARIZED not in stages:
                scores[LINEARIZED] = scores["swapped"]
        except ProgramFailed as error:
            if not any(refusal in error.reason for refusal in REFUSALS):
                raise
            content["refused"] = error.reason
    content["commands"] = programs.commands
    write_result(unit.result(results), content)
    for stage in stages:  # 300 MB; the logs stay
        shutil.rmtree(directory / stage, ignore_errors=True)


def unit_stages(unit: Unit) -> dict[str, tuple[int, int]]:
    """Return the steps of the transfer and of the distillation by stage: LONG_STAGES for a long task, else STAGES.

    LINEARIZED is left out for an attention that learns nothing in the transfer: its model would be the swapped one.
    """
    stages = dict(STAGES if TASKS[unit.task].start is None else LONG_STAGES)
    attention, _ = parse_attention_spec(unit.spec)
    if attention not in NOT_CONVERTIBLE and not MECHANISMS[attention].cls.learns_transfer:
        del stages[LINEARIZED]
    return stages


def relative_error(directory: Path) -> float:
    """Return linearize's relative error of the attentions' outputs after its last step, the mean over the layers."""
    curves = read_curves(directory / "tensorboard")
    errors = [curve.values[-1] for name, curve in curves.items() if name.startswith("./transfer_error/")]
    return round(statistics.fmean(errors), 4)


def score_parts(checkpoint: Path, data: Path) -> dict[str, Any]:
    """Score a checkpoint with only one part of a hybrid attention in use, and return the scores by the part's name.

    The scores are those of `score`, for the dev and the test rows; `linearize` prints them for the dev rows only. The
    result is empty for an attention that has no parts.
    """
    from lln_fairseq.inference.evaluate import compute_outputs, compute_scores, load_finetuned_model
    from lln_fairseq.linearize.attention_transfer import swapped_attention

    model, task = load_finetuned_model(str(checkpoint), str(data))
    layers = list(model.encoder.sentence_encoder.layers)
    attentions = [layer.self_attn.attention for layer in layers]
    scores = {}
    names = dict.fromkeys(name for attention in attentions for name in attention.branches())
    for name in names:
        accuracies = {}
        parts = [attention.branches().get(name, attention).eval() for attention in attentions]  # softmax layers stay
        with swapped_attention(layers, parts):
            for split in SPLITS:
                accuracies[split] = compute_scores(task, compute_outputs(model, task, split))
        scores[name] = pool(accuracies)
    return scores
