"""attn_implementation="lln_window": the numbers of sdpa for encoders of transformers 5 with sliding windows."""

import pytest
import torch
import transformers

from tests.conversion.sources import TRANSFORMERS_5

if not TRANSFORMERS_5:
    pytest.skip("needs transformers 5", allow_module_level=True)

from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
)

from lln_fairseq.hub import LLN_WINDOW, window_attention

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 4}
IDS = {"pad_token_id": 0, "cls_token_id": 1, "bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
CLASSES = (ModernBertForMaskedLM, ModernBertForSequenceClassification, ModernBertForTokenClassification)
LENGTHS = (1, 63, 64, 65, 129, 190, 2048)  # the window has 64 tokens on each side


def make_pair(model_class=ModernBertForMaskedLM, **options):
    """Return two models with the same random weights, whose attention is sdpa and lln_window."""
    models = []
    for implementation in ("sdpa", LLN_WINDOW):
        # A configuration of its own: the attention is read from it in each call.
        config = ModernBertConfig(vocab_size=99, max_position_embeddings=4096, **SIZES, **IDS, **options)
        config._attn_implementation = implementation
        torch.manual_seed(0)
        models.append(model_class(config).eval())
    return models


def test_models_of_a_pair_differ_only_in_their_attention():
    models = make_pair()
    assert [model.config._attn_implementation for model in models] == ["sdpa", LLN_WINDOW]
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0.0, atol=0.0)


def make_batch(length, side=None, padding=None):
    """Return tokens (2, length), of which the second row has padding at this side, by default a third of it."""
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(2, length, dtype=torch.long)
    if padding is None:
        padding = length // 3
    if side == "left":
        mask[1, :padding] = 0
    elif side == "right":
        mask[1, length - padding :] = 0
    tokens = torch.randint(3, 99, (2, length), generator=generator)
    return {"input_ids": tokens * mask, "attention_mask": mask}


def results(model, batch):
    """Return the hidden states of all layers and the outputs at real tokens, and the gradients of all parameters."""
    real = batch["attention_mask"].bool()
    outputs = model(**batch, output_hidden_states=True)
    logits = outputs.logits
    if logits.dim() == 3:
        logits = logits[real]
    model.zero_grad()
    logits.sin().sum().backward()
    values = [logits.detach(), *(states[real].detach() for states in outputs.hidden_states)]
    return [*values, *(parameter.grad for parameter in model.parameters())]


def assert_same_results(models, batch, tolerance=1e-5):
    expected, actual = (results(model, batch) for model in models)
    for x, y in zip(actual, expected, strict=True):
        assert (x - y).abs().max() <= tolerance * max(1.0, y.abs().max())


@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_hidden_states_and_gradients_are_those_of_sdpa(side, model_class):
    pooling = "cls"
    if side == "left":
        pooling = "mean"  # the first token is padding, whose state has no meaning
    models = make_pair(model_class, classifier_pooling=pooling)
    for length in LENGTHS:
        assert_same_results(models, make_batch(length, side))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_longer_than_the_window_changes_nothing(side):
    for length in (190, 400):
        assert_same_results(make_pair(), make_batch(length, side, length - 5))


def test_no_mask_is_a_mask_without_padding():
    _, model = make_pair()
    batch = make_batch(300)
    with torch.no_grad():
        torch.testing.assert_close(model(batch["input_ids"]).logits, model(**batch).logits)


def test_windows_of_another_width():
    assert_same_results(make_pair(local_attention=20), make_batch(150, "right"))


def test_bfloat16_is_as_exact_as_sdpa():
    models = make_pair()
    batch = make_batch(300, "right")
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        exact = models[0](**batch).logits[real]
        errors = [(model.bfloat16()(**batch).logits[real].float() - exact).abs().max() for model in models]
    assert errors[1] < 1.5 * errors[0]


def test_compiled_model_gives_the_same_numbers():
    _, model = make_pair()
    batch = make_batch(300, "right")
    real = batch["attention_mask"].bool()
    expected = model(**batch).logits
    expected[real].sin().sum().backward()
    gradient = model.model.layers[1].attn.Wqkv.weight.grad.clone()
    model.zero_grad()
    torch._dynamo.reset()
    actual = torch.compile(model, backend="aot_eager")(**batch).logits
    actual[real].sin().sum().backward()
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.model.layers[1].attn.Wqkv.weight.grad, gradient, rtol=1e-3, atol=1e-5)


def test_other_masks_are_rejected():
    _, model = make_pair()
    tokens = make_batch(300)["input_ids"]
    four_dimensions = torch.ones(2, 1, 300, 300, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"needs a padding mask \(B, N\) = \(2, 300\), got \(2, 1, 300, 300\)"):
        model(tokens, attention_mask=four_dimensions)
    with pytest.raises(ValueError, match="lln_window does not support cu_seq_lens_q"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 100, 300]))
    with pytest.raises(ValueError, match="lln_window does not support output_attentions"):
        window_attention(model.model.layers[0].attn, *torch.ones(3, 1, 2, 9, 32), None, output_attentions=True)


def test_decoders_are_rejected():
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation(LLN_WINDOW)
    with pytest.raises(ValueError, match="lln_window supports only padding and windows"):
        model(torch.arange(9)[None])


def test_layers_that_it_cannot_compute_are_rejected():
    layer = make_pair()[1].model.layers[1].attn
    q, k, v = torch.ones(3, 1, 2, 200, 32)
    with pytest.raises(ValueError, match=r"does not know the window of ModernBertAttention: .* sliding_window=64"):
        window_attention(layer, q, k, v, None, sliding_window=64)
    with pytest.raises(ValueError, match="does not support is_causal"):
        window_attention(layer, q, k, v, None, is_causal=True)
    with pytest.raises(ValueError, match="needs queries, keys and values of the same length and size"):
        window_attention(layer, q, k[:, :, :100], v[:, :, :100], None)


def test_grouped_keys_are_repeated():
    layer = make_pair()[1].model.layers[1].attn
    q = torch.randn(1, 4, 300, 32)
    k, v = torch.randn(2, 1, 2, 300, 32)
    actual, _ = window_attention(layer, q, k, v, None, sliding_window=65, scaling=0.3)
    token = torch.arange(300)
    visible = (token[:, None] - token).abs() <= 64
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(actual.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
