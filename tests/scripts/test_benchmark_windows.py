"""Tests of the benchmark of sliding windows, with a model of one layer."""

import json

import pytest

from tests.conversion.sources import TRANSFORMERS_5

if not TRANSFORMERS_5:
    pytest.skip("needs transformers 5", allow_module_level=True)

import transformers

from scripts.benchmarks import windows


@pytest.fixture
def small_model(monkeypatch):
    """Make the models small."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ModernBertConfig

    def small_config(**options):
        return config(**sizes, **options)

    monkeypatch.setattr(windows.transformers, "ModernBertConfig", small_config)


def test_writes_times_of_every_implementation(small_model, tmp_path, capsys):
    arguments = [
        "--lengths",
        "300",
        "--layers",
        "3",
        "--repeats",
        "1",
        "--no-memory",
        "--json",
        str(tmp_path / "out.json"),
    ]

    assert windows.main(arguments) == 0

    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["attention"] for row in results] == ["sdpa", "lln_window", "eager"]
    assert all(row["milliseconds"] > 0 for row in results)
    assert "lln_window" in capsys.readouterr().out


def test_other_hidden_states_are_an_error(small_model, monkeypatch, capsys):
    monkeypatch.setattr(windows, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="sdpa gives other hidden states than sdpa"):
        windows.main(["--lengths", "9", "--layers", "1", "--no-memory"])
