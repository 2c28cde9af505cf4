"""Read the scalars that a training run has written for TensorBoard."""

import re
from pathlib import Path
from typing import NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Curve(NamedTuple):
    """The values of a scalar during a run. Both lists are in ascending order of the steps (the updates)."""

    steps: list[int]
    values: list[float]


def read_curves(directory: Path | str) -> dict[str, Curve]:
    """Return every scalar in the event files below a directory; the dictionary is empty if there are none.

    The keys are SUBDIRECTORY/TAG, for example "valid/loss": fairseq writes the subdirectories train_inner, train and
    valid. A run that was interrupted has several event files. If two of them have a value for the same step, the value
    in the later file counts.
    """
    points: dict[str, dict[int, float]] = {}
    for file in sorted(Path(directory).rglob("events.out.tfevents.*"), key=_age):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0 = keep all
        events.Reload()
        for tag in events.Tags()["scalars"]:
            curve_points = points.setdefault(f"{file.parent.relative_to(directory)}/{tag}", {})
            for event in events.Scalars(tag):
                curve_points[event.step] = event.value
    curves = {}
    for name, curve_points in points.items():
        steps = sorted(curve_points)
        curves[name] = Curve(steps, [curve_points[step] for step in steps])
    return curves


def _age(file: Path) -> list[int]:
    """Return a key that sorts event files from old to new: all numbers in the file name, as integers.

    The name is events.out.tfevents.SECONDS.HOST.PID.COUNTER. As integers, counter 9 comes before counter 10.
    """
    return [int(number) for number in re.findall(r"\d+", file.name)]
