"""Models whose whole encoder layers are replaced.

They train, are fine-tuned and evaluated like other models. Everything that needs queries and keys, or RoBERTa's
own layers, rejects them with a message of one line.
"""

import functools
import json
import re

import pytest
import torch
from fairseq import checkpoint_utils

from lln_fairseq.__main__ import main
from lln_fairseq.analysis import probe
from lln_fairseq.attention import LAYER_REGISTRY
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    MASKED_LM,
    losses_and_norms,
    train,
)
from tests.helpers import with_representatives
from tests.models.small_model import build_model

LAYERS = sorted(LAYER_REGISTRY)
every_layer = pytest.mark.parametrize("name", with_representatives(LAYERS, "flash"))


@pytest.fixture(scope="module")
def pretrained(corpus, tmp_path_factory):
    """Return a function that pre-trains with an attention, once, and returns the checkpoint."""
    folder = tmp_path_factory.mktemp("pretrained")

    @functools.cache
    def checkpoint(name):
        with pytest.MonkeyPatch.context() as monkeypatch:
            options = (*MASKED_LM, *LLN, "--attention", name, "--max-update", 1, "--tensorboard-logdir", folder / "tb")
            train(monkeypatch, folder / f"{name}.log", corpus, folder / name, *options)
        return folder / name / "checkpoint_last.pt"

    return checkpoint


@every_layer
def test_trained_model_loads(name, pretrained):
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(pretrained(name))])
    layers = model.encoder.sentence_encoder.layers
    assert [type(layer) for layer in layers] == 2 * [LAYER_REGISTRY[name].cls]


@pytest.mark.exhaustive
@every_layer
def test_activation_checkpointing_changes_nothing(name, corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--attention", name, "--dropout", 0, "--attention-dropout", 0)
    plain = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options)
    checkpointed = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *options, "--checkpoint-activations")
    assert losses_and_norms(plain) == losses_and_norms(checkpointed)


@every_layer
def test_pretrained_model_is_finetuned_and_evaluated(name, pretrained, task_data, tmp_path, monkeypatch, capsys):
    """Without --max-positions, the model has the pre-trained length, with and without position embeddings."""
    without_max_positions = CLASSIFICATION[:-2]
    options = (*without_max_positions, *LLN, "--criterion", "lln_sentence_prediction", "--attention", name)
    schedule = ("--max-update", 1, "--lr", 0, "--finetune-from-model", pretrained(name))
    train(monkeypatch, tmp_path / "log", task_data, tmp_path / "run", *options, *schedule)
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    before = torch.load(pretrained(name))["model"]
    after = torch.load(checkpoint)["model"]
    encoder_keys = [key for key in before if ".layers." in key or ".layer_norm." in key]
    assert len(encoder_keys) > 20
    assert all(torch.equal(before[key], after[key]) for key in encoder_keys)
    model, task = load_model(str(checkpoint))
    assert model.max_positions() == 64
    assert task.max_positions() == 64

    assert main(["evaluate", str(checkpoint), "--json", str(tmp_path / "valid.json")]) == 0
    assert json.loads((tmp_path / "valid.json").read_text())["rows"] == 11


@every_layer
@pytest.mark.parametrize("normalize_before", [False, True])
def test_logits_depend_neither_on_padding_nor_on_the_batch(name, normalize_before):
    torch.manual_seed(0)
    model = build_model(attention=name, encoder_normalize_before=normalize_before)
    assert model.encoder.sentence_encoder.layer_norm is not None
    sentence = torch.tensor([0, *range(5, 23), 2])
    batch = torch.full((2, 60), 1)
    batch[0, :20] = sentence
    batch[1] = torch.arange(60) % 50 + 4
    with torch.no_grad():
        unpadded = model(sentence[None])[0]
        torch.testing.assert_close(model(batch[:1])[0][:, :20], unpadded, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(batch)[0][:1, :20], unpadded, rtol=1e-5, atol=1e-5)


@every_layer
@pytest.mark.parametrize("options", [{"feed_forward_tokens": 1}, {"rotary": True}, {"softmax_layers": "0"}], ids=str)
def test_options_of_roberta_layers_are_rejected(name, options):
    (option,) = options
    message = f"^{name} replaces the whole encoder layer, and does not support {option}"
    with pytest.raises(UserError, match=message):
        build_model(attention=name, **options)


@pytest.mark.parametrize(("before", "now"), [("softmax", LAYERS[0]), (LAYERS[0], "softmax")])
def test_checkpoint_with_other_layers_is_rejected(before, now, pretrained, task_data, tmp_path, monkeypatch):
    options = (*CLASSIFICATION, *LLN, "--attention", now, "--finetune-from-model", pretrained(before))
    with pytest.raises(UserError, match=f"has {before}, this model {now}: neither has the other's parameters") as error:
        train(monkeypatch, tmp_path / "log", task_data, tmp_path / "run", *options)
    assert "\n" not in str(error.value)


@every_layer
def test_probe_is_rejected(name):
    with pytest.raises(ValueError, match=f"^{name} replaces the whole encoder layer, and has no queries and keys"):
        probe.encoder_layers(build_model(attention=name))


@every_layer
def test_programs_that_need_an_attention_reject_it_in_one_line(name, pretrained, corpus, tmp_path, capsys):
    out = str(tmp_path / "out")
    whole = f"{name} replaces the whole encoder layer, and "
    softmax = str(pretrained("softmax"))
    own = str(pretrained(name))
    data = str(corpus)
    for program, arguments, message in [
        ("analyze", [own, data], whole + "has no queries and keys to measure"),
        ("export", [own, out], f"the attention {name} cannot be exported"),
        ("export", [own, out, "--onnx"], f"the attention {name} cannot be exported"),
        ("convert", [softmax, out, "--attention", name], whole + "cannot use the weights of a converted encoder"),
        ("convert", [own, out, "--attention", "softmax"], f"{whole}{re.escape(own)} is therefore not a RoBERTa"),
        ("linearize", [softmax, data, out, "--attention", name], whole + "cannot replace a teacher's"),
        ("linearize", [own, data, out], f"has {name} attention, but a teacher must have softmax"),
    ]:
        assert main([program, *arguments]) == 1
        output = capsys.readouterr().err
        assert output.count("\n") == 1
        assert re.match(f"error: .*{message}", output), output
        assert not (tmp_path / "out").exists()
