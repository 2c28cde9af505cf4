"""Pathfinder-32 as the Long Range Arena draws it (arXiv 2011.04006, 2.2.5): do the two discs lie on one dashed line?

    label 1: a disc at either end of one of two long lines; label 0: a disc at one end of each; short lines distract.

The lines are those of Linsley et al. 2018 (arXiv 1805.08315), of dashes that go on in about the same direction, with
the parameters of LRA's hardest set (14 dashes). Drawn anew and not copied: the published pictures come out of image
libraries that round in their own way. All arithmetic here gives the same bits on every machine.

What is taken is kept as the bits of one integer, a bit for each pixel of a board, row by row, that is wider than the
picture, so that a shape is moved by shifting and never wraps round.
"""

import math
import random
from functools import cache
from typing import NamedTuple

import numpy as np

from .chunks import Drawn, below

SIDE = 32  # pixels
PADDING, MARGIN, LENGTH, THICKNESS = 1, 1, 2, 0.5  # of the picture, between dashes, of a dash; pixels
DASHES, SEED_DISTANCE = 14, 7  # of the long lines; pixels between their first dashes
SHORT_LINES, SHORT_DASHES = 5, 4
RADIUS = 1.5  # of a disc, pixels
LONG_CONTRAST, SHORT_CONTRAST = 1.5, 2.0
TRIES, SHORT_TRIES = 3, 5  # of a dash, of a short line
SUBPIXELS = 4  # on each side of a pixel
FULL, HALF = 0.9, 0.5  # of a pixel: what a dash must find free, what it takes from others

_AROUND = 8  # columns and rows of the board on each side of the picture
_WIDTH = SIDE + 2 * _AROUND
_REACH = 6  # pixels from the end of a dash to the farthest that the gap before it takes

Point = tuple[int, int]  # row and column of a pixel
Direction = tuple[float, float]  # of length 1


class Dash(NamedTuple):
    """`head`: the end away from the line's origin. `direction`: towards it. `bend`: where it joins the one before."""

    head: Point
    direction: Direction
    bend: Point


class Line(NamedTuple):
    """A dashed line, its origin being the end of the first dash that has no neighbour."""

    origin: Point
    dashes: list[Dash]

    @property
    def ends(self) -> tuple[Point, Point]:
        return self.origin, self.dashes[-1].head


class Scene(NamedTuple):
    """What is in a picture: two long lines, the short ones, and where the discs are."""

    long: list[Line]
    short: list[Line]
    discs: tuple[Point, Point]
    label: int


# Rounded, since the last digits of a cosine differ between machines.
DEGREES = [(round(math.sin(math.radians(d)), 9), round(math.cos(math.radians(d)), 9)) for d in range(360)]
# The pixels at LENGTH + MARGIN from a point, and the directions in which they lie.
STEPS = [
    (y, x) for y in range(-4, 5) for x in range(-4, 5) if math.floor(math.sqrt(y * y + x * x) + 0.5) == LENGTH + MARGIN
]
STEP_DIRECTIONS = [(y / math.sqrt(y * y + x * x), x / math.sqrt(y * y + x * x)) for y, x in STEPS]


def draw(generator: random.Random) -> Drawn:
    """A picture, its pixels row by row, and its label."""
    scene = draw_scene(generator)
    return Drawn(picture(scene).tobytes(), scene.label)


def draw_scene(generator: random.Random) -> Scene:
    """Lines that keep clear of each other, and the discs."""
    found = None
    while found is None:
        found = _two_lines(generator)
    long, taken = found
    short: list[Line] = []
    for _ in range(SHORT_LINES):
        for _ in range(SHORT_TRIES):
            if line := _short_line(generator, taken):
                short.append(line[0])
                taken = line[1]
                break
    first, label = below(generator, 2), below(generator, 2)
    discs = long[first].origin, long[first if label else 1 - first].ends[1]
    return Scene(long, short, discs, label)


def picture(scene: Scene) -> np.ndarray:
    """(SIDE, SIDE) uint8."""
    image = np.zeros((SIDE + 2 * _AROUND,) * 2)
    for lines, contrast in ((scene.long, LONG_CONTRAST), (scene.short, SHORT_CONTRAST)):
        for line in lines:
            for dash in line.dashes:
                _stamp(image, dash.head, contrast * _coverage(dash.direction, LENGTH, THICKNESS / 2))
    for disc in scene.discs:
        _stamp(image, disc, _coverage((0.0, 0.0), 0.0, RADIUS))
    inside = image[_AROUND:-_AROUND, _AROUND:-_AROUND]
    return np.floor(255 * np.minimum(inside, 1) + 0.5).astype(np.uint8)


def _stamp(image: np.ndarray, centre: Point, shape: np.ndarray) -> None:
    y, x = (c + _AROUND - _REACH for c in centre)
    part = image[y : y + len(shape), x : x + len(shape)]
    np.maximum(part, shape, out=part)


@cache
def _coverage(direction: Direction, length: float, radius: float) -> np.ndarray:
    """How much of each of (2 _REACH + 1)² pixels lies within `radius` of a stroke, in [0, 1]. It begins in the centre
    of the middle pixel and goes against `direction`."""
    pixels = 2 * _REACH + 1
    places = (np.arange(pixels * SUBPIXELS) + 0.5) / SUBPIXELS - pixels / 2
    y, x = places[:, None], places[None, :]
    along = np.clip(-(y * direction[0] + x * direction[1]), 0, length)
    distance = (y + along * direction[0]) ** 2 + (x + along * direction[1]) ** 2
    inside = (distance <= radius**2 + 1e-6).reshape(pixels, SUBPIXELS, pixels, SUBPIXELS)
    return inside.mean(axis=(1, 3))


def _bit(y: int, x: int) -> int:
    return 1 << ((y + _AROUND) * _WIDTH + x + _AROUND)


BORDER = sum(
    _bit(y, x)
    for y in range(-_AROUND, SIDE + _AROUND)
    for x in range(-_AROUND, SIDE + _AROUND)
    if not (PADDING <= y < SIDE - PADDING and PADDING <= x < SIDE - PADDING)
)


@cache
def _room(direction: Direction, length: float, least: float) -> int:
    """The pixels that a stroke with its margin covers by more than `least`; it begins in the picture's first pixel."""
    covered = _coverage(direction, length, THICKNESS / 2 + MARGIN)
    return sum(_bit(int(y) - _REACH, int(x) - _REACH) for y, x in np.argwhere(covered > least))


def _at(shape: int, point: Point) -> int:
    shift = point[0] * _WIDTH + point[1]
    return shape << shift if shift >= 0 else shape >> -shift


def _crosses(taken: int, dash: Dash) -> bool:
    return bool(taken & _at(_room(dash.direction, LENGTH, FULL), dash.head))


def _space(dash: Dash) -> int:
    """What a dash and the gap before it take."""
    return _at(_room(dash.direction, LENGTH + 2 * MARGIN, HALF), dash.head)


def _move(point: Point, direction: Direction, distance: float) -> Point:
    y, x = (math.floor(p + distance * d + 0.5) for p, d in zip(point, direction, strict=True))
    return y, x


def _is_inside(point: Point) -> bool:
    return 0 <= point[0] < SIDE and 0 <= point[1] < SIDE


def _seed(origin: Point, direction: Direction) -> Line | None:
    """A line of one dash; None where it leaves the picture."""
    head, bend = _move(origin, direction, LENGTH), _move(origin, direction, -MARGIN)
    return Line(origin, [Dash(head, direction, bend)]) if _is_inside(head) and _is_inside(bend) else None


@cache
def _weights(direction: Direction) -> list[float]:
    """For every step how well it goes on in this direction: the squared cosine of the angle, 0 beyond a right one."""
    return [max(0.0, direction[0] * y + direction[1] * x) ** 2 for y, x in STEP_DIRECTIONS]


def _extend(generator: random.Random, line: Line, taken: int) -> bool:
    """Appends a dash. False where there is no room. `taken` does not hold the line's last dash."""
    last = line.dashes[-1]
    bend = _move(last.bend, last.direction, LENGTH + 2 * MARGIN)
    near = taken | taken << 1 | taken >> 1 | taken << _WIDTH | taken >> _WIDTH
    heads = [(bend[0] + y, bend[1] + x) for y, x in STEPS]
    if not _is_inside(bend):
        return False
    weights = [
        0.0 if near & _bit(*head) else weight for head, weight in zip(heads, _weights(last.direction), strict=True)
    ]
    total = sum(weights)
    if total < 1e-4:
        return False
    for _ in range(TRIES):
        number = _choose(weights, generator.random() * total)
        dash = Dash(heads[number], STEP_DIRECTIONS[number], bend)
        if not _crosses(taken, dash):
            line.dashes.append(dash)
            return True
    return False


def _choose(weights: list[float], place: float) -> int:
    """The number of the weight in which `place` falls when they lie side by side."""
    chosen = 0
    for number, weight in enumerate(weights):
        if weight:
            chosen, place = number, place - weight
            if place < 0:
                break
    return chosen


def _two_lines(generator: random.Random) -> tuple[list[Line], int] | None:
    """Two long lines that begin SEED_DISTANCE apart, and what they take; None where they do not fit."""
    centre = 2 * SEED_DISTANCE
    free = SIDE - 2 * centre
    origin = centre + below(generator, free), centre + below(generator, free)
    other = _move(origin, DEGREES[below(generator, 360)], SEED_DISTANCE)
    lines = [_seed(point, DEGREES[below(generator, 360)]) for point in (origin, other)]
    found = [line for line in lines if line is not None]
    if len(found) < 2:
        return None
    taken = BORDER
    for _ in range(DASHES - 1):
        for line, rival in (found, found[::-1]):
            if not _extend(generator, line, taken | _space(rival.dashes[-1])):
                return None
            taken |= _space(line.dashes[-2])
    for line in found:
        taken |= _space(line.dashes[-1])
    return found, taken


def _short_line(generator: random.Random, taken: int) -> tuple[Line, int] | None:
    """A line between the others, and what is taken with it; None where it does not fit."""
    line = _seed((below(generator, SIDE), below(generator, SIDE)), DEGREES[below(generator, 360)])
    if line is None or _crosses(taken, line.dashes[0]):
        return None
    for _ in range(SHORT_DASHES - 1):
        if not _extend(generator, line, taken):
            return None
        taken |= _space(line.dashes[-2])
    return line, taken | _space(line.dashes[-1])
