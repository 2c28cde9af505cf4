import os

import pytest

from scripts.benchmarks import prediction as benchmark


@pytest.fixture
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(os.environ, "HF_HOME", str(tmp_path_factory.mktemp("hf_home")))


@pytest.mark.exhaustive
def test_a_small_run(offline, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    monkeypatch.setattr(benchmark, "BATCHES", (4,))
    assert benchmark.main(["--presets", "tiny", "--sentences", "21"]) == 0
    said = capsys.readouterr().out
    for row in ("predict, softmax", "predict, lln_diag", "pipeline, batches of 4"):
        assert row in said


def test_what_predicts_something_else_is_not_timed():
    texts = benchmark.sentences(9, 5)
    numbers = [len(text) / 100 for text in texts]
    benchmark.check(lambda _: numbers, lambda _: numbers, texts)
    with pytest.raises(RuntimeError, match=r"differ by 1.0e-03"):
        benchmark.check(lambda _: numbers, lambda _: [number + 1e-3 for number in numbers], texts)
    with pytest.raises(RuntimeError, match=r"that spread by 0.0e\+00"):
        benchmark.check(lambda _: [0.5] * 9, lambda _: [0.5] * 9, texts)
