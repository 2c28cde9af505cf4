"""The examples of README run as they stand,."""

import re
import textwrap
from pathlib import Path

import torch

from lln_fairseq.attention import ATTENTION_REGISTRY, build_attention
from lln_fairseq.ops.lln import lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_of_a_new_attention(monkeypatch):
    monkeypatch.setattr("lln_fairseq.attention.registry.ATTENTION_REGISTRY", registry := {})
    code = re.search(r"for example `shifted_relu.py`:\n\n((?:    .*\n|\n)+)", README)[1]
    exec(textwrap.dedent(code), {"__name__": "example"})
    monkeypatch.setitem(ATTENTION_REGISTRY, "shifted_relu", registry["shifted_relu"])
    monkeypatch.setattr("lln_fairseq.attention.registry.ATTENTION_REGISTRY", ATTENTION_REGISTRY)
    attention = build_attention("shifted_relu", num_heads=2, head_dim=8, max_positions=9, shift=0.1)
    q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(q, k, v), attention.attention_matrix(q, k) @ v)


def test_the_example_on_tensors():
    code = re.search(r"## Use it on tensors, without fairseq\n\n((?:    .*\n)+)", README)[1]
    q, k, v = torch.randn(3, 2, 2, 9, 64)
    names = dict(q=q, k=k, v=v, key_padding_mask=torch.zeros(2, 9, dtype=torch.bool))
    exec(textwrap.dedent(code), names)
    assert torch.equal(names["out"], lln_diag_attention(q, k, v, *match_moments(q, k)))
