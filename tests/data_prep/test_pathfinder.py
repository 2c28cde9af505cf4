"""Pathfinder: the label against connected components of what was drawn, and the picture against the scene."""

import random
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
from scipy import ndimage

from data_prep import pathfinder
from data_prep.chunks import draw_chunk, draw_rows

FINE = 16  # parts of a pixel


@pytest.fixture(scope="module")
def scenes():
    generator = random.Random("scenes")
    return [pathfinder.draw_scene(generator) for _ in range(200)]


def corners(line):
    first, *others = line.dashes
    return [line.origin, first.head, *(point for dash in others for point in (dash.bend, dash.head))]


def drawn(lines):
    """The lines without their gaps on a fine grid."""
    board = np.zeros((pathfinder.SIDE * FINE,) * 2, dtype=bool)
    for line in lines:
        points = np.array(corners(line), dtype=float) * FINE + FINE // 2
        for start, end in pairwise(points):
            steps = np.linspace(start, end, 8 * FINE).round().astype(int)
            board[steps[:, 0], steps[:, 1]] = True
    return board


def test_the_label_by_connected_components(scenes):
    for scene in scenes:
        board = drawn([*scene.long, *scene.short])
        components, number = ndimage.label(board, structure=np.ones((3, 3)))
        assert number == len(scene.long) + len(scene.short)  # no two lines touch
        first, second = (components[y * FINE + FINE // 2, x * FINE + FINE // 2] for y, x in scene.discs)
        assert first
        assert second
        assert (first == second) == (scene.label == 1)
    assert 70 < sum(scene.label for scene in scenes) < 130


def test_lines_have_their_dashes_and_discs_lie_on_ends(scenes):
    for scene in scenes:
        assert [len(line.dashes) for line in scene.long] == [pathfinder.DASHES] * 2
        assert {len(line.dashes) for line in scene.short} <= {pathfinder.SHORT_DASHES}
        ends = {point for line in scene.long for point in line.ends}
        assert set(scene.discs) <= ends
        for line in scene.long:
            for before, dash in pairwise(line.dashes):
                assert np.dot(before.direction, dash.direction) > 0  # never back


def test_the_picture_shows_the_scene(scenes):
    for scene in scenes:
        image = pathfinder.picture(scene)
        assert image.shape == (32, 32)
        assert all(image[disc] == 255 for disc in scene.discs)
        for line in (*scene.long, *scene.short):
            assert all(image[dash.head] > 60 for dash in line.dashes)
        assert 0.5 < (image == 0).mean() < 0.9


def test_the_same_pictures_whatever_the_number_of_processes():
    one, two = (draw_rows(pathfinder.draw, "pathfinder", 1, 12, workers, size=3) for workers in (1, 2))
    assert one == two


def test_a_seed_means_the_same_pictures_for_ever():
    rows = draw_chunk(pathfinder.draw, "pathfinder", 1, 20, 0)
    assert sha256(b"".join(row.symbols for row in rows)).hexdigest()[:16] == "faaabcf416e0636e"
