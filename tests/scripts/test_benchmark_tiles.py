"""Test the choice of tiles to measure with launches that are recorded instead of made, because they need a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from lln_fairseq.ops.backends.triton import tiles as package_tiles
from lln_fairseq.ops.backends.triton.tiles import Tile
from scripts.benchmarks import tiles

CANDIDATE = Tile(128, 2, 5)


@pytest.fixture
def launched(monkeypatch):
    """Return a list that gets the options of every launch, as they are on a GPU of compute capability 9.0."""
    options = []
    monkeypatch.setattr(package_tiles, "INTERPRETED", False)
    monkeypatch.setattr(package_tiles, "capability", lambda device: 90)
    monkeypatch.setattr(
        "lln_fairseq.ops.backends.triton.launch_kernel", lambda kernel, *tensors: options.append(kernel.constants)
    )
    tiles.forget_plans()
    yield options
    tiles.forget_plans()


def run_kernel(kernel):
    arguments = ["--dtype", "float16", "--tokens", "2048", "--heads", "1"]
    args = tiles.parse_arguments(arguments)
    args.device = "cpu"
    length = 2048 if kernel == "grad_state_splits" else 512
    tiles.make_call(kernel, length, args)()


@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_candidate_replaces_tile_of_one_kernel_only_inside(launched, kernel):
    settings = CANDIDATE.options
    with tiles.selected_tile(kernel, CANDIDATE):
        run_kernel(kernel)
    with_candidate = [{name: x.get(name) for name in settings} == settings for x in launched]
    # The kernel that sums over the global keys has the tile of the pass that reads its sums.
    assert sum(with_candidate) == (2 if kernel == "keys_diag" else 1)
    launched.clear()

    run_kernel(kernel)

    assert launched
    assert not any({name: x.get(name) for name in settings} == settings for x in launched)


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what happens without a GPU")
def test_machine_without_gpu_is_reported(capsys):
    assert tiles.main([]) == 1
    assert capsys.readouterr().err.strip().endswith("tiles are timed on a GPU, and torch finds none")
