"""The Long Range Arena: its model compared with the same formula written out, and its tasks with several attentions."""

import json

import pytest
import torch
import torch.nn.functional as F

from data_prep import lra
from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.analysis.events import read_curves
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import UserError
from tests.data_prep.test_lra import SOURCES
from tests.fairseq_runs import CLASSIFICATION, LLN, USER_DIR, hydra_train, make_classification, split_options
from tests.fairseq_runs import train as fairseq_train
from tests.models import small_model
from tests.tasks.test_tasks import PAD, load_batches, make_classifier

ENCODER = "encoder.sentence_encoder"
LRA = dict(
    encoder_embed_dim=64,
    encoder_ffn_embed_dim=128,
    encoder_normalize_before=True,
    pooling="mean",
    pooler_dim=128,
    pooler_activation_fn="relu",
    linear_init="torch",
    position_init="random",
    max_positions=50,
    attention="softmax",
)


def build_model(**options):
    model = small_model.build_model(**LRA | options)
    model.register_classification_head("head", num_classes=3)
    return model.eval()


def random_tokens(rows, length):
    return torch.randint(4, 40, (rows, length))


def linear(state, name, x):
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def layer_norm(state, name, x):
    return F.layer_norm(x, (64,), state[f"{name}.weight"], state[f"{name}.bias"])


def split_heads(x):
    """Reshape (B, N, 64) to (B, 2, N, 32)."""
    return x.unflatten(-1, (2, 32)).transpose(1, 2)


def encode(state, tokens):
    """Compute the encoder of Skyformer's code base and the mean over the tokens.

    Args:
        state: the state dict of the model
        tokens: token ids (B, N) without padding
    Returns: (B, 64)
    """
    positions = state[f"{ENCODER}.embed_positions.weight"][PAD + 1 :][: tokens.shape[1]]
    x = state[f"{ENCODER}.embed_tokens.weight"][tokens] + positions
    for number in range(2):
        layer = f"{ENCODER}.layers.{number}"
        y = layer_norm(state, f"{layer}.self_attn_layer_norm", x)
        q = split_heads(linear(state, f"{layer}.self_attn.q_proj", y))
        k = split_heads(linear(state, f"{layer}.self_attn.k_proj", y))
        v = split_heads(linear(state, f"{layer}.self_attn.v_proj", y))
        out = (q @ k.mT / 32**0.5).softmax(-1) @ v
        x = x + linear(state, f"{layer}.self_attn.out_proj", out.transpose(1, 2).flatten(2))
        y = layer_norm(state, f"{layer}.final_layer_norm", x)
        x = x + linear(state, f"{layer}.fc2", F.gelu(linear(state, f"{layer}.fc1", y)))
    return layer_norm(state, f"{ENCODER}.layer_norm", x).mean(dim=1)


def classify(state, x):
    hidden = linear(state, "classification_heads.head.dense", x).relu()
    return linear(state, "classification_heads.head.out_proj", hidden)


def test_model_equals_that_of_the_code_base():
    model = build_model()
    state = model.state_dict()
    tokens = random_tokens(3, 50)
    logits, _ = model(tokens, features_only=True, classification_head_name="head")
    torch.testing.assert_close(logits, classify(state, encode(state, tokens)))
    assert state["classification_heads.head.dense.weight"].shape == (128, 64)


def test_two_towers_classify_product_and_difference_too():
    model = build_model(two_towers=True)
    state = model.state_dict()
    first = random_tokens(3, 50)
    second = random_tokens(3, 20)
    logits, _ = model(first, other_tokens=second, features_only=True, classification_head_name="head")
    x = encode(state, first)
    y = encode(state, second)
    torch.testing.assert_close(logits, classify(state, torch.cat([x, y, x * y, x - y], dim=-1)))


def test_mean_pooling_ignores_padding():
    model = build_model()
    tokens = random_tokens(2, 30)
    padded = torch.cat([tokens, torch.full((2, 20), PAD)], dim=1)
    logits, _ = model(tokens, classification_head_name="head")
    padded_logits, _ = model(padded, classification_head_name="head")
    torch.testing.assert_close(padded_logits, logits)


@pytest.mark.parametrize(("linear_init", "std"), [("torch", (1 / 3 / 128) ** 0.5), ("bert", 0.02)])
def test_linear_init(linear_init, std):
    weight = build_model(linear_init=linear_init).state_dict()[f"{ENCODER}.layers.0.fc2.weight"]
    assert weight.std() == pytest.approx(std, rel=0.05)


def test_positions_are_initialized_like_bert():
    table = build_model().state_dict()[f"{ENCODER}.embed_positions.weight"]
    assert table.std() == pytest.approx(0.02, rel=0.1)


def test_products_of_sinusoidal_positions_depend_on_the_distance_only():
    table = build_model(position_init="sinusoidal").state_dict()[f"{ENCODER}.embed_positions.weight"][PAD + 1 :]
    products = table @ table.T
    for distance in (0, 1, 30):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products[0, 0] == pytest.approx(64 * 0.02**2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The five tasks with few rows."""
    folder = tmp_path_factory.mktemp("lra")
    assert lra.main(["listops", "--out", str(folder), "--workers", "1", "--rows", "50"]) == 0
    source = folder / "source"
    for task in ("text", "retrieval", "pathfinder", "image"):
        for name, content in SOURCES[task].items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content)
        assert lra.main([task, "--out", str(folder), "--source", str(source)]) == 0
    return folder


def train_task(monkeypatch, data, task, attention, save_dir):
    """Train with the recipe of LRA for two updates, and return the best checkpoint."""
    overrides = split_options("""
        run=cpu task.global_batch=2 task.max_positions=256 optimization.max_update=2
        dataset.validate_interval_updates=2 lr_scheduler.warmup_updates=1 common.log_interval=1
        common.seed=1
    """)
    overrides += [f"lra={task}", f"attention={attention}", f"task.data={data / task}"]
    hydra_train(monkeypatch, *overrides, f"checkpoint.save_dir={save_dir}", recipe="lra")
    return save_dir / "checkpoint_best.pt"


@pytest.mark.parametrize(
    ("task", "attention"),
    [
        ("listops", "lln_diag"),
        ("retrieval", "lln_diag"),
        pytest.param("text", "lln_diag", marks=pytest.mark.exhaustive),
        pytest.param("pathfinder", "lln_diag", marks=pytest.mark.exhaustive),
        pytest.param("image", "lln_diag", marks=pytest.mark.exhaustive),
        pytest.param("listops", "softmax", marks=pytest.mark.exhaustive),
        pytest.param("retrieval", "reformer", marks=pytest.mark.exhaustive),
    ],
)
def test_task_trains_and_is_evaluated(task, attention, data, tmp_path, monkeypatch):
    checkpoint = train_task(monkeypatch, data, task, attention, tmp_path)
    assert read_curves(tmp_path / "tensorboard")["train_inner/loss"].steps == [1, 2]
    scores = tmp_path / "test.json"
    assert main(["evaluate", str(checkpoint), "--split", "test", "--json", str(scores)]) == 0
    assert 0 <= json.loads(scores.read_text())["accuracy"] <= 1


def test_two_towers_without_eos_truncate_both_inputs(data):
    task = make_classifier(
        "lln_sentence_prediction",
        data / "retrieval",
        two_towers=True,
        strip_eos=True,
        max_positions=5,
        shorten_method="truncate",
    )
    (batch,) = load_batches(task, "train")

    first = {tuple(row) for row in batch["net_input"]["src_tokens"].tolist()}
    second = {tuple(row) for row in batch["net_input"]["other_tokens"].tolist()}
    assert first == {tuple(4 + byte for byte in b"train"), (4 + ord("c"), PAD, PAD, PAD, PAD)}
    assert second == {(4 + ord("b"),), (4 + ord("d"),)}
    assert batch["ntokens"] == 5 + 1 + 1 + 1
    assert sorted(batch["target"].view(-1).tolist()) == [0, 1]


def test_strip_eos_changes_nothing_but_the_last_token(tmp_path):
    folder = make_classification(tmp_path)
    stock = make_classifier("lln_sentence_prediction", folder, strip_eos=False, init_token=0)
    stripped = make_classifier("lln_sentence_prediction", folder, strip_eos=True, init_token=0)
    for expected, batch in zip(load_batches(stock, "train"), load_batches(stripped, "train"), strict=True):
        assert torch.equal(batch["id"], expected["id"])
        assert torch.equal(batch["target"], expected["target"])
        tokens = expected["net_input"]["src_tokens"]
        lengths = expected["net_input"]["src_lengths"]
        without_eos = tokens.masked_fill(tokens.eq(2), PAD)[:, : int(lengths.max()) - 1]
        assert torch.equal(batch["net_input"]["src_lengths"], lengths - 1)
        assert torch.equal(batch["net_input"]["src_tokens"], without_eos)


def test_command_line_options_build_the_same_model(data, tmp_path, monkeypatch):
    model = split_options("--two-towers --batch-size 2 --pooling mean --pooler-dim 16 --linear-init torch")
    run_options = (*CLASSIFICATION, *LLN, *model)
    fairseq_train(monkeypatch, tmp_path / "log", data / "retrieval", tmp_path / "a", *run_options)
    parameters = load_checkpoint_lazily(str(tmp_path / "a" / "checkpoint_last.pt"))["model"]
    assert parameters["classification_heads.sentence_classification_head.dense.weight"].shape == (16, 4 * 32)


def test_two_towers_reject_stock_model(data, tmp_path, monkeypatch):
    stock_options = (*CLASSIFICATION, *USER_DIR, "--two-towers", "--batch-size", 2, "--arch", "roberta")
    with pytest.raises(UserError, match="two_towers needs a model of this package"):
        fairseq_train(monkeypatch, tmp_path / "log", data / "retrieval", tmp_path / "a", *stock_options)


@pytest.mark.parametrize(
    ("task", "split", "option", "message"),
    [
        ("pathfinder", "train", "two_towers", "two_towers needs pairs"),
        ("pathfinder", "other", "strip_eos", "cannot load split 'other'"),
        ("retrieval", "train", "strip_eos", "strip_eos needs two_towers"),
    ],
)
def test_unsupported_inputs_are_rejected(task, split, option, message, data):
    classifier = make_classifier("lln_sentence_prediction", data / task, **{option: True})
    with pytest.raises(UserError, match=message):
        classifier.load_dataset(split)


def test_text_model_rejects_checkpoint_without_tokenizer(data, tmp_path, monkeypatch):
    checkpoint = train_task(monkeypatch, data, "retrieval", "lln_diag", tmp_path)
    with pytest.raises(UserError, match="cannot turn text into"):
        load(checkpoint)
