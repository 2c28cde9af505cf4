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
