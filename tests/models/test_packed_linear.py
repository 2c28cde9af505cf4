"""Linear layers with packed weights: the packed copy follows every change of the weight, and training never uses it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lln_fairseq.modules import packed_linear
from lln_fairseq.modules.packed_linear import (
    LARGEST_WEIGHT,
    Int8Linear,
    PackedLinear,
    pack_linear_layers,
    quantize_linear_layers,
    quantize_rows,
)
from tests.models.test_softmax_layers import build_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


@pytest.fixture
def layer():
    """Return a layer in evaluation mode that has been used, so that it has a packed copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64)).eval()
    pack_linear_layers(model)
    apply(model[0])
    assert model[0]._packed is not None
    return model[0]


@pytest.fixture
def kernel_calls(monkeypatch):
    """Return a list that gets an entry for every use of a packed weight."""
    calls = []
    original = PackedLinear._packed_weight

    def counted(self):
        calls.append(self)
        return original(self)

    monkeypatch.setattr(PackedLinear, "_packed_weight", counted)
    return calls


def random_input(dtype=torch.float32):
    return torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).to(dtype)


def apply(layer, dtype=torch.float32):
    with torch.no_grad():
        return layer(random_input(dtype))


def assert_follows_weight(layer, dtype=torch.float32):
    """Check that the layer computes with its weight as it is now."""
    expected = F.linear(random_input(dtype), layer.weight, layer.bias).detach()
    torch.testing.assert_close(apply(layer, dtype), expected, rtol=1e-5, atol=1e-5)


def change_by_optimizer(layer):
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(random_input()).sum().backward()
    optimizer.step()


def change_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def change_data(layer):
    layer.weight.data = 2 * layer.weight.data


def change_data_in_place_and_train(layer):
    layer.weight.data.mul_(2)
    layer.train()
    layer.eval()


def load_other_state(layer):
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})


def assign_other_state(layer):
    layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()}, assign=True)


def replace_parameter(layer):
    layer.weight = nn.Parameter(2 * layer.weight.detach())


CHANGES = (
    change_by_optimizer,
    change_in_place,
    change_data,
    change_data_in_place_and_train,
    load_other_state,
    assign_other_state,
    replace_parameter,
)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weight_is_used(layer, change):
    before = layer.weight.detach().clone()
    change(layer)
    assert not torch.equal(layer.weight, before)
    assert_follows_weight(layer)


def test_converted_layers_follow_their_weight(layer):
    assert_follows_weight(layer.to(torch.float64), torch.float64)
    change_in_place(layer)
    assert_follows_weight(layer.to(torch.float32))
    assert_follows_weight(layer.to(torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_have_their_own_weight(layer, copy_of):
    other = copy_of(layer)
    assert other._packed is None
    change_in_place(other)
    assert_follows_weight(other)
    assert_follows_weight(layer)


def test_state_dict_and_parameters_stay_the_same():
    model = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64)).eval()
    names = list(model.state_dict())
    parameters = list(model.parameters())
    pack_linear_layers(model)
    apply(model)
    assert list(model.state_dict()) == names
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))


def test_kernel_is_used_only_for_inference(layer, kernel_calls):
    layer(random_input())
    layer(random_input()).sum().backward()
    assert layer.weight.grad is not None
    layer.train()
    apply(layer)
    layer.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert apply(layer).dtype == torch.bfloat16
    assert not kernel_calls
    apply(layer)
    assert len(kernel_calls) == 1


def test_tracing_uses_operations_of_torch(layer, kernel_calls):
    with torch.no_grad():
        program = torch.export.export(layer, (random_input(),))
        traced = torch.jit.trace(layer, random_input(), check_trace=False)
        per_row = torch.func.vmap(layer)(random_input())
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(random_input())
    assert not kernel_calls
    expected = apply(layer)
    for actual in (program.module()(random_input()), traced(random_input()), per_row, compiled):
        torch.testing.assert_close(actual, expected)


def test_input_of_another_width_is_rejected(layer):
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.zeros(48, 5))


def test_hooks_are_called(layer):
    outputs = []
    layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    assert apply(layer) is outputs[0]


# ---- 8 bits ----


def int8_layer(bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64, bias=bias)).eval()
    quantize_linear_layers(model)
    assert type(model[0]) is Int8Linear
    return model[0]


@pytest.mark.parametrize("tokens_per_piece", [1, 2, 256])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_layer_multiplies_quantized_numbers(bias, gelu, tokens_per_piece, monkeypatch):
    monkeypatch.setattr(packed_linear, "TOKENS_PER_PIECE", tokens_per_piece)
    layer = int8_layer(bias)
    x = random_input()
    numbers, token_scales = quantize_rows(x, 127)
    weight, scales = quantize_rows(layer.weight.detach(), LARGEST_WEIGHT)
    expected = (numbers.double() * token_scales) @ (weight.double() * scales).T
    if bias:
        expected += layer.bias.detach()
    if gelu:
        expected = F.gelu(expected)
    with torch.no_grad():
        actual = layer(x[None], gelu=gelu)[0]
    torch.testing.assert_close(actual, expected.float())


def column_major(x):
    return x.t().contiguous().t()


def part_of_wider(x):
    return F.pad(x, (3, 5))[:, 3:-5]


def every_other_row(x):
    return x.repeat_interleave(2, dim=0)[::2]


def with_single_strides(x):
    """Return x, which has one row or one column, with the strides (1, 1)."""
    return torch.empty_strided(x.shape, (1, 1)).copy_(x)


LAYOUTS = (torch.clone, column_major, part_of_wider, every_other_row)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("in_features", [1, 2, 3, 48, 64, 257])
@pytest.mark.parametrize("out_features", [1, 2, 33])
def test_int8_layer_is_exact_for_whole_numbers_of_any_strides(rows, in_features, out_features, monkeypatch):
    monkeypatch.setattr(packed_linear, "TOKENS_PER_PIECE", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # pieces of 4 rows, the last one of 1 to 4
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-127, 128, (rows, in_features), generator=generator).float()
    weight = torch.randint(-63, 64, (out_features, in_features), generator=generator).float()
    x[:, 0] = 127  # so that all scales are 1
    weight[:, -1] = -63
    expected = (x.long() @ weight.long().t()).float()
    layouts = LAYOUTS
    if 1 in x.shape:
        layouts = (*LAYOUTS, with_single_strides)
    for layout_of_weight in LAYOUTS:
        layer = Int8Linear(in_features, out_features, bias=False).eval()
        layer.weight = nn.Parameter(layout_of_weight(weight))
        for layout in layouts:
            with torch.no_grad():
                actual = layer(layout(x))
            assert torch.equal(actual, expected), (layout_of_weight.__name__, layout.__name__)


def test_int8_layer_is_near_float():
    layer = int8_layer()
    expected = F.linear(random_input(), layer.weight, layer.bias).detach()
    assert 0 < (apply(layer) - expected).norm() / expected.norm() < 0.02


def test_largest_numbers_do_not_overflow():
    layer = nn.Linear(4096, 1, bias=False).eval()
    layer.weight.data.fill_(1.0)
    quantize_linear_layers(layer)
    x = torch.ones(3, 4096)
    x[1] = -1
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[:, 0], torch.tensor([4096.0, -4096.0, 4096.0]))


def test_int8_layer_follows_its_weight_and_trains_in_float():
    layer = int8_layer()
    before = apply(layer)
    change_in_place(layer)
    torch.testing.assert_close(apply(layer) - layer.bias, 2 * (before - layer.bias), rtol=1e-4, atol=1e-4)
    expected = F.linear(random_input(), layer.weight, layer.bias)
    assert torch.equal(layer(random_input()), expected)  # with gradients


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_int8_layer_keeps_numbers_that_are_not_finite(value):
    layer = int8_layer()
    x = random_input()
    expected = apply(layer)
    x[2, 5] = value
    with torch.no_grad():
        actual = layer(x)
    assert not actual[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(actual[others], expected[others])


def test_token_of_zeros_gives_the_bias():
    layer = int8_layer()
    with torch.no_grad():
        assert torch.equal(layer(torch.zeros(1, 48))[0], layer.bias)


# ---- whole models ----

PADDING = 1  # fairseq's padding symbol
SIZES = dict(encoder_embed_dim=64, encoder_ffn_embed_dim=96)


def padded_tokens():
    tokens = torch.randint(4, 60, (3, 21), generator=torch.Generator().manual_seed(2))
    tokens[1, 13:] = PADDING
    return tokens


def packed_copy(model):
    packed = copy.deepcopy(model)
    pack_linear_layers(packed)
    return packed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "softmax", "activation_fn": "relu"},
        {"encoder_normalize_before": True},
        {"feed_forward_tokens": 8},
        {"softmax_layers": "1"},
        {"rotary": True},
    ],
    ids=str,
)
def test_packed_model_gives_the_same_output(options, kernel_calls):
    model = build_model(**SIZES, **options)
    packed = packed_copy(model)
    with torch.no_grad():
        expected = model(padded_tokens(), features_only=True)[0]
        actual = packed(padded_tokens(), features_only=True)[0]
    assert kernel_calls
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_training_a_packed_model_changes_no_bit():
    model = build_model(**SIZES)
    packed = packed_copy(model)
    losses = []
    for trained in (model, packed):
        with torch.no_grad():
            trained(padded_tokens())
        trained.train()
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(2):
            loss = trained(padded_tokens())[0].square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert losses[:2] == losses[2:]
    assert all(map(torch.equal, model.parameters(), packed.parameters()))


@pytest.mark.parametrize("attention", ["lln_diag", "softmax", "flash", "transformer_ls", "linformer", "tnn"])
def test_int8_model_is_near_float(attention):
    model = build_model(**SIZES, attention=attention)
    quantized = copy.deepcopy(model)
    quantize_linear_layers(quantized.encoder.sentence_encoder.layers)
    with torch.no_grad():
        expected = model(padded_tokens(), features_only=True)[0]
        actual = quantized(padded_tokens(), features_only=True)[0]
    assert 0 < (actual - expected).norm() / expected.norm() < 0.05
