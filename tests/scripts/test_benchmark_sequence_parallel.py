import json

import pytest

from scripts.benchmarks import sequence_parallel as benchmark


@pytest.mark.exhaustive
def test_a_short_run_measures_time_memory_and_bytes(tmp_path, capsys):
    tokens = (512, 1024)
    assert (
        benchmark.main(["--tokens", *map(str, tokens), "--repeats", "1", "--json", str(tmp_path / "layer.json")]) == 0
    )
    rows = json.loads((tmp_path / "layer.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == list(tokens)
    heads, dim = 4, 64
    for row in rows:
        assert row["seconds"] > 0
        assert 0 < row["peak"] <= row["total_peak"] <= 2 * row["peak"]
        moments = 8 * 6  # float64; the rest is float32, see docs/sequence_parallel.md
        states = 4 * (dim * (dim + 2) + dim * (dim + 1))
        assert row["sent"] == heads * (moments + states)
    assert "seconds grow like N^" in capsys.readouterr().out


def test_an_attention_that_cannot_is_refused(capsys):
    assert benchmark.main(["--tokens", "64", "--attention", "softmax"]) == 1
    assert capsys.readouterr().err == "error: attention softmax cannot share a sequence over workers\n"
