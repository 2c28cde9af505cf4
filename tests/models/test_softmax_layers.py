"""Models with softmax attention in some layers: built, trained, resumed, loaded, converted, measured and refused."""

import functools

import pytest
import torch

import lln_fairseq
from lln_fairseq.__main__ import main
from lln_fairseq.analysis.probe import record_layers
from lln_fairseq.attention import ATTENTION_REGISTRY
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import UserError
from lln_fairseq.inference.evaluate import compute_outputs, format_predictions, load_finetuned_model
from lln_fairseq.training.recipes import layout_options
from tests.conversion.sources import add_noise, compute_logits, padded_batch
from tests.fairseq_runs import (
    LLN,
    MASKED_LM,
    hydra_train,
    make_corpus,
    train,
)
from tests.models import small_model
from tests.text_runs import make_glue, texts_of

OPTIONS = (*MASKED_LM, *LLN, "--lln-diag-mix", "joint_offset", "--lln-diag-block-size", 8)
HYBRID = (*OPTIONS, "--softmax-layers", "1")
build_model = functools.partial(small_model.build_model, encoder_layers=3)


def attention_names(model):
    """Return the registered name of the attention of every layer."""
    name_by_class = {entry.cls: name for name, entry in ATTENTION_REGISTRY.items()}
    return [name_by_class[type(layer.self_attn.attention)] for layer in model.encoder.sentence_encoder.layers]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a directory with dict.txt, tokens and the run of a model with softmax attention in its second layer."""
    folder = make_corpus(tmp_path_factory.mktemp("corpus"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", folder, folder / "run", *HYBRID, "--max-update", 2)
    return folder


@pytest.mark.parametrize("attention", ["lln_diag", "softmax", "transnormer_t1"])
@pytest.mark.parametrize(
    ("text", "layers"),
    [(None, ()), ("", ()), ("0", (0,)), ("2, 0", (0, 2)), ("1,1", (1,)), ("0,1,2", (0, 1, 2)), ("every:2", (1,))],
)
def test_named_layers_have_softmax(attention, text, layers):
    model = build_model(attention=attention, softmax_layers=text)
    expected = ["softmax" if layer in layers else attention for layer in range(3)]
    assert attention_names(model) == expected


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}])
def test_other_layers_keep_their_place(options):
    model = build_model(attention="transnormer_t1", encoder_layers=4, softmax_layers="0", **options)
    layers = model.encoder.sentence_encoder.layers
    assert [layer.self_attn.attention.is_local for layer in layers[1:]] == [True, False, False]


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}, {"feed_forward_tokens": 16}])
def test_softmax_in_every_layer_is_a_softmax_model(options):
    softmax = build_model(attention="softmax", **options)
    hybrid = build_model(attention="lln_diag", lln_diag_mix="joint_offset", softmax_layers="0,1,2", **options)
    tokens = padded_batch(64)
    assert hybrid.state_dict().keys() == softmax.state_dict().keys()
    assert torch.equal(hybrid(tokens)[0], softmax(tokens)[0])


def test_softmax_layers_have_no_attention_parameters(caplog):
    options = dict(attention="lln_diag", lln_diag_mix="joint_offset", lln_diag_gain="learned")
    linear = build_model(**options)
    hybrid = build_model(**options, softmax_layers="1")
    layers = hybrid.encoder.sentence_encoder.layers
    assert [len(layer.self_attn.attention.state_dict()) for layer in layers] == [2, 0, 2]

    hybrid.load_state_dict(linear.state_dict())  # fairseq's loading drops what a softmax layer does not have

    dropped = [message for message in caplog.messages if "is left out" in message]
    assert len(dropped) == 2
    assert all(".layers.1.self_attn.attention." in message for message in dropped)


@pytest.mark.parametrize("text", ["3", "-1", "x", "0,", "1 2", "0-2", "²", "every:4", "every:0", "every 2", "best:2"])
def test_wrong_layer_is_rejected(text):
    message = (
        "softmax_layers must be numbers from 0 to 2, separated by commas, or every:N with N from 1 to 3 (in linearize "
        f"also best:N), got '{text}'"
    )
    with pytest.raises(UserError) as error:
        build_model(attention="lln", softmax_layers=text)
    assert str(error.value) == message


def test_recorded_layers_are_those_of_the_model():
    model = build_model(attention="lln_diag", softmax_layers="1")
    layers = record_layers(model, {"src_tokens": padded_batch(64)})
    names = [type(layer.attention).__name__ for layer in layers]
    assert names == ["LLNDiagAttention", "SoftmaxAttention", "LLNDiagAttention"]
    alpha = torch.stack([layer.scalars()[4] for layer in layers])
    assert alpha.isnan().tolist() == [False, True, False]


def test_resume_compares_softmax_layers_with_checkpoints_of_older_versions(trained, tmp_path, monkeypatch):
    def train_until(update, *options):
        train(monkeypatch, tmp_path / "log", trained, tmp_path / "run", *OPTIONS, "--max-update", update, *options)

    train_until(1)
    path = tmp_path / "run/checkpoint_last.pt"
    for update, stored in ((2, ""), (3, "no such option")):
        state = torch.load(path)
        state["cfg"]["model"]["softmax_layers"] = stored
        if stored == "no such option":
            del state["cfg"]["model"]["softmax_layers"]
        torch.save(state, path)
        with pytest.raises(UserError, match=r"model\.softmax_layers\) = None in the checkpoint, now 1"):
            train_until(update, "--softmax-layers", "1")
        train_until(update)
    with pytest.raises(UserError, match=r"model\.softmax_layers\) = None in the checkpoint, now 1"):
        train_until(4, "--softmax-layers", "1")


def test_runs_are_the_same_if_their_numbers_are(trained, tmp_path, monkeypatch):
    def train_until(update, layers):
        options = (*OPTIONS, "--encoder-layers", 3, "--max-update", update, "--softmax-layers", layers)
        train(monkeypatch, tmp_path / "log", trained, tmp_path / "run", *options)

    train_until(1, "every:2")
    path = tmp_path / "run/checkpoint_last.pt"
    assert torch.load(path)["cfg"]["model"]["softmax_layers"] == "1"
    train_until(2, "1")
    with pytest.raises(UserError, match=r"model\.softmax_layers\) = 1 in the checkpoint, now 2"):
        train_until(3, "every:3")

    state = torch.load(path)
    state["cfg"]["model"]["softmax_layers"] = " 1,1"  # as an older version stored what the user had written
    torch.save(state, path)
    train_until(3, "every:2")


def test_conversion_keeps_window_and_softmax_layers(trained, tmp_path, monkeypatch, capsys):
    window = ("--attention", "window", "--window-block-size", 4, "--window-neighbors", 2)
    options = (*MASKED_LM, *LLN, *window, "--encoder-layers", 3, "--softmax-layers", "0,2", "--max-update", 1)
    train(monkeypatch, tmp_path / "log", trained, tmp_path / "run", *options)
    source = add_noise(tmp_path / "run/checkpoint_last.pt")
    capsys.readouterr()
    arguments = ["convert", str(source), "--dictionary", str(trained / "dict.txt")]

    assert main([*arguments, str(tmp_path / "same")]) == 0
    assert load_checkpoint_lazily(str(tmp_path / "same/model.pt"))["cfg"]["model"]["softmax_layers"] == "0,2"
    converted_logits = compute_logits(tmp_path / "same/model.pt", padded_batch())
    assert torch.equal(converted_logits, compute_logits(source, padded_batch()))
    assert " replaces " not in capsys.readouterr().out

    assert main([*arguments, str(tmp_path / "every"), "--softmax-layers", "every:3"]) == 0
    assert load_checkpoint_lazily(str(tmp_path / "every/model.pt"))["cfg"]["model"]["softmax_layers"] == "2"
    assert main([*arguments, str(tmp_path / "none"), "--softmax-layers", "every:4"]) == 1
    assert "or every:N with N from 1 to 3" in capsys.readouterr().err

    assert main([*arguments, str(tmp_path / "other"), "--attention", "lln"]) == 0
    assert "lln replaces window in all layers" in capsys.readouterr().out
    options = load_checkpoint_lazily(str(tmp_path / "other/model.pt"))["cfg"]["model"]
    assert (options["attention"], options.get("softmax_layers")) == ("lln", None)

    assert main([*arguments, str(tmp_path / "mixed"), "--attention", "lln", "--softmax-layers", "0,1"]) == 0
    assert "lln replaces window in all layers but 0,1\n" in capsys.readouterr().out


def test_analyze_measures_both_kinds_of_layers(trained, capsys):
    checkpoint = trained / "run/checkpoint_last.pt"
    assert main(["analyze", str(checkpoint), str(trained), "--batches", "1"]) == 0
    concentration = capsys.readouterr().out.split("concentration")[1].splitlines()
    first, second = concentration[2].split(), concentration[3].split()
    assert first[0] == "0"
    assert "-" not in first
    assert second[0] == "1"
    assert second[2:5] == ["-", "-", "-"]  # softmax has no α and β


def test_local_global_layout_is_trained_fine_tuned_and_predicts_longer_texts(tmp_path, monkeypatch):
    """The pre-training has samples of up to 512 tokens. The classifier takes its model from the checkpoint."""
    data = make_glue(tmp_path, "SST-2") / "SST-2"
    start = tmp_path / "pretrained/checkpoint_last.pt"
    checkpoint = tmp_path / "fine_tuned/checkpoint_last.pt"

    def train_two_updates(recipe, folder, save_dir, *overrides):
        run = "run=cpu task.global_batch=2 dataset.batch_size=2 lr_scheduler.warmup_updates=1 optimization.max_update=2"
        folders = (f"task.data={folder}", f"checkpoint.save_dir={save_dir}")
        hydra_train(monkeypatch, *run.split(), *folders, *overrides, recipe=recipe)

    sizes = ("model=small", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64")  # four layers
    train_two_updates("pretrain", data / "input0", start.parent, "layout=local_global", *sizes)
    train_two_updates("finetune", data, checkpoint.parent, "glue=sst2", f"checkpoint.finetune_from_model={start}")

    options = layout_options("local_global") | {"softmax_layers": "3"}
    for path in (start, checkpoint):
        assert options.items() <= load_checkpoint_lazily(str(path))["cfg"]["model"].items()
    model, task = load_finetuned_model(str(checkpoint), str(data))
    assert attention_names(model) == [options["attention"]] * 3 + ["softmax"]
    outputs = compute_outputs(model, task, "valid")
    predictions = lln_fairseq.load(checkpoint).predict([row[0] for row in texts_of(tmp_path, "SST-2")])
    assert [prediction.label for prediction in predictions] == format_predictions(task, outputs)
    probabilities = torch.tensor([prediction.probability for prediction in predictions])
    torch.testing.assert_close(probabilities, outputs.logits.softmax(dim=-1).amax(dim=-1))
    monkeypatch.setenv("LLN_LINEAR", "torch,int_mm")  # 8 bits also where they are slower
    long_text = "a wonderful film. " * 200
    vectors = []
    for precision in ("float32", "int8"):
        loaded = lln_fairseq.load(checkpoint, precision=precision, positions=1000)
        (tokens,) = loaded.encode([long_text], pooling="tokens", on_long="error")
        vectors.append(tokens.vectors)
    assert len(vectors[0]) > 512
    assert torch.cosine_similarity(*vectors).min() > 0.99
    assert not torch.equal(*vectors)
