"""Run the example of README and the new attention of docs/attentions.md, whose table must list the registry."""

import re

import torch

from lln_fairseq.attention import ATTENTION_REGISTRY, MECHANISMS, build_attention
from tests.documentation import README, ROOT, code_blocks

ATTENTIONS = ROOT / "docs/attentions.md"


def test_first_example_runs(capsys):
    names = {}
    (code,) = code_blocks(README, "python")
    exec(code, names)
    assert names["out"].isfinite().all()
    assert capsys.readouterr().out == "torch.Size([2, 12, 4096, 64])\n"
    assert "print(out.shape)  # torch.Size([2, 12, 4096, 64])\n" in code


def test_new_attention_example_registers_and_matches_its_matrix(monkeypatch):
    registry = {}
    monkeypatch.setattr("lln_fairseq.attention.registry.ATTENTION_REGISTRY", registry)
    (code,) = [block for block in code_blocks(ATTENTIONS, "python") if "shifted_relu" in block]
    exec(code, {"__name__": "example"})
    monkeypatch.setitem(ATTENTION_REGISTRY, "shifted_relu", registry["shifted_relu"])
    monkeypatch.setattr("lln_fairseq.attention.registry.ATTENTION_REGISTRY", ATTENTION_REGISTRY)

    attention = build_attention("shifted_relu", num_heads=2, head_dim=8, max_positions=9, shift=0.1)
    q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(q, k, v), attention.attention_matrix(q, k) @ v)


def test_attention_table_is_complete():
    page = ATTENTIONS.read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    missing = sorted(set(MECHANISMS) - listed)
    unknown = sorted(listed - set(MECHANISMS))
    assert not missing, f"docs/attentions.md has no row for {', '.join(missing)}: add | `{missing[0]}` | what it is |"
    assert not unknown, f"docs/attentions.md has rows for {', '.join(unknown)}, which are not registered"


def read_result(name):
    return json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))


def iteration_speed(attention, length):
    """Return the time of a training iteration with softmax divided by that of an attention."""
    times = {}
    for row in read_result("iteration_times.json")["times"][0]["rows"]:
        times[row["attention"], row["column"]] = row["time"][0]
    return times["softmax", length] / times[attention, length]


def pair_speed(device, length):
    """Return the time of a prediction of a long pair with softmax divided by that of blocks with a global question."""
    for times in read_result("long_pairs.json")["times"]:
        if device in times["device"]:
            row = times["milliseconds"]["minilm"][length]
            return row["softmax"] / row["block_diag:block_size=128,global_tokens=first_segment"]
    raise AssertionError(f"no times on {device}")


def mean_score(name, kind, task, attention, stage):
    scores = []
    for row in read_result(name)["rows"]:
        if (row["kind"], row["task"], row["attention"]) == (kind, task, attention):
            scores.append(row["scores"][stage]["test"])
    return 100 * statistics.mean(scores)


def gpu_updates(attention, length):
    (updates,) = read_result("gpu_times.json")["updates"]
    rates = updates["thousand_tokens_per_second"]
    return rates[attention][length] / rates["softmax"][length]
