"""The units of the paper's Table 1 at the scale of one CPU thread: attentions, tasks and seeds."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lln_fairseq.attention.registry import did_you_mean
from lln_fairseq.errors import UserError

SOFTMAX = "softmax"
CONVERSION = "conversion"
FINE_TUNING = "fine_tuning"
PRETRAINING = "pretraining"
FLOOR = "floor"
RESULTS = Path("docs/results")
ENCODER_POSITIONS = 1024


@dataclass(frozen=True)
class Task:
    """A task of the units with an encoder.

    Attributes:
        glue: the name of the GLUE task.
        train: rows of fine-tuning, from the start of the training file.
        held_out: rows from the end of the training file that are scored together with the dev rows.
        sentences: see data_prep.glue_held_out.
        epochs: epochs of fine-tuning.
        start: the shorter task whose fine-tuned softmax model is trained further; None starts from the encoder.
        batch_size: rows that are computed at once; an update always has 32.
        positions: tokens of the longest row. Training adds positions to an encoder that has fewer.
    """

    glue: str
    train: int = 6000
    held_out: int = 2400
    sentences: int = 1
    epochs: int = 2
    start: str | None = None
    batch_size: int = 32
    positions: int = ENCODER_POSITIONS


TASKS = {
    "qnli": Task("QNLI"),
    "mnli": Task("MNLI"),
    "qqp": Task("QQP"),
    "sst2": Task("SST-2"),
    "qnli4": Task("QNLI", train=7000, held_out=1000, sentences=4, epochs=1, start="qnli", batch_size=16),
    "qnli16": Task("QNLI", train=7000, held_out=1000, sentences=16, epochs=1, start="qnli4", batch_size=4),
    "qnli64": Task("QNLI", 7000, held_out=1000, sentences=64, epochs=1, start="qnli16", batch_size=8, positions=2816),
    "qqp4": Task("QQP", train=7000, held_out=1000, sentences=4, epochs=1, start="qqp", batch_size=16),
}
SHORT_TASKS = ("qnli", "mnli", "qqp", "sst2")
LONG_TASKS = ("qnli16", "qnli64")

# Attention specs by name, for each kind of unit. The same name can have other block sizes in another kind, for other
# lengths of text. `all_units` says which names run on which task.
LONG_BLOCKS = "block_size=128,global_tokens=first_segment"
LONG_WINDOW = "window:block_size=48,global_tokens=first_segment"
JOINT = "lln_diag:mix=joint_offset,gain=learned,block_size=32"
CONVERTED = {
    SOFTMAX: SOFTMAX,
    "elu": "elu",
    "lln_diag": "lln_diag:mix=average,gain=none,block_size=32",
    "joint_offset_global": f"{JOINT},global_tokens=first_segment",
    "joint_offset": JOINT,
    "block_diag": "block_diag:block_size=32",
    "performer": "performer",
    "reformer": "reformer",
    "lln": "lln:gain=learned",
    "hedgehog": "hedgehog",
    "hedgehog_blocks": "hedgehog:block_size=32",
    "t2r": "t2r",
    "t2r_blocks": "t2r:block_size=32",
    "cosformer": "cosformer",
    "nystrom": "nystrom",
    "linformer": "linformer",
    "longformer": "longformer:one_sided_window=16",
    "window": "window:block_size=16",
    "window_softmax": "window:block_size=16",
    "block_diag_softmax": "block_diag:block_size=32",
    "joint_offset_softmax": JOINT,
    "flash": "flash",
    "tnn": "tnn",
    "block_diag_global_128": f"block_diag:{LONG_BLOCKS}",
    "joint_offset_global_128": f"lln_diag:mix=joint_offset,gain=learned,{LONG_BLOCKS}",
    "window_global": LONG_WINDOW,
}
FINE_TUNED = {
    SOFTMAX: SOFTMAX,
    "block_diag_global": f"block_diag:{LONG_BLOCKS}",
    "window_global": LONG_WINDOW,
    "joint_offset_global": f"lln_diag:mix=joint_offset,gain=learned,{LONG_BLOCKS}",
    "lln_diag": "lln_diag:mix=average,gain=none,block_size=128",
}
# The layers, counted from 0, that compute softmax instead: two of the encoder's six, one of pre-training's four.
SOFTMAX_LAYERS = {
    "window_softmax": "2,5",
    "block_diag_softmax": "2,5",
    "joint_offset_softmax": "2,5",
    "window_softmax_last": "3",
}
CONVERTED_ON_LONG_PAIRS = ("block_diag_global_128", "joint_offset_global_128", "window_global")
# On "QQP among four", neither text is short enough to be global.
ON_QQP4 = (
    "block_diag",
    "joint_offset",
    "window",
    "window_softmax",
    "block_diag_softmax",
    "joint_offset_softmax",
)
NOT_CONVERTIBLE = ("flash", "tnn")  # they replace whole layers; their results say so in the words of linearize
CONVERTED_WITH_THREE_SEEDS = (SOFTMAX, "elu", "lln_diag", "joint_offset_global", "joint_offset")
PRETRAINED = {
    SOFTMAX: SOFTMAX,
    "lln_diag": "lln_diag:block_size=32",
    "block_diag": "block_diag:block_size=32",
    "joint_offset": "lln_diag:mix=joint_offset,block_size=32",
    "elu": "elu",
    "lln": "lln",
    "performer": "performer",
    "reformer": "reformer",
    "flash": "flash",
    "tnn": "tnn",
    "window": "window:block_size=32",
    "window_softmax_last": "window:block_size=32",
}
PRETRAINED_WITH_TWO_SEEDS = (SOFTMAX, "lln_diag")
# Their first seed is trained to the end of the schedule.
TO_THE_END = (*PRETRAINED_WITH_TWO_SEEDS, "window", "window_softmax_last")
TF_IDF = "tf_idf"
SPECS = {
    CONVERSION: CONVERTED,
    FINE_TUNING: {**FINE_TUNED, **{name: CONVERTED[name] for name in ON_QQP4}},
    PRETRAINING: PRETRAINED,
    FLOOR: {TF_IDF: TF_IDF},
}


@dataclass(frozen=True)
class Unit:
    """One command with one result file. `task` is empty in pre-training."""

    kind: str
    task: str
    attention: str
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the result file and of the unit's directory in --work: qnli_elu_seed1."""
        parts = [self.attention, f"seed{self.seed}"]
        if self.task:
            parts.insert(0, self.task)
        return "_".join(parts)

    @property
    def spec(self) -> str:
        return SPECS[self.kind][self.attention]

    @property
    def softmax_layers(self) -> str:
        """Return the layers that compute softmax instead of the attention, or "" if none does."""
        return SOFTMAX_LAYERS.get(self.attention, "")

    def result(self, results: Path) -> Path:
        return results / self.kind / f"{self.name}.json"


def check_unit(unit: Unit) -> None:
    """Raise UserError if there is no such task or attention. Other seeds than those of `all_units` are allowed."""
    if unit.task and unit.task not in TASKS:
        raise UserError(f"no such task: {unit.task}{did_you_mean(unit.task, TASKS)}")
    if unit.kind == FINE_TUNING and TASKS[unit.task].start is None:
        long_tasks = [name for name, task in TASKS.items() if task.start is not None]
        raise UserError(f"{unit.task} has no shorter task to start from: choose from {', '.join(long_tasks)}")
    attentions = SPECS[unit.kind]
    if unit.attention not in attentions:
        raise UserError(f"no such attention: {unit.attention}{did_you_mean(unit.attention, attentions)}")


def all_units() -> list[Unit]:
    """Return the units of the tables in the order in which they run, the most informative first.

    Every conversion also scores the softmax model that it starts from, so only the short tasks have units of softmax.
    """
    units = [Unit(FLOOR, task, TF_IDF, 1) for task in (*SHORT_TASKS, *LONG_TASKS, "qqp4")]
    units += [Unit(PRETRAINING, "", attention, 1) for attention in PRETRAINED_WITH_TWO_SEEDS]
    only_long = (*CONVERTED_ON_LONG_PAIRS, *SOFTMAX_LAYERS)
    units += _conversions(1, [attention for attention in CONVERTED if attention not in only_long])
    later = [attention for attention in PRETRAINED if attention not in PRETRAINED_WITH_TWO_SEEDS]
    units += [Unit(PRETRAINING, "", attention, 1) for attention in later]
    for seed in (2, 3):
        units += _conversions(seed, CONVERTED_WITH_THREE_SEEDS)
    for seed in (1, 2, 3):
        units += [Unit(CONVERSION, "qnli16", attention, seed) for attention in CONVERTED_ON_LONG_PAIRS]
        units += [Unit(FINE_TUNING, "qnli16", attention, seed) for attention in FINE_TUNED]
        for kind in (CONVERSION, FINE_TUNING):
            units += [Unit(kind, "qqp4", attention, seed) for attention in ON_QQP4]
    for seed in (1, 2, 3):
        units += [Unit(FINE_TUNING, "qnli64", attention, seed) for attention in (SOFTMAX, "block_diag_global")]
        units.append(Unit(CONVERSION, "qnli64", "block_diag_global_128", seed))
    units += [Unit(PRETRAINING, "", attention, 2) for attention in PRETRAINED_WITH_TWO_SEEDS]
    return units


def _conversions(seed: int, attentions: Iterable[str]) -> list[Unit]:
    """Return the conversion units of one seed on SHORT_TASKS. Attentions that are refused are tried on one only."""
    units = []
    for task, attention in itertools.product(SHORT_TASKS, attentions):
        if attention in NOT_CONVERTIBLE and task != SHORT_TASKS[0]:
            continue
        if attention == "joint_offset_global" and task == "sst2":
            continue  # the whole text of a row would be global
        units.append(Unit(CONVERSION, task, attention, seed))
    return units
