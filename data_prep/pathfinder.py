"""Draw pictures of Pathfinder-32: two dashed lines and two discs, labeled 1 if both discs are on the same line.

With label 1, one of the two lines has a disc at each end. With label 0, each of the two lines has a disc at one end.
Short lines are distractors.

The task is that of the Long Range Arena (arXiv 2011.04006, section 2.2.5). The lines are those of Linsley et al. 2018
(arXiv 1805.08315): each dash continues roughly in the direction of the previous one. The parameters are those of LRA's
hardest set, with 14 dashes. The published pictures are not reproduced, since they depend on the rounding of image
libraries. All arithmetic in this module gives the same bits on every machine.

A set of pixels, such as the occupied pixels, is stored as the bits of one integer. There is one bit for each pixel, row
by row, of a board that is larger than the picture on every side. A shape is moved by shifting its bits. The margin of
the board keeps a shape from wrapping around into another row. A stroke is a straight line between two points.
"""

import math
import random
from functools import cache
from typing import NamedTuple

import numpy as np

from .chunks import DrawnRow, random_below

IMAGE_SIZE = 32  # pixels
PADDING = 1  # pixels at the border of the picture that no dash may cover
DASH_GAP = 1  # pixels between the dashes of a line, and around a dash
DASH_LENGTH = 2  # pixels
DASH_THICKNESS = 0.5  # pixels
LONG_DASHES = 14  # dashes of a long line
SEED_DISTANCE = 7  # pixels between the origins of the two long lines
SHORT_LINES = 5  # at most; a short line that does not fit is left out
SHORT_DASHES = 4  # dashes of a short line
DISC_RADIUS = 1.5  # pixels
LONG_CONTRAST = 1.5  # brightness of a pixel that a long line covers; brightness above 1 becomes 1
SHORT_CONTRAST = 2.0  # the same for short lines
DASH_TRIES = 3  # attempts to add a dash to a line
SHORT_LINE_TRIES = 5  # attempts to draw a short line
SUBPIXELS = 4  # samples per pixel in each dimension
COLLISION_COVERAGE = 0.9  # a pixel that a new dash covers by more than this must be free
OCCUPIED_COVERAGE = 0.5  # a pixel that a dash covers by more than this is occupied for other lines

_BOARD_MARGIN = 8  # rows and columns of the board on each side of the picture
_BOARD_SIZE = IMAGE_SIZE + 2 * _BOARD_MARGIN
_REACH = 6  # the occupied pixels of a dash, with the gap before it, are at most this far from its head

Point = tuple[int, int]  # row and column of a pixel
Direction = tuple[float, float]  # change of row and column, a vector of length 1


class Dash(NamedTuple):
    """One dash of a line.

    Attributes:
        head: the end of the dash that is farther along the line.
        direction: the direction from the other end to the head.
        bend: the point in the gap before the dash where the line changes direction.
    """

    head: Point
    direction: Direction
    bend: Point


class Line(NamedTuple):
    """A dashed line. Its origin is the free end of the first dash."""

    origin: Point
    dashes: list[Dash]

    @property
    def ends(self) -> tuple[Point, Point]:
        """The two ends of the line: its origin, and the head of its last dash."""
        return self.origin, self.dashes[-1].head


class Scene(NamedTuple):
    """The content of a picture: two long lines, at most SHORT_LINES short lines, the disc positions, and the label."""

    long: list[Line]
    short: list[Line]
    discs: tuple[Point, Point]
    label: int


def _direction_of_degree(degree: int) -> Direction:
    """Return the direction of an angle. It is rounded, as the last digits of a cosine differ between machines."""
    angle = math.radians(degree)
    return round(math.sin(angle), 9), round(math.cos(angle), 9)


def _step_offsets() -> list[Point]:
    """Return the offsets (rows, columns) whose rounded length is DASH_LENGTH + DASH_GAP, row by row."""
    offsets = []
    for y in range(-4, 5):
        for x in range(-4, 5):
            if math.floor(math.sqrt(y * y + x * x) + 0.5) == DASH_LENGTH + DASH_GAP:
                offsets.append((y, x))
    return offsets


DIRECTIONS = [_direction_of_degree(degree) for degree in range(360)]
# The offsets from a bend to the possible heads of the next dash, and the directions of these offsets.
STEPS = _step_offsets()
STEP_DIRECTIONS = [(y / math.sqrt(y * y + x * x), x / math.sqrt(y * y + x * x)) for y, x in STEPS]


def draw_pathfinder_row(generator: random.Random) -> DrawnRow:
    """Draw a random picture. Return its IMAGE_SIZE² pixels, row by row, and its label."""
    scene = draw_scene(generator)
    return DrawnRow(render_scene(scene).tobytes(), scene.label)


def draw_scene(generator: random.Random) -> Scene:
    """Draw a random scene: two long lines, short lines that touch no other line, and the discs."""
    long_lines = None
    while long_lines is None:
        long_lines = _draw_long_lines(generator)
    long, occupied = long_lines
    short: list[Line] = []
    for _ in range(SHORT_LINES):
        for _ in range(SHORT_LINE_TRIES):
            short_line = _draw_short_line(generator, occupied)
            if short_line is not None:
                line, occupied = short_line
                short.append(line)
                break
    first = random_below(generator, 2)
    label = random_below(generator, 2)
    second = 1 - first
    if label:
        second = first
    discs = (long[first].origin, long[second].ends[1])
    return Scene(long, short, discs, label)


def render_scene(scene: Scene) -> np.ndarray:
    """Return the picture of a scene, an array of shape (IMAGE_SIZE, IMAGE_SIZE) and dtype uint8."""
    image = np.zeros((_BOARD_SIZE, _BOARD_SIZE))
    for lines, contrast in ((scene.long, LONG_CONTRAST), (scene.short, SHORT_CONTRAST)):
        for line in lines:
            for dash in line.dashes:
                _stamp(image, dash.head, contrast * _coverage(dash.direction, DASH_LENGTH, DASH_THICKNESS / 2))
    for disc in scene.discs:
        _stamp(image, disc, _coverage((0.0, 0.0), 0.0, DISC_RADIUS))
    inside = image[_BOARD_MARGIN:-_BOARD_MARGIN, _BOARD_MARGIN:-_BOARD_MARGIN]
    return np.floor(255 * np.minimum(inside, 1) + 0.5).astype(np.uint8)


def _stamp(image: np.ndarray, center: Point, shape: np.ndarray) -> None:
    """Draw a shape into the image in place. Each pixel becomes the maximum of its old value and the shape's value.

    Args:
        image: the board, (_BOARD_SIZE, _BOARD_SIZE).
        center: the pixel of the picture on which the shape is centered.
        shape: the values of the shape, (2 _REACH + 1, 2 _REACH + 1).
    """
    top = center[0] + _BOARD_MARGIN - _REACH
    left = center[1] + _BOARD_MARGIN - _REACH
    part = image[top : top + len(shape), left : left + len(shape)]
    np.maximum(part, shape, out=part)


@cache
def _coverage(direction: Direction, length: float, radius: float) -> np.ndarray:
    """Return the fraction of the area of each pixel that lies within `radius` pixels of a stroke.

    The stroke starts at the center of the middle pixel and runs `length` pixels against `direction`.

    Returns:
        Fractions in [0, 1], of shape (2 _REACH + 1, 2 _REACH + 1). The array is cached and must not be changed.
    """
    pixels = 2 * _REACH + 1
    places = (np.arange(pixels * SUBPIXELS) + 0.5) / SUBPIXELS - pixels / 2
    y = places[:, None]
    x = places[None, :]
    along = np.clip(-(y * direction[0] + x * direction[1]), 0, length)
    distance = (y + along * direction[0]) ** 2 + (x + along * direction[1]) ** 2
    inside = (distance <= radius**2 + 1e-6).reshape(pixels, SUBPIXELS, pixels, SUBPIXELS)
    return inside.mean(axis=(1, 3))


def _pixel_bit(y: int, x: int) -> int:
    """Return an integer with the bit of one pixel. y and x are relative to the picture and may be in the margin."""
    return 1 << ((y + _BOARD_MARGIN) * _BOARD_SIZE + x + _BOARD_MARGIN)


def _border_bits() -> int:
    """Return the bits of the pixels that no dash may cover: the board's margin and the picture's padding."""
    first = PADDING
    last = IMAGE_SIZE - PADDING - 1
    bits = 0
    for y in range(-_BOARD_MARGIN, IMAGE_SIZE + _BOARD_MARGIN):
        for x in range(-_BOARD_MARGIN, IMAGE_SIZE + _BOARD_MARGIN):
            if not (first <= y <= last and first <= x <= last):
                bits |= _pixel_bit(y, x)
    return bits


BORDER = _border_bits()


@cache
def _stroke_bits(direction: Direction, length: float, min_coverage: float) -> int:
    """Return the bits of the pixels of which a widened stroke covers more than the fraction `min_coverage`.

    The stroke is as thick as a dash with a gap of DASH_GAP pixels on both sides. It starts at the first pixel of the
    picture and runs `length` pixels against `direction`.
    """
    coverage = _coverage(direction, length, DASH_THICKNESS / 2 + DASH_GAP)
    return sum(_pixel_bit(int(y) - _REACH, int(x) - _REACH) for y, x in np.argwhere(coverage > min_coverage))


def _move_bits(bits: int, point: Point) -> int:
    """Return the bits of a shape after moving it from the first pixel of the picture to the pixel `point`."""
    shift = point[0] * _BOARD_SIZE + point[1]
    if shift >= 0:
        return bits << shift
    return bits >> -shift


def _collides(occupied: int, dash: Dash) -> bool:
    """Return True if a dash would cover any of the occupied pixels, which are given as bits."""
    covered = _move_bits(_stroke_bits(dash.direction, DASH_LENGTH, COLLISION_COVERAGE), dash.head)
    return bool(occupied & covered)


def _occupied_by(dash: Dash) -> int:
    """Return the bits of the pixels that a dash and the gap before it occupy."""
    return _move_bits(_stroke_bits(dash.direction, DASH_LENGTH + 2 * DASH_GAP, OCCUPIED_COVERAGE), dash.head)


def _move_point(point: Point, direction: Direction, distance: float) -> Point:
    """Return the pixel nearest to the point that lies `distance` pixels from `point` in this direction."""
    y = math.floor(point[0] + distance * direction[0] + 0.5)
    x = math.floor(point[1] + distance * direction[1] + 0.5)
    return y, x


def _is_inside(point: Point) -> bool:
    return 0 <= point[0] < IMAGE_SIZE and 0 <= point[1] < IMAGE_SIZE


def _start_line(origin: Point, direction: Direction) -> Line | None:
    """Return a line with one dash, or None if the dash or its bend leaves the picture."""
    head = _move_point(origin, direction, DASH_LENGTH)
    bend = _move_point(origin, direction, -DASH_GAP)
    if _is_inside(head) and _is_inside(bend):
        return Line(origin, [Dash(head, direction, bend)])
    return None


@cache
def _step_weights(direction: Direction) -> list[float]:
    """Return the unnormalized probability of each of the STEPS after a dash with this direction.

    The probability is the squared cosine of the angle between the step and the dash. It is 0 for angles of more than 90
    degrees. The list is cached and must not be changed.
    """
    return [max(0.0, direction[0] * y + direction[1] * x) ** 2 for y, x in STEP_DIRECTIONS]


def _extend_line(generator: random.Random, line: Line, occupied: int) -> bool:
    """Append a random dash to the line in place. Return True if this is possible.

    Args:
        generator: draws the dash.
        line: the line to extend.
        occupied: the bits of the occupied pixels, without the pixels of the line's last dash.

    Returns:
        False if the next bend leaves the picture, if occupied pixels block all steps, or if DASH_TRIES random dashes
        collide with occupied pixels. The line is then unchanged.
    """
    last = line.dashes[-1]
    bend = _move_point(last.bend, last.direction, DASH_LENGTH + 2 * DASH_GAP)
    if not _is_inside(bend):
        return False
    near_occupied = occupied | occupied << 1 | occupied >> 1 | occupied << _BOARD_SIZE | occupied >> _BOARD_SIZE
    heads = [(bend[0] + y, bend[1] + x) for y, x in STEPS]
    weights = []
    for head, weight in zip(heads, _step_weights(last.direction), strict=True):
        if near_occupied & _pixel_bit(*head):
            weights.append(0.0)
        else:
            weights.append(weight)
    total = sum(weights)
    if total < 1e-4:
        return False
    for _ in range(DASH_TRIES):
        step = _choose_index(weights, generator.random() * total)
        dash = Dash(heads[step], STEP_DIRECTIONS[step], bend)
        if not _collides(occupied, dash):
            line.dashes.append(dash)
            return True
    return False


def _choose_index(weights: list[float], position: float) -> int:
    """Return the index of the interval that contains `position`. The weights are the lengths of adjacent intervals.

    The first interval starts at 0. If `position` lies past the end because of rounding, return the last interval with a
    positive length.
    """
    chosen = 0
    for index, weight in enumerate(weights):
        if weight:
            chosen = index
            position -= weight
            if position < 0:
                break
    return chosen


def _draw_long_lines(generator: random.Random) -> tuple[list[Line], int] | None:
    """Draw two random long lines whose origins are SEED_DISTANCE apart.

    Returns:
        A tuple of the two lines and the bits of the pixels that the lines and the border occupy. None if the lines do
        not fit into the picture.
    """
    margin = 2 * SEED_DISTANCE
    free = IMAGE_SIZE - 2 * margin
    first_row = margin + random_below(generator, free)
    first_column = margin + random_below(generator, free)
    first_origin = (first_row, first_column)
    second_origin = _move_point(first_origin, DIRECTIONS[random_below(generator, 360)], SEED_DISTANCE)
    first = _start_line(first_origin, DIRECTIONS[random_below(generator, 360)])
    second = _start_line(second_origin, DIRECTIONS[random_below(generator, 360)])
    if first is None or second is None:
        return None
    occupied = BORDER
    for _ in range(LONG_DASHES - 1):
        for line, opposite in ((first, second), (second, first)):
            if not _extend_line(generator, line, occupied | _occupied_by(opposite.dashes[-1])):
                return None
            occupied |= _occupied_by(line.dashes[-2])
    for line in (first, second):
        occupied |= _occupied_by(line.dashes[-1])
    return [first, second], occupied


def _draw_short_line(generator: random.Random, occupied: int) -> tuple[Line, int] | None:
    """Draw a random short line on pixels that are not `occupied`.

    Returns:
        A tuple of the line and the occupied pixels including those of the line. None if the line does not fit.
    """
    row = random_below(generator, IMAGE_SIZE)
    column = random_below(generator, IMAGE_SIZE)
    line = _start_line((row, column), DIRECTIONS[random_below(generator, 360)])
    if line is None or _collides(occupied, line.dashes[0]):
        return None
    for _ in range(SHORT_DASHES - 1):
        if not _extend_line(generator, line, occupied):
            return None
        occupied |= _occupied_by(line.dashes[-2])
    return line, occupied | _occupied_by(line.dashes[-1])
