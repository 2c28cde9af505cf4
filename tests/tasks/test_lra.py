"""The Long Range Arena's model beside the same written out, its tasks with several attentions, and what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from data_prep import lra
from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.analysis.events import read_curves
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import InputError
from lln_fairseq.models.lln_roberta import LLNRobertaModel
from tests.data_prep.test_lra import SOURCES
from tests.fairseq_runs import CLASSIFICATION, LLN, USER_DIR, hydra_train, make_classification
from tests.fairseq_runs import train as fairseq_train
from tests.tasks.test_tasks import batches, make_classifier

PAD = 1


def make_model(two_towers=False, **options):
    dictionary = SimpleNamespace(pad=lambda: PAD)
    dictionary = type("Dictionary", (), {"pad": lambda _: PAD, "__len__": lambda _: 40})()
    config = OmegaConf.create({
        "encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128, "encoder_attention_heads": 2,
        "encoder_normalize_before": True, "pooling": "mean", "pooler_dim": 128, "pooler_activation_fn": "relu",
        "linear_init": "torch", "max_positions": 50, "attention": "softmax", "two_towers": two_towers, **options,
    })  # fmt: skip
    torch.manual_seed(0)
    model = LLNRobertaModel.build_model(config, SimpleNamespace(source_dictionary=dictionary))
    model.register_classification_head("head", num_classes=3)
    return model.eval()


def code_base(state, tokens):
    """(B, N) tokens without padding -> (B, 64): the encoder of Skyformer's code base and its mean, written out."""

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, (64,), state[f"{name}.weight"], state[f"{name}.bias"])

    encoder = "encoder.sentence_encoder."
    positions = state[f"{encoder}embed_positions.weight"][PAD + 1 :][: tokens.shape[1]]
    x = state[f"{encoder}embed_tokens.weight"][tokens] + positions
    for number in range(2):
        layer = f"{encoder}layers.{number}."
        y = norm(f"{layer}self_attn_layer_norm", x)
        q, k, v = (linear(f"{layer}self_attn.{part}_proj", y).unflatten(-1, (2, 32)).transpose(1, 2) for part in "qkv")
        mixed = (q @ k.mT / 32**0.5).softmax(-1) @ v
        x = x + linear(f"{layer}self_attn.out_proj", mixed.transpose(1, 2).flatten(2))
        x = x + linear(f"{layer}fc2", F.gelu(linear(f"{layer}fc1", norm(f"{layer}final_layer_norm", x))))
    return norm(f"{encoder}layer_norm", x).mean(dim=1)


def head(state, x):
    x = F.linear(x, state["classification_heads.head.dense.weight"], state["classification_heads.head.dense.bias"])
    weight, bias = (state[f"classification_heads.head.out_proj.{part}"] for part in ("weight", "bias"))
    return F.linear(x.relu(), weight, bias)


def test_the_model_is_that_of_the_code_base():
    model, tokens = make_model(), torch.randint(4, 40, (3, 50))
    state = model.state_dict()
    logits, _ = model(tokens, features_only=True, classification_head_name="head")
    torch.testing.assert_close(logits, head(state, code_base(state, tokens)))
    assert state["classification_heads.head.dense.weight"].shape == (128, 64)


def test_two_towers_see_their_product_and_difference():
    model = make_model(two_towers=True)
    state, a, b = model.state_dict(), torch.randint(4, 40, (3, 50)), torch.randint(4, 40, (3, 20))
    logits, _ = model(a, other_tokens=b, features_only=True, classification_head_name="head")
    x, y = code_base(state, a), code_base(state, b)
    torch.testing.assert_close(logits, head(state, torch.cat([x, y, x * y, x - y], dim=-1)))


def test_the_mean_leaves_padding_out():
    model, tokens = make_model(), torch.randint(4, 40, (2, 30))
    padded = torch.cat([tokens, torch.full((2, 20), PAD)], dim=1)
    wanted, found = (model(x, classification_head_name="head")[0] for x in (tokens, padded))
    torch.testing.assert_close(found, wanted)


def test_linear_layers_begin_as_torch_or_as_bert():
    weight = "encoder.sentence_encoder.layers.0.fc2.weight"
    torch_std, bert_std = (make_model(linear_init=init).state_dict()[weight].std() for init in ("torch", "bert"))
    assert torch_std == pytest.approx((1 / 3 / 128) ** 0.5, rel=0.05)
    assert bert_std == pytest.approx(0.02, rel=0.05)
    table = make_model().state_dict()["encoder.sentence_encoder.embed_positions.weight"]
    assert table.std() == pytest.approx(0.02, rel=0.1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The five tasks with few rows."""
    folder = tmp_path_factory.mktemp("lra")
    for task, options in {"listops": ("--rows", "50"), "pathfinder": ("--rows", "20")}.items():
        assert lra.main([task, "--out", str(folder), "--workers", "1", *options]) == 0
    for task in ("text", "retrieval", "image"):
        for name, content in SOURCES[task].items():
            path = folder / "given" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        assert lra.main([task, "--out", str(folder), "--source", str(folder / "given")]) == 0
    return folder


def train(monkeypatch, data, task, attention, out, *options):
    hydra_train(
        monkeypatch, f"lra={task}", f"attention={attention}", "run=cpu", f"task.data={data / task}",
        f"checkpoint.save_dir={out}", "task.global_batch=2", "task.max_positions=256", "optimization.max_update=2",
        "dataset.validate_interval_updates=2", "lr_scheduler.warmup_updates=1", "common.log_interval=1",
        "model.linformer_projected_length=64", "model.longformer_one_sided_window=32"
        if attention == "longformer" else "common.seed=1", *options, recipe="lra",
    )  # fmt: skip
    return out / "checkpoint_best.pt"


LRA_RUNS = [
    ("listops", "lln_diag"),
    ("retrieval", "lln_diag"),
    pytest.param("text", "lln_diag", marks=pytest.mark.exhaustive),
    pytest.param("pathfinder", "lln_diag", marks=pytest.mark.exhaustive),
    pytest.param("image", "lln_diag", marks=pytest.mark.exhaustive),
    pytest.param("listops", "softmax", marks=pytest.mark.exhaustive),
    pytest.param("retrieval", "reformer", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("task", "attention"), LRA_RUNS)
def test_every_task_trains_and_is_scored(task, attention, data, tmp_path, monkeypatch):
    checkpoint = train(monkeypatch, data, task, attention, tmp_path)
    curves = read_curves(tmp_path / "tensorboard")
    assert curves["train_inner/loss"].steps == [1, 2]
    out = tmp_path / "test.json"
    assert main(["evaluate", str(checkpoint), "--split", "test", "--json", str(out)]) == 0
    assert 0 <= json.loads(out.read_text())["accuracy"] <= 1


def test_inputs_kept_apart_without_their_ends(data):
    task = make_classifier("lln_sentence_prediction", data / "retrieval", two_towers=True, strip_eos=True,
                           max_positions=5, shorten_method="truncate")  # fmt: skip
    (batch,) = batches(task, "train")
    inputs = {tuple(row) for row in batch["net_input"]["src_tokens"].tolist()}
    assert inputs == {tuple(4 + byte for byte in b"train"), (4 + ord("c"), *[PAD] * 4)}
    assert {tuple(row) for row in batch["net_input"]["other_tokens"].tolist()} == {(4 + 98,), (4 + 100,)}
    assert batch["ntokens"] == 5 + 1 + 1 + 1
    assert sorted(batch["target"].view(-1).tolist()) == [0, 1]


def test_the_same_samples_as_fairseq_where_both_can(tmp_path):
    folder = make_classification(tmp_path)
    stock, ours = (make_classifier("lln_sentence_prediction", folder, strip_eos=strip, init_token=0)
                   for strip in (False, True))  # fmt: skip
    for theirs, mine in zip(batches(stock, "train"), batches(ours, "train"), strict=True):
        assert torch.equal(theirs["id"], mine["id"])
        assert torch.equal(theirs["target"], mine["target"])
        ends = theirs["net_input"]["src_tokens"].eq(2)
        lengths = theirs["net_input"]["src_lengths"]
        assert torch.equal(lengths - 1, mine["net_input"]["src_lengths"])
        wanted = theirs["net_input"]["src_tokens"].masked_fill(ends, PAD)[:, : int(lengths.max()) - 1]
        assert torch.equal(wanted, mine["net_input"]["src_tokens"])


def test_flags_build_what_hydra_does(data, tmp_path, monkeypatch):
    options = (*CLASSIFICATION, *USER_DIR, "--two-towers", "--batch-size", 2)
    fairseq_train(monkeypatch, tmp_path / "a.log", data / "retrieval", tmp_path / "a", *options, *LLN[2:],
                  "--pooling", "mean", "--pooler-dim", 16, "--linear-init", "torch")  # fmt: skip
    head = load_checkpoint_lazily(str(tmp_path / "a" / "checkpoint_last.pt"))["model"]
    assert head["classification_heads.sentence_classification_head.dense.weight"].shape == (16, 4 * 32)
    with pytest.raises(InputError, match="two_towers needs a model of ours"):
        fairseq_train(
            monkeypatch, tmp_path / "b.log", data / "retrieval", tmp_path / "b", *options, "--arch", "roberta"
        )


def test_what_cannot_work_is_refused(data, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="two_towers needs pairs"):
        make_classifier("lln_sentence_prediction", data / "pathfinder", two_towers=True).load_dataset("train")
    with pytest.raises(InputError, match="cannot load split 'other'"):
        make_classifier("lln_sentence_prediction", data / "pathfinder", strip_eos=True).load_dataset("other")
    with pytest.raises(InputError, match="has pairs, and strip_eos takes them with two_towers alone"):
        make_classifier("lln_sentence_prediction", data / "retrieval", strip_eos=True).load_dataset("train")
    checkpoint = train(monkeypatch, data, "retrieval", "lln_diag", tmp_path)
    with pytest.raises(InputError, match=r"cannot turn text into the ids"):
        load(checkpoint)
