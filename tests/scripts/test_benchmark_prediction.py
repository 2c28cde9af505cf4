import json
import logging
import os

import pytest
import torch

from scripts.benchmarks import prediction as benchmark


@pytest.fixture
def offline(monkeypatch, tmp_path_factory):
    """Keep Hugging Face's libraries from using the network and the user's cache, and log again afterwards."""
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(os.environ, "HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
    yield
    logging.disable(logging.NOTSET)  # the benchmark hides what is logged, and other tests read it


@pytest.mark.exhaustive
def test_lengths_are_timed_for_every_model(offline, capsys):
    assert benchmark.main(["--preset", "tiny", "--lengths", "5", "40", "--repeats", "1"]) == 0

    out = capsys.readouterr().out
    for row in ("lln_diag", "transformers, sdpa"):
        assert row in out


def test_attentions_and_layouts_are_timed_on_pairs(offline, tmp_path, capsys):
    times = tmp_path / "times.json"
    spec = "block_diag:block_size=4,global_tokens=first_segment"
    words = ["--preset", "small", "--lengths", "12", "--first-text", "5", "--attentions", "softmax", spec]
    words += ["local_global", "--repeats", "1", "--without", "onnxruntime", "transformers, sdpa, bfloat16"]

    assert benchmark.main([*words, "--json", str(times)]) == 0

    assert benchmark.random_tokens(12, 5)[[0, 4, 5, 11]].tolist() == [0, 2, 2, 2]
    result = json.loads(times.read_text())
    assert result["provenance"]["versions"]["torch"] == torch.__version__
    names = result["milliseconds"]["12"].keys()
    assert {"softmax", spec, "local_global", "transformers, sdpa"} <= names
    assert not any(name.startswith(("onnxruntime", "transformers, sdpa, bfloat16")) for name in names)
    assert spec in capsys.readouterr().out
