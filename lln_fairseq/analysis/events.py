"""Read the scalars that a training run has written for TensorBoard."""

import re
from pathlib import Path
from typing import NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Curve(NamedTuple):
    """A scalar over the updates of a run: its value at each step, in ascending order of the steps."""

    steps: list[int]
    values: list[float]


def read_curves(directory: Path | str) -> dict[str, Curve]:
    """Return every scalar in the event files below a directory, by SUBDIRECTORY/TAG, for example "valid/loss".

    fairseq writes one subdirectory for each of train_inner, train and valid. A run that was interrupted has several
    event files. If two of them have a value for the same step, the value from the later file is returned.
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
    """Return the numbers of events.out.tfevents.SECONDS.HOST.PID.COUNTER, which sort counter 9 before counter 10."""
    return [int(number) for number in re.findall(r"\d+", file.name)]
