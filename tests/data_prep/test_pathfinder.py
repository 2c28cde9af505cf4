"""Test Pathfinder: labels by connected components of the lines, and pictures by their scenes."""

import random
from hashlib import sha256
from itertools import pairwise

import numpy as np
import pytest
from scipy import ndimage

from data_prep import pathfinder
from data_prep.chunks import draw_chunk, draw_rows

SCALE = 16  # grid points per pixel


@pytest.fixture(scope="module")
def scenes():
    generator = random.Random("scenes")
    return [pathfinder.draw_scene(generator) for _ in range(200)]


def corners(line):
    """Return the points that a line connects: its origin, and the bend and head of each dash."""
    points = [line.origin, line.dashes[0].head]
    for dash in line.dashes[1:]:
        points += [dash.bend, dash.head]
    return points


def draw_without_gaps(lines):
    """Draw the lines without gaps on a fine grid."""
    size = pathfinder.IMAGE_SIZE * SCALE
    grid = np.zeros((size, size), dtype=bool)
    for line in lines:
        points = np.array(corners(line), dtype=float) * SCALE + SCALE // 2
        for start, end in pairwise(points):
            steps = np.linspace(start, end, 8 * SCALE).round().astype(int)
            grid[steps[:, 0], steps[:, 1]] = True
    return grid


def test_label_says_if_discs_are_connected(scenes):
    for scene in scenes:
        lines = [*scene.long, *scene.short]
        components, number = ndimage.label(draw_without_gaps(lines), structure=np.ones((3, 3)))
        assert number == len(lines)  # no two lines touch
        first, second = (components[y * SCALE + SCALE // 2, x * SCALE + SCALE // 2] for y, x in scene.discs)
        assert first
        assert second
        assert (first == second) == (scene.label == 1)
    assert 70 < sum(scene.label for scene in scenes) < 130


def test_lines_have_expected_number_of_dashes(scenes):
    for scene in scenes:
        assert [len(line.dashes) for line in scene.long] == [pathfinder.LONG_DASHES] * 2
        assert all(len(line.dashes) == pathfinder.SHORT_DASHES for line in scene.short)


def test_long_lines_never_turn_back(scenes):
    for scene in scenes:
        for line in scene.long:
            for previous, dash in pairwise(line.dashes):
                assert np.dot(previous.direction, dash.direction) > 0


def test_discs_lie_on_ends_of_long_lines(scenes):
    for scene in scenes:
        first, second = scene.long
        assert set(scene.discs) <= {*first.ends, *second.ends}


def test_picture_shows_scene(scenes):
    for scene in scenes:
        image = pathfinder.render_scene(scene)
        assert image.shape == (32, 32)
        assert all(image[disc] == 255 for disc in scene.discs)
        for line in (*scene.long, *scene.short):
            assert all(image[dash.head] > 60 for dash in line.dashes)
        assert 0.5 < (image == 0).mean() < 0.9


def test_pictures_do_not_depend_on_number_of_workers():
    one = draw_rows(pathfinder.draw_pathfinder_row, "pathfinder", 1, 12, workers=1, chunk_size=3)
    two = draw_rows(pathfinder.draw_pathfinder_row, "pathfinder", 1, 12, workers=2, chunk_size=3)

    assert one == two


def test_pictures_of_seed_never_change():
    rows = draw_chunk(pathfinder.draw_pathfinder_row, "pathfinder", 1, 20, 0)

    assert sha256(b"".join(row.symbols for row in rows)).hexdigest()[:16] == "faaabcf416e0636e"
