"""Recording, ablation and the probe: the measurements are those of the model, which they leave as it was."""

import itertools

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from lln_fairseq.analysis import layer_scalars, measure
from lln_fairseq.analysis.events import read_curves
from lln_fairseq.analysis.probe import Probe, ablated, record_layers
from lln_fairseq.analysis.rank_collapse import relative_residual
from lln_fairseq.attention import ATTENTION_REGISTRY
from tests.helpers import with_representatives
from tests.models.small_model import build_model


def make_model(attention="lln_diag", **options):
    """Return a small RoBERTa, and a batch of two sequences, the second with padding."""
    model = build_model(**{"attention": attention, "encoder_layers": 3} | options)
    tokens = torch.randint(4, 60, (2, 50))
    tokens[1, 30:] = 1
    return model, {"src_tokens": tokens, "src_lengths": torch.tensor([50, 30])}


def compute_features(model, batch):
    model.eval()
    with torch.no_grad():
        return model(**batch, features_only=True)[0]


@pytest.mark.parametrize("options", [{}, {"encoder_normalize_before": True}, {"checkpoint_activations": True}])
def test_record_holds_what_the_model_computes(options):
    normalize_before = "encoder_normalize_before" in options
    model, batch = make_model(**options)

    layers = record_layers(model, batch)

    assert len(layers) == 3
    for layer, next_layer in itertools.pairwise(layers):
        assert torch.equal(layer.after, next_layer.before)
    if not normalize_before:
        assert torch.equal(layers[-1].after, compute_features(model, batch))
    module = model.encoder.sentence_encoder.layers[0]
    x = layers[0].before
    if normalize_before:
        x = module.self_attn_layer_norm(x)
    expected = module.self_attn.q_proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
    torch.testing.assert_close(layers[0].q, expected.detach())
    assert torch.equal(layers[0].context.padding, batch["src_tokens"] == 1)


def test_recording_leaves_model_and_random_generator_as_they_were():
    model, batch = make_model(encoder_layerdrop=0.5, dropout=0.5)
    model.train()
    frozen = model.encoder.sentence_encoder.layers[1].self_attn.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()

    record_layers(model, batch)

    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert not frozen.training
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_recording_leaves_model_as_it_was_after_an_error():
    model, _ = make_model()
    model.train()
    with pytest.raises(TypeError):
        record_layers(model, {"no_such_input": 1})
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("options", [{}, {"encoder_normalize_before": True}])
def test_ablation_changes_the_layers_only_for_a_while(options):
    model, batch = make_model(encoder_layers=6, **options)
    forwards = [layer.forward for layer in model.encoder.sentence_encoder.layers]
    expected = compute_features(model, batch)

    with ablated(model):
        torch.testing.assert_close(compute_features(model, batch), expected)
    residuals = {}
    for skip, mlp in itertools.product((True, False), repeat=2):
        with ablated(model, skip, mlp):
            last = record_layers(model, batch)[-1]
        residuals[skip, mlp] = relative_residual(last.after[0]).item()

    assert [layer.forward for layer in model.encoder.sentence_encoder.layers] == forwards
    assert torch.equal(compute_features(model, batch), expected)
    assert len({round(value, 6) for value in residuals.values()}) == 4
    # At initialization, attention is nearly uniform: without skip connections all tokens become one vector.
    assert residuals[True, True] > 0.3
    assert residuals[False, False] < residuals[True, True] / 10


@pytest.mark.parametrize("attention", with_representatives(sorted(ATTENTION_REGISTRY), "lln_diag", "nystrom"))
def test_probe_writes_the_instruments_of_every_layer(attention, tmp_path):
    model, batch = make_model(attention)
    with SummaryWriter(tmp_path / "probe") as writer:
        probe = Probe(batch, writer)
        probe(model, 5)
        probe(model.half().bfloat16(), 10)
    curves = read_curves(tmp_path)

    expected_tags = {"probe/seconds"}
    for number, layer in enumerate(model.encoder.sentence_encoder.layers):
        mechanism = layer.self_attn.attention  # mechanisms may differ by depth
        names = {*layer_scalars.NAMES[:3], "residual"}
        if mechanism.rows_sum_to_one:
            names.update(measure.NAMES)
        if mechanism.alpha_beta(*2 * [torch.ones(1, 2, 3, 4)]):
            names.update(layer_scalars.NAMES)
        expected_tags |= {f"probe/{name}/layer_{number:02d}" for name in names}
    assert set(curves) == expected_tags
    for tag, curve in curves.items():
        assert curve.steps == [5, 10]
        if tag != "probe/seconds":
            assert curve.values[0] == pytest.approx(curve.values[1], rel=0.1, abs=0.02), tag

    layer = record_layers(model.float(), batch)[0]
    if layer.attention.rows_sum_to_one:
        measured = measure.measure_batch(layer.attention, layer.q, layer.k, layer.context)
        entropy = measured.mean(dim=(0, 2))[measure.NAMES.index("entropy")].item()
        assert curves["probe/entropy/layer_00"].values[1] == pytest.approx(entropy, rel=1e-2)


def test_model_without_an_attention_of_the_package_is_rejected():
    with pytest.raises(ValueError, match=r"no attention of this package.*convert --attention softmax"):
        record_layers(torch.nn.Linear(2, 2), {})
