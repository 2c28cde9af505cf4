"""What README and docs/ show is run as it stands, and what they name is there."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from lln_fairseq.attention import ATTENTION_REGISTRY, MECHANISMS, build_attention
from lln_fairseq.ops.lln import lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
}


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


def names_of(pattern):
    return sorted({found for page in PAGES.values() for found in re.findall(pattern, page)})


@pytest.mark.parametrize("path", names_of(r"(?:lln_fairseq|scripts|tests|data_prep|configs)/[\w/]+\.\w+"))
def test_every_file_they_name_exists(path):
    of_an_example = path.endswith(("NAME.yaml", "shifted_relu.yaml"))
    assert of_an_example or (ROOT / path).is_file()


@pytest.mark.parametrize("program", names_of(r"python -m ((?:lln_fairseq|scripts|data_prep)[\w.]*)"))
def test_every_program_they_name_exists(program):
    path = ROOT / program.replace("lln_fairseq.data_prep", "data_prep").replace(".", "/")  # its name in a wheel
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", PAGES[page]):
        assert (ROOT / page.parent / link).exists(), link


def test_the_table_of_attentions_is_complete():
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGES[Path("docs/attentions.md")], re.MULTILINE))
    missing, unknown = sorted(set(MECHANISMS) - listed), sorted(listed - set(MECHANISMS))
    assert not missing, f"docs/attentions.md has no row for {', '.join(missing)}: add | `{missing[0]}` | what it is |"
    assert not unknown, f"docs/attentions.md has rows for {', '.join(unknown)}, which are not registered"
