"""Models with rotary positions: computed, trained, converted and refused."""

import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.attention import Context
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.adapt import POSITIONS
from lln_fairseq.models.multihead_attention import LLNMultiheadAttention
from tests.conversion.sources import add_noise, compute_logits, padded_batch
from tests.fairseq_runs import LLN, MASKED_LM, train
from tests.models.small_model import build_model
from tests.ops.test_rotary import rotate_pairwise

ROTARY = (*MASKED_LM, *LLN, "--rotary")
PAD = 1


BASE = 700  # not the default, so that an attention without it is noticed


def rotated_heads(x, positions):
    """Split x (T, B, 2 · D) into heads, (B, 2, T, D), and rotate each token by its position in positions (B, T)."""
    heads = x.unflatten(-1, (2, -1)).permute(1, 2, 0, 3).clone()
    for b in range(heads.shape[0]):
        for h in range(heads.shape[1]):
            for t in range(heads.shape[2]):
                heads[b, h, t] = rotate_pairwise(heads[b, h, t], positions[b][t], BASE)
    return heads


@pytest.mark.parametrize("attention", ["softmax", "lln", "lln_diag"])
@pytest.mark.parametrize("case", ["whole", "padded"])
def test_queries_and_keys_are_rotated(attention, case):
    torch.manual_seed(0)
    options = dict(max_positions=16, rotary=True, rotary_base=BASE)
    module = LLNMultiheadAttention(32, 2, attention, {}, **options).double().eval()
    x = torch.randn(7, 2, 32, dtype=torch.float64)
    mask = None
    positions = 2 * [list(range(7))]
    if case == "padded":
        mask = torch.zeros(2, 7, dtype=torch.bool)
        mask[0, 5:] = True
        mask[1, :3] = True
        positions = [list(range(7)), [0, 0, 0, 0, 1, 2, 3]]
    out = module(x, Context(mask))

    q = rotated_heads(module.q_proj(x), positions)
    k = rotated_heads(module.k_proj(x), positions)
    v = module.v_proj(x).unflatten(-1, (2, -1)).permute(1, 2, 0, 3)
    expected = module.out_proj(module.attention(q, k, v, Context(mask)).permute(2, 0, 1, 3).flatten(2))
    real = torch.ones(7, 2, dtype=torch.bool) if mask is None else ~mask.T
    torch.testing.assert_close(out[real], expected[real])


def test_softmax_layers_are_rotated_too():
    options = dict(attention="lln", softmax_layers="1")
    model = build_model(**options, rotary=True, rotary_base=BASE)
    attentions = [layer.self_attn for layer in model.encoder.sentence_encoder.layers]
    assert [(attention.rotary, attention.rotary_base) for attention in attentions] == [(True, BASE)] * 2
    assert model.state_dict().keys() == build_model(**options).state_dict().keys()


@pytest.mark.parametrize("attention", ["softmax", "lln", "elu"])
def test_padding_on_the_left_has_no_influence(attention):
    model = build_model(attention=attention, rotary=True)
    tokens = torch.randint(4, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.full((1, 5), PAD), tokens], dim=1)
    torch.testing.assert_close(model(padded)[0][:, 5:], model(tokens)[0])


def test_heads_with_an_odd_number_of_features_are_rejected():
    with pytest.raises(UserError, match="rotary positions need heads with an even number of features, got 5"):
        build_model(encoder_embed_dim=10, rotary=True)


def test_conversion_keeps_the_rotation(corpus, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *ROTARY, "--max-update", 1)
    source = add_noise(tmp_path / "run/checkpoint_last.pt")
    arguments = ["convert", str(source), "--dictionary", str(corpus / "dict.txt")]
    assert main([*arguments, str(tmp_path / "out"), "--attention", "lln_diag"]) == 0
    assert load_checkpoint_lazily(str(tmp_path / "out/model.pt"))["cfg"]["model"]["rotary"] is True
    assert torch.equal(
        compute_logits(tmp_path / "out/model.pt", padded_batch()), compute_logits(source, padded_batch())
    )
    assert main([*arguments, str(tmp_path / "long"), "--positions", "100"]) == 0
    state = load_checkpoint_lazily(str(tmp_path / "long/model.pt"))
    longer = state["model"][POSITIONS]
    learned = load_checkpoint_lazily(str(source))["model"][POSITIONS]
    new = 102 - len(learned)
    assert torch.equal(longer[:-new], learned)
    torch.testing.assert_close(longer[-new:], learned[2:].mean(dim=0).expand(new, -1))
    head_dim = state["cfg"]["model"]["encoder_embed_dim"] // state["cfg"]["model"]["encoder_attention_heads"]
    expected = 10000 * (100 / (len(learned) - 2)) ** (head_dim / (head_dim - 2))
    assert state["cfg"]["model"]["rotary_base"] == pytest.approx(expected)
    model, _ = load_model(str(source), str(corpus))
    assert model.encoder.sentence_encoder.layers[0].self_attn.rotary
