import pytest

from scripts.benchmarks import sequence_parallel as benchmark


@pytest.mark.exhaustive
def test_a_short_run_measures_time_memory_and_bytes(capsys):
    assert benchmark.main(["--tokens", "512", "1024"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["512", "1,024", "seconds"]
    heads, dim = 4, 64
    moments = 8 * 6  # float64; the rest is float32, see docs/sequence_parallel.md
    states = 4 * (dim * (dim + 2) + dim * (dim + 1))
    assert {row[-1] for row in rows[:2]} == {f"{heads * (moments + states) / 1e3:.1f}"}


def test_an_attention_that_cannot_is_refused(capsys):
    assert benchmark.main(["--tokens", "64", "--attention", "softmax"]) == 1
    assert capsys.readouterr().err == "error: attention softmax cannot share a sequence over workers\n"
