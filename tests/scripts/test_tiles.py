"""Test the search for the fastest tile of a kernel."""

from lln_fairseq.ops.backends.triton import launch
from scripts.benchmarks import tiles


def test_tile_search_keeps_the_fastest(monkeypatch, capsys):
    key = (90, 2, 64)
    before = launch.TILES[key]
    current = before.state
    milliseconds_by_stages = {current.stages: 2.0, 1: 1.0, 3: 4.0}
    monkeypatch.setattr(launch, "capability", lambda device: 90)
    monkeypatch.setitem(launch.TILES, key, before)  # restores it after the test
    monkeypatch.setattr(tiles, "candidate_tiles", lambda tile: [tile._replace(stages=1), tile._replace(stages=3)])
    monkeypatch.setattr(
        tiles, "milliseconds", lambda run, device: milliseconds_by_stages[launch.TILES[key].state.stages]
    )
    sizes = ["--device", "cpu", "--tokens", "32", "--length", "32", "--heads", "1", "--dim", "16", "--repeats", "1"]

    assert tiles.main([*sizes, "--kernels", "state"]) == 0

    assert launch.TILES[key].state == current._replace(stages=1)
    assert "fastest" in capsys.readouterr().out
