"""Reads back the scalars that a training run wrote for TensorBoard."""

import re
from pathlib import Path
from typing import NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Curve(NamedTuple):
    steps: list[int]
    values: list[float]


def read_curves(directory: Path | str) -> dict[str, Curve]:
    """Every scalar below a directory: {"train_inner/loss": Curve, "valid/loss": Curve, ...}, steps ascending.

    fairseq keeps a directory for each of train_inner, train and valid. A run that was interrupted has several event
    files; where they overlap, the later one counts.
    """
    curves: dict[str, dict[int, float]] = {}
    for file in sorted(Path(directory).rglob("events.out.tfevents.*"), key=_age):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points = curves.setdefault(f"{file.parent.relative_to(directory)}/{tag}", {})
            points.update((event.step, event.value) for event in events.Scalars(tag))
    return {tag: Curve(*map(list, zip(*sorted(points.items()), strict=True))) for tag, points in curves.items()}


def _age(file: Path) -> list[int]:
    """The numbers of events.out.tfevents.SECONDS.HOST.PID.COUNTER: as text, counter 10 would come before 9."""
    return [int(number) for number in re.findall(r"\d+", file.name)]
