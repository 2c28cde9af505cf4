"""Models whose whole layers are replaced: they train, go on, fine-tune and are evaluated as others; what needs queries
and keys, or RoBERTa's layers, refuses them in one line."""

import functools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from lln_fairseq.__main__ import main
from lln_fairseq.analysis import probe
from lln_fairseq.attention import LAYER_REGISTRY
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.lln_roberta import LLNRobertaModel
from lln_fairseq.training.sequence_parallel import shard_multiple
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, hydra_train, train
from tests.helpers import with_representatives

EVERY = sorted(LAYER_REGISTRY)
every_layer = pytest.mark.parametrize("name", with_representatives(EVERY, "flash"))
SCORES = ("--criterion", "lln_sentence_prediction")


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """trained(name) is the checkpoint of a short pre-training with this attention."""
    folder = tmp_path_factory.mktemp("trained")

    @functools.cache
    def checkpoint(name):
        with pytest.MonkeyPatch.context() as monkeypatch:
            options = (*MASKED_LM, *LLN, "--attention", name, "--max-update", 1)
            train(monkeypatch, folder / f"{name}.log", corpus, folder / name, *options)
        return folder / name / "checkpoint_last.pt"

    return checkpoint


def built(**options):
    dictionary = Dictionary()
    for number in range(60):
        dictionary.add_symbol(f"w{number}")
    sizes = dict(encoder_layers=2, encoder_embed_dim=32, encoder_ffn_embed_dim=64, encoder_attention_heads=2)
    task = SimpleNamespace(source_dictionary=dictionary, max_positions=lambda: 128)
    return LLNRobertaModel.build_model(OmegaConf.create(sizes | options), task).eval()


def updates(log):
    return {row["num_updates"]: (row["loss"], row["gnorm"]) for row in log["train"]}


@every_layer
def test_a_training_goes_on_exactly_and_loads_again(name, corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--attention", name, "--tensorboard-logdir", tmp_path / "tb")
    whole = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options, "--max-update", 4)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *options, "--max-update", 2)
    resumed = train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "b", *options, "--max-update", 4)
    assert list(updates(resumed)) == ["3", "4"]
    assert updates(resumed).items() <= updates(whole).items()
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "a" / "checkpoint_last.pt")])
    layers = model.encoder.sentence_encoder.layers
    assert [type(layer) for layer in layers] == 2 * [LAYER_REGISTRY[name].cls]


@pytest.mark.exhaustive
@every_layer
def test_checkpoint_activations_change_nothing(name, corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--attention", name, "--dropout", 0, "--attention-dropout", 0)
    plain = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options)
    again = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *options, "--checkpoint-activations")
    assert updates(plain) == updates(again)


@every_layer
def test_a_pretrained_one_is_fine_tuned_and_evaluated(name, trained, task_data, tmp_path, monkeypatch, capsys):
    options = (*CLASSIFICATION, *LLN, *SCORES, "--attention", name, "--max-update", 1, "--lr", 0)
    train(monkeypatch, tmp_path / "log", task_data, tmp_path / "run", *options, "--finetune-from-model", trained(name))
    before, after = (torch.load(path)["model"] for path in (trained(name), tmp_path / "run" / "checkpoint_last.pt"))
    ours = [key for key in before if ".layers." in key or ".layer_norm." in key]
    assert len(ours) > 20
    assert all(torch.equal(before[key], after[key]) for key in ours)
    arguments = [str(tmp_path / "run" / "checkpoint_last.pt"), "--json", str(tmp_path / "valid.json")]
    assert main(["evaluate", *arguments]) == 0
    assert json.loads((tmp_path / "valid.json").read_text())["rows"] == 11


@every_layer
def test_the_length_of_a_pretrained_one_is_that_of_its_fine_tuning(name, trained, task_data, tmp_path, monkeypatch):
    """Whether it has a table of positions or not."""
    train(monkeypatch, tmp_path / "log", task_data, tmp_path / "run", *CLASSIFICATION[:-2], *LLN, "--attention", name,
          "--finetune-from-model", trained(name), "--max-update", 1)  # fmt: skip
    model, task = load_model(str(tmp_path / "run" / "checkpoint_last.pt"))
    assert (model.max_positions(), task.max_positions()) == (64, 64)


@pytest.mark.exhaustive
@every_layer
def test_hydra_takes_its_options(name, corpus, tmp_path, monkeypatch):
    option = {"flash": "flash_units=1", "tnn": "tnn_rpe_layers=2"}.get(name)
    options = [f"model.{option}"] if option else []
    hydra_train(monkeypatch, f"task.data={corpus}", "model=nano", "run=cpu", f"attention={name}", *options,
                "optimization.max_update=1", f"checkpoint.save_dir={tmp_path / 'run'}", "task.tokens_per_sample=64",
                "dataset.batch_size=8")  # fmt: skip
    model, _ = load_model(str(tmp_path / "run" / "checkpoint_last.pt"))
    layer = model.encoder.sentence_encoder.layers[0]
    assert len(layer.units) == (1 if name == "flash" else 2)
    if name == "tnn":
        assert len(layer.units[0].rpe.layers) == 4


@every_layer
@pytest.mark.parametrize("normalize_before", [False, True])
def test_logits_are_the_same_alone_padded_and_with_longer_mates(name, normalize_before):
    torch.manual_seed(0)
    model = built(attention=name, encoder_normalize_before=normalize_before)
    assert model.encoder.sentence_encoder.layer_norm is not None
    sentence = torch.tensor([0, *range(5, 23), 2])
    batch = torch.full((2, 60), 1)
    batch[0, :20], batch[1] = sentence, torch.arange(60) % 50 + 4
    with torch.no_grad():
        alone = model(sentence[None])[0]
        torch.testing.assert_close(model(batch[:1])[0][:, :20], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(batch)[0][:1, :20], alone, rtol=1e-5, atol=1e-5)


@every_layer
def test_options_of_robertas_layers_are_refused(name):
    with pytest.raises(InputError, match="does not support feed_forward_tokens"):
        built(attention=name, feed_forward_tokens=1)


@pytest.mark.parametrize(("before", "now"), [("softmax", EVERY[0]), (EVERY[0], "softmax")])
def test_parameters_of_other_layers_are_refused(before, now, trained, task_data, tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match=f"has {before}, this model {now}: neither has the other's parameters"
    ) as error:
        train(monkeypatch, tmp_path / "log", task_data, tmp_path / "run", *CLASSIFICATION, *LLN, "--attention", now,
              "--finetune-from-model", trained(before))  # fmt: skip
    assert "\n" not in str(error.value)


@every_layer
def test_sequences_on_several_workers_and_probes_are_refused(name):
    with pytest.raises(InputError, match=f"^{name} replaces the whole encoder layer, and cannot share a sequence"):
        shard_multiple(built(attention=name))
    with pytest.raises(ValueError, match=f"^{name} replaces the whole encoder layer, and has no queries and keys"):
        probe.encoder_layers(built(attention=name))


@every_layer
def test_programs_that_need_an_attention_refuse_it_in_one_line(name, trained, corpus, tmp_path, capsys):
    out, whole = str(tmp_path / "out"), f"{name} replaces the whole encoder layer, and "
    softmax, own, data = str(trained("softmax")), str(trained(name)), str(corpus)
    for program, arguments, message in [
        ("analyze", [own, data], whole + "has no queries and keys to look at"),
        ("export", [own, out], f"the attention {name} cannot be exported"),
        ("export", [own, out, "--onnx"], f"the attention {name} cannot be exported"),
        ("convert", [softmax, out, "--attention", name], whole + "takes no parameters of another encoder"),
        ("convert", [own, out, "--attention", "softmax"], f"{whole}{re.escape(own)} is therefore no RoBERTa"),
        ("linearize", [softmax, data, out, "--attention", name], whole + "cannot take the place of"),
        ("linearize", [own, data, out], f"has {name} attention, and a teacher has softmax"),
    ]:
        assert main([program, *arguments]) == 1
        complaint = capsys.readouterr().err
        assert complaint.count("\n") == 1
        assert re.match(f"error: .*{message}", complaint), complaint
        assert not (tmp_path / "out").exists()
