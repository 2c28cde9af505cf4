"""Linear layers with packed weights: the packed copy follows every change of the weight, and training never uses it."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lln_fairseq.models.packed_linear import precisions
from lln_fairseq.models.packed_linear.choice import working_way
from lln_fairseq.models.packed_linear.layer import PackedWeights
from lln_fairseq.models.packed_linear.pack import pack_linear_layers
from lln_fairseq.models.packed_linear.precisions import WAYS, Int8Way, quantize_rows
from tests.models.test_softmax_layers import build_model


@pytest.fixture
def layer():
    """Return a layer in evaluation mode that has been used, so that it has a packed copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64)).eval()
    pack_linear_layers(model, model)
    apply(model[0])
    assert has_packed_copy(model[0])
    return model[0]


def has_packed_copy(layer):
    return layer.packed._packed is not None


@pytest.fixture
def kernel_calls(monkeypatch):
    """Return a list that gets an entry for every use of a packed weight."""
    calls = []
    original = PackedWeights.multiply

    def counted(self, *args):
        calls.append(self)
        return original(self, *args)

    monkeypatch.setattr(PackedWeights, "multiply", counted)
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
    assert not has_packed_copy(other)
    change_in_place(other)
    assert_follows_weight(other)
    assert_follows_weight(layer)


def test_state_dict_and_parameters_stay_the_same():
    model = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64)).eval()
    names = list(model.state_dict())
    parameters = list(model.parameters())
    pack_linear_layers(model, model)
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


@pytest.fixture(params=[name for name, way in WAYS.items() if issubclass(way, Int8Way)])
def int8_way(request):
    """Return each way of computing in 8 bits that works on this processor."""
    way = WAYS[request.param]
    if working_way(way, torch.randn(64, 48), torch.zeros(64)) is None:
        pytest.skip(f"{request.param} does not work on this processor")
    return way


def random_layer():
    return nn.Linear(48, 64).requires_grad_(False)


@pytest.mark.parametrize("tokens_per_piece", [1, 2, 256])
@pytest.mark.parametrize("gelu", [False, True])
def test_int8_multiplies_quantized_numbers(int8_way, gelu, tokens_per_piece, monkeypatch):
    monkeypatch.setattr(precisions, "TOKENS_PER_PIECE", tokens_per_piece)
    layer = random_layer()
    x = random_input()
    numbers, scales, offsets = quantize_rows(x, int8_way.lowest, int8_way.dtype)
    assert (numbers * scales + offsets - x).abs().max() <= 0.501 * scales.max()
    weight_scales = layer.weight.abs().amax(dim=1, keepdim=True) / int8_way.largest_weight()
    weight = (layer.weight / weight_scales).round().double() * weight_scales
    expected = (numbers.double() * scales + offsets) @ weight.T + layer.bias
    if gelu:
        expected = F.gelu(expected)
    actual = int8_way(layer.weight, layer.bias)(x[None], gelu)[0]
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)


def test_int8_does_not_overflow(int8_way):
    way = int8_way(torch.ones(8, 4096), torch.zeros(8))
    x = torch.ones(3, 4096)
    x[1] = -1
    x[2, ::2] = -1
    expected = x.sum(dim=1)[:, None].expand(3, 8)
    torch.testing.assert_close(way(x), expected, rtol=1e-5, atol=1e-2)


def test_int8_gives_the_same_bits_whatever_the_other_tokens(int8_way):
    layer = random_layer()
    way = int8_way(layer.weight, layer.bias)
    x = torch.randn(300, 48)
    separately = torch.cat([way(row) for row in x.split(1)])
    assert torch.equal(way(x), separately)


@pytest.mark.parametrize("strides", ["rows", "columns", "sliced", "expanded"])
def test_int8_is_exact_for_whole_numbers_of_any_strides(int8_way, strides):
    for rows, in_features, out_features in itertools.product((1, 2, 257), (1, 2, 64), (1, 32)):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randint(-60, 61, (out_features, in_features), generator=generator).float()
        weight[:, 0] = int8_way.largest_weight()  # the scales are 1 then
        x = torch.randint(0, 256, (rows, in_features), generator=generator).float()
        x[:, -1] = 0
        x[:, 0] = 255
        if strides == "columns":
            x = x.t().contiguous().t()
        elif strides == "sliced":
            x = torch.cat([x, x], dim=1)[:, :in_features]
        elif strides == "expanded":
            x = x[:1].expand(rows, in_features)
        way = int8_way(weight, torch.zeros(out_features))
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(way(x).double(), expected, rtol=1e-6, atol=1e-3, msg=f"{x.shape}: {{}}".format)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_int8_keeps_numbers_that_are_not_finite(int8_way, value):
    layer = random_layer()
    way = int8_way(layer.weight, layer.bias)
    x = random_input()
    expected = way(x)
    x[2, 5] = value
    actual = way(x)
    assert not actual[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(actual[others], expected[others])


def test_int8_gives_the_bias_for_zeros(int8_way):
    layer = random_layer()
    assert torch.equal(int8_way(layer.weight, layer.bias)(torch.zeros(1, 48))[0], layer.bias)


# ---- whole models ----

PADDING = 1  # fairseq's padding symbol
SIZES = dict(encoder_embed_dim=64, encoder_ffn_embed_dim=96)


def padded_tokens():
    tokens = torch.randint(4, 60, (3, 21), generator=torch.Generator().manual_seed(2))
    tokens[1, 13:] = PADDING
    return tokens


def packed_copy(model):
    packed = copy.deepcopy(model)
    pack_linear_layers(packed, packed.encoder)
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
        {"attention": "window", "softmax_layers": "1", "rotary": True, "encoder_normalize_before": True},
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


@pytest.mark.parametrize("way", ["bfloat16", "qlinear", "int_mm"])
@pytest.mark.parametrize("attention", ["lln_diag", "softmax", "flash", "transformer_ls", "linformer", "tnn"])
def test_model_in_low_precision_is_near_float(attention, way, monkeypatch):
    if working_way(WAYS[way], torch.randn(64, 64), torch.zeros(64)) is None:
        pytest.skip(f"{way} does not work on this processor")
    monkeypatch.setenv("LLN_LINEAR", f"torch,{way}")
    model = build_model(**SIZES, attention=attention)
    packed = copy.deepcopy(model)
    precision = WAYS[way].precision
    assert pack_linear_layers(packed, packed.encoder.sentence_encoder.layers, precision) == precision
    with torch.no_grad():
        expected = model(padded_tokens(), features_only=True)[0]
        actual = packed(padded_tokens(), features_only=True)[0]
    assert 0 < (actual - expected).norm() / expected.norm() < 0.05


def test_feed_forward_part_stays_in_bfloat16_and_no_bit_changes(monkeypatch):
    if working_way(WAYS["bfloat16"], torch.randn(64, 64), torch.zeros(64)) is None:
        pytest.skip("bfloat16 does not work on this processor")
    monkeypatch.setenv("LLN_LINEAR", "torch,bfloat16")
    model = build_model(**SIZES)
    layers = model.encoder.sentence_encoder.layers
    pack_linear_layers(model, layers, "bfloat16")
    dtypes = []
    layers[0].fc1.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
    with torch.no_grad():
        actual = model(padded_tokens(), features_only=True)[0]
        monkeypatch.setattr(WAYS["bfloat16"], "gelu_dtype", torch.float32)
        expected = model(padded_tokens(), features_only=True)[0]
    assert dtypes == [torch.bfloat16, torch.float32]
    assert torch.equal(actual, expected)


def test_projections_are_one_product_unless_they_have_hooks(kernel_calls):
    model = packed_copy(build_model(**SIZES))
    attention = model.encoder.sentence_encoder.layers[0].self_attn
    outputs = []
    with torch.no_grad():
        model(padded_tokens(), features_only=True)
        assert attention.packed_projections in kernel_calls
        kernel_calls.clear()
        attention.q_proj.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        model(padded_tokens(), features_only=True)
    assert attention.packed_projections not in kernel_calls
    assert len(outputs) == 1


def test_changed_projections_are_used():
    model = build_model(**SIZES)
    packed = packed_copy(model)
    with torch.no_grad():
        packed(padded_tokens(), features_only=True)
        for changed in (model, packed):
            projection = changed.encoder.sentence_encoder.layers[1].self_attn.k_proj
            projection.weight.mul_(2)
            projection.bias.add_(1)
        expected = model(padded_tokens(), features_only=True)[0]
        actual = packed(padded_tokens(), features_only=True)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
