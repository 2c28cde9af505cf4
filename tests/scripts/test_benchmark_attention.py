import json
from argparse import Namespace

import pytest
import torch

from lln_fairseq.attention import ATTENTION_REGISTRY
from scripts.benchmarks import attention as benchmark
from scripts.benchmarks.meter import Spread, copy_bandwidth, peak_memory


@pytest.mark.exhaustive
def test_smoke_run_covers_every_attention(tmp_path, capsys):
    outputs = ["--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]

    # Without memory, which takes a process for each attention.
    assert benchmark.main(["--smoke", "--no-memory", *outputs]) == 0

    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert {row["attention"] for row in rows} == {*ATTENTION_REGISTRY, "sdpa"}
    assert all(min(*row["forward"], *row["both"]) > 0 for row in rows)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "lln_diag" in capsys.readouterr().out


def test_attentions_may_have_options(tmp_path):
    spec = "lln_diag:mix=joint_offset,block_size=16"
    output = tmp_path / "b.json"

    assert benchmark.main(["--smoke", "--no-memory", "--attentions", spec, "--json", str(output)]) == 0

    assert {row["attention"] for row in json.loads(output.read_text())["rows"]} == {spec, "sdpa"}


@pytest.mark.parametrize(
    ("spec", "messages"),
    [("lnn", ["'lnn'", "lln"]), ("lln:mix=joint", ["'mix'"])],
)
def test_unknown_attention_or_option_is_rejected(spec, messages, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--smoke", "--attentions", spec])

    error = capsys.readouterr().err
    assert all(message in error for message in messages)


def test_table_shows_floors_as_fractions_of_the_times():
    one_tensor_per_ms = 4 * 2 * 3 * 50 * 10 * 1e3
    floors = benchmark.floors(torch.ones(2, 3, 50, 10), bandwidth=one_tensor_per_ms)
    rows = [benchmark.Row("sdpa", 50, Spread(8, 8, 8), Spread(22, 22, 22), None, floors)]

    assert benchmark.results_table(rows, ["sdpa"]).splitlines()[1].split()[-2:] == ["0.50", "0.50"]


def test_copy_bandwidth_is_positive():
    assert copy_bandwidth("cpu", 2**20) > 0


def prepare_with_temporary_tensors(count, args):
    """Return a call of an attention that allocates `count` tensors of the size of q and frees them again."""

    def attention(q, k, v):
        temporary = torch.ones(count, *q.shape)
        out = q + temporary.sum(0)
        del temporary
        return out

    benchmark.attention_function = lambda *_: attention
    return benchmark.prepare_both("x", 4096, args)


@pytest.mark.parametrize("count", [8, 16])
def test_peak_memory_includes_temporary_tensors(count):
    """Besides the temporary tensors, their sum and the output are alive, and q's gradient if it is in other memory."""
    args = Namespace(lengths=[4096], tokens=1, heads=12, head_dim=64, device="cpu", dtype="float32")
    bytes_of_q = 4 * 12 * 4096 * 64

    peak = peak_memory("cpu", prepare_with_temporary_tensors, count, args)

    assert count + 2 - 1e-2 <= peak / bytes_of_q <= count + 3 + 1e-2
