import pytest

from scripts.benchmarks import sequence_parallel as benchmark


@pytest.mark.exhaustive
def test_short_run_reports_lengths_growth_and_sent_bytes(capsys):
    assert benchmark.main(["--tokens", "512", "1024"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["512", "1,024", "seconds"]
    heads = 4
    dim = 64
    moments = 4 * 6  # bytes of a head
    states = 4 * (dim * (dim + 2) + dim * (dim + 1))
    assert {row[-1] for row in rows[:2]} == {f"{heads * (moments + states) / 1e3:.1f}"}


def test_attention_that_cannot_share_a_sequence_is_rejected(capsys):
    assert benchmark.main(["--tokens", "64", "--attention", "softmax"]) == 1
    assert "softmax cannot split a sequence across workers" in capsys.readouterr().err
