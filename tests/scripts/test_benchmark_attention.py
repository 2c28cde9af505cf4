import json
import time
from argparse import Namespace
from contextlib import contextmanager, nullcontext

import pytest
import torch

from lln_fairseq.attention import ATTENTION_REGISTRY
from lln_fairseq.timing import Spread
from scripts.benchmarks import attention as benchmark
from scripts.benchmarks import meter
from scripts.benchmarks.meter import peak_memory
from scripts.figures import speed
from tests.documentation import ROOT

# Without memory, which takes a process for each attention.
SMALL = ("--no-memory", "--lengths", "64", "128", "--heads", "2", "--head-dim", "32", "--repeats", "1")


@pytest.mark.exhaustive
def test_every_attention_is_measured(tmp_path, capsys):
    assert benchmark.main([*SMALL, "--json", str(tmp_path / "b.json")]) == 0

    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert {row["attention"] for row in rows} == {*ATTENTION_REGISTRY, "sdpa"}
    assert all(min(*row["forward"], *row["both"]) > 0 for row in rows)
    assert "lln_diag" in capsys.readouterr().out


def test_attentions_may_have_options_and_are_drawn(tmp_path):
    spec = "lln_diag:mix=joint_offset,block_size=16"
    output = tmp_path / "b.json"
    picture = tmp_path / "b.png"

    assert benchmark.main([*SMALL, "--attentions", spec, "--json", str(output)]) == 0

    result = json.loads(output.read_text())
    assert {row["attention"] for row in result["rows"]} == {spec, "sdpa"}
    assert result["provenance"]["versions"]["torch"] == torch.__version__
    assert speed.main([str(output), str(ROOT / "docs/results/gpu_times.json"), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("spec", "messages"),
    [("lnn", ["'lnn'", "lln"]), ("lln:mix=joint", ["'mix'"])],
)
def test_unknown_attention_or_option_is_rejected(spec, messages, capsys):
    with pytest.raises(SystemExit):
        benchmark.main([*SMALL, "--attentions", spec])

    error = capsys.readouterr().err
    assert all(message in error for message in messages)


def test_table_shows_floors_as_fractions_of_the_times():
    one_tensor_per_ms = 4 * 2 * 3 * 50 * 10 * 1e3
    floors = benchmark.floors(torch.ones(2, 3, 50, 10), bandwidth=one_tensor_per_ms)
    card = (Spread(8, 8, 8), Spread(22, 22, 22))
    rows = [benchmark.Row("sdpa", 50, Spread(9, 9, 9), Spread(25, 25, 25), None, floors, card)]

    assert benchmark.results_table(rows, ["sdpa"]).splitlines()[1].split()[-2:] == ["0.50", "0.50"]


@pytest.fixture
def fake_gpu(monkeypatch):
    """Replace torch's streams, graphs and waiting by fakes. Return a list to which every wait appends a word."""
    waits = []

    class Stream:
        def wait_stream(self, other):
            waits.append("stream")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("synchronize"))
    return waits


def test_call_that_cannot_be_captured_has_no_replay(fake_gpu, monkeypatch, capsys):
    @contextmanager
    def refuse(graph):
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    assert meter.captured(lambda: None) is None
    assert capsys.readouterr().err == "not captured: operation not permitted when stream is capturing\n"


def test_host_waits_only_before_and_after_its_calls(fake_gpu):
    events = []

    def run():
        events.append(len(fake_gpu))
        time.sleep(0.002)

    assert 2 <= meter.host_milliseconds(run, calls=4) < 200
    assert events == [0, 1, 1, 1, 1]
    assert fake_gpu == ["synchronize", "synchronize"]


def prepare_with_temporary_tensors(count, args):
    """Return a call of an attention that allocates `count` tensors of the size of q and frees them again."""

    def attention(q, k, v):
        temporary = torch.ones(count, *q.shape)
        out = q + temporary.sum(0)
        del temporary
        return out

    benchmark.attention_function = lambda *_: attention
    return benchmark.prepare_both("x", 4096, args)


def test_peak_memory_includes_temporary_tensors():
    """Besides the temporary tensors, their sum and the output are alive, and q's gradient if it is in other memory."""
    count = 16
    args = Namespace(lengths=[4096], tokens=1, heads=12, head_dim=64, device="cpu", dtype="float32")
    bytes_of_q = 4 * 12 * 4096 * 64

    peak = peak_memory("cpu", prepare_with_temporary_tensors, count, args)

    assert count + 2 - 1e-2 <= peak / bytes_of_q <= count + 3 + 1e-2
