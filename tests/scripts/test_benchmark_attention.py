import json
import re
from argparse import Namespace

import pytest
import torch

from lln_fairseq.attention import ATTENTION_REGISTRY
from scripts.benchmarks import attention as benchmark
from scripts.benchmarks.meter import Spread, copy_bandwidth, peak_memory


@pytest.mark.exhaustive
def test_smoke_run_covers_every_attention(tmp_path, capsys):
    outputs = ["--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]
    assert benchmark.main(["--smoke", "--no-memory", *outputs]) == 0  # memory takes a process for each of them
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert {row["attention"] for row in rows} == {*ATTENTION_REGISTRY, "sdpa"}
    assert all(min(*row["forward"], *row["both"]) > 0 for row in rows)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "lln_diag" in capsys.readouterr().out


def test_rows_may_have_options(tmp_path, capsys):
    row = "lln_diag:mix=joint_offset,block_size=16"
    output = tmp_path / "b.json"
    assert benchmark.main(["--smoke", "--no-memory", "--attentions", row, "--json", str(output)]) == 0
    assert {found["attention"] for found in json.loads(output.read_text())["rows"]} == {row, "sdpa"}
    for wrong, message in {"lnn": "unknown attention 'lnn'.*lln", "lln:mix=joint": "no option 'mix'"}.items():
        with pytest.raises(SystemExit):
            benchmark.main(["--smoke", "--attentions", wrong])
        assert re.search(message, capsys.readouterr().err)


def test_causal_rows_are_compared(tmp_path, capsys):
    rows = ["lln:alpha=2,beta=2", "causal_lln", "causal_sdpa"]
    assert benchmark.main(["--smoke", "--no-memory", "--attentions", *rows, "--json", str(tmp_path / "b.json")]) == 0
    assert [row["attention"] for row in json.loads((tmp_path / "b.json").read_text())["rows"][:4]] == ["sdpa", *rows]


def test_times_are_compared_with_their_floors():
    assert copy_bandwidth("cpu", 2**20) > 0
    least = benchmark.floors(torch.ones(2, 3, 50, 10), bandwidth=12e6)  # 12,000 bytes take a millisecond
    rows = [benchmark.Row("sdpa", 50, Spread(8, 8, 8), Spread(22, 22, 22), None, least)]
    assert benchmark.table(rows, ["sdpa"]).splitlines()[1].split()[-2:] == ["0.50", "0.50"]


def prepare(moment, args):
    def attention(q, k, v):
        short = torch.ones(moment, *q.shape)
        out = q + short.sum(0)
        del short
        return out

    benchmark.attention_function = lambda *_: attention
    return benchmark.prepare_both("x", 4096, args)


def test_resident_peak_sees_tensors_that_are_alive_for_a_moment():
    """These, their sum and the output at once, and q's gradient unless it lies where they were; to the page."""
    args = Namespace(lengths=[4096], tokens=1, heads=12, head_dim=64, device="cpu", dtype="float32")
    bytes_of_q = 4 * 12 * 4096 * 64
    for moment in (8, 16):
        assert moment + 2 - 1e-2 <= peak_memory("cpu", prepare, moment, args) / bytes_of_q <= moment + 3 + 1e-2
