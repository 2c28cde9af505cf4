"""The model through fairseq's own command lines: parity with the stock model, checkpoints, both CLIs, bad input."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerConfig
from omegaconf import OmegaConf

from lln_fairseq.attention import ATTENTION_REGISTRY
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.lln_roberta import PRESETS, SIZE_FIELDS, LLNRobertaConfig, complete_config
from lln_fairseq.modules.encoder import LLNEncoderLayer
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    MASKED_LM,
    TRAINING,
    hydra_train,
    read_log,
    train,
)
from tests.helpers import FLOAT32_FORWARD, relative_rms, with_representatives

ROOT = Path(__file__).parents[2]


def losses(log, keys=("loss", "gnorm")):
    return [[row[key] for key in keys] for row in log["train"]]


def test_softmax_reproduces_stock_roberta(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, "--required-batch-size-multiple", 1)
    stock = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options, "--arch", "roberta",
                  "--user-dir", ROOT / "lln_fairseq")  # fmt: skip
    ours = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *options, *LLN, "--attention", "softmax")
    assert len(losses(stock)) == 3
    assert losses(stock) == losses(ours)
    assert stock["valid"][0]["valid_loss"] == ours["valid"][0]["valid_loss"]


def test_a_stock_checkpoint_fine_tunes(corpus, task_data, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "stock", *MASKED_LM, "--arch", "roberta",
          "--user-dir", ROOT / "lln_fairseq", "--max-positions", 64)  # fmt: skip
    stock = tmp_path / "stock" / "checkpoint_last.pt"
    log = train(monkeypatch, tmp_path / "f.log", task_data, tmp_path / "tuned", *CLASSIFICATION, *LLN,
                "--finetune-from-model", stock, "--max-update", 1, "--lr", 0)  # fmt: skip
    assert len(log["train"]) == 1
    before = torch.load(stock)["model"]
    after = torch.load(tmp_path / "tuned" / "checkpoint_last.pt")["model"]
    weight = "encoder.sentence_encoder.layers.1.self_attn.q_proj.weight"
    assert torch.equal(before[weight], after[weight])


@pytest.mark.parametrize("attention", with_representatives(sorted(ATTENTION_REGISTRY), "lln", "linformer"))
def test_every_attention_trains_and_loads_again(attention, corpus, tmp_path, monkeypatch):
    log = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--attention", attention)
    assert len(log["train"]) == 3
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "a" / "checkpoint_last.pt")])
    mechanism = model.encoder.sentence_encoder.layers[0].self_attn.attention
    assert type(mechanism) is ATTENTION_REGISTRY[attention].cls


def test_every_attention_is_told_its_depth(corpus, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--attention", "transnormer_t1",
          "--encoder-layers", 5, "--checkpoint-activations")  # fmt: skip
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "a" / "checkpoint_last.pt")])
    layers = model.encoder.sentence_encoder.layers
    assert [layer.self_attn.attention.is_local for layer in layers] == [True, True, False, False, False]


def test_random_features_go_on_where_they_were(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--attention", "performer", "--performer-redraw-every", 2)
    whole = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options, "--max-update", 6)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *options, "--max-update", 3)
    resumed = train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "b", *options, "--max-update", 6)
    whole, resumed = (
        {row["num_updates"]: (row["loss"], row["gnorm"]) for row in log["train"]} for log in (whole, resumed)
    )
    assert list(resumed) == ["4", "5", "6"]
    assert resumed == {update: whole[update] for update in resumed}


def test_logits_are_the_same_alone_padded_and_with_longer_mates(task_data, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "a.log", task_data, tmp_path / "a", *CLASSIFICATION, *LLN,
          "--lln-diag-block-size", 8)  # fmt: skip
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "a" / "checkpoint_last.pt")])
    model.eval()
    assert model.encoder.sentence_encoder.layers[0].self_attn.attention.block_size == 8
    sentence = torch.tensor([0, *range(5, 23), 2])
    batch = torch.full((2, 60), task.source_dictionary.pad())
    batch[0, :20], batch[1] = sentence, torch.arange(60) % 50 + 4

    def logits(tokens):
        return model(tokens, classification_head_name="sentence_classification_head")[0][0]

    alone = logits(sentence[None])
    torch.testing.assert_close(logits(batch[:1]), alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(batch), alone, rtol=0, atol=1e-5)


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=120)


HYDRA = ("model=tiny", "corpus=demo", "run=cpu")


def test_both_command_lines_build_the_same_model(corpus, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN,
          "--lln-diag-scope", "batch", "--lln-diag-block-size", 24, "--dropout", 0,
          "--attention-dropout", 0, "--clip-norm", 1, "--weight-decay", 0.01, "--adam-betas", "(0.9,0.98)",
          "--adam-eps", 1e-6)  # fmt: skip
    hydra_train(monkeypatch, *HYDRA, f"task.data={corpus}", f"checkpoint.save_dir={tmp_path / 'b'}",
                f"common.log_file={tmp_path / 'b.log'}", "task.tokens_per_sample=64", "task.sample_break_mode=none",
                "model.encoder_layers=2", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64",
                "model.encoder_attention_heads=2", "model.lln_diag_scope=batch", "model.lln_diag_block_size=24",
                "dataset.batch_size=8", "common.seed=3", "common.log_format=json", "common.log_interval=1",
                "lr_scheduler._name=fixed", "~lr_scheduler.warmup_updates", "~lr_scheduler.total_num_update",
                "optimization.max_update=3", "optimization.lr=[0.001]", "task.mask_prob=0.15")  # fmt: skip
    logs = [(tmp_path / name).read_text() for name in ("a.log", "b.log")]
    counts = [re.search(r"num\. shared model params: ([\d,]+)", log)[1] for log in logs]
    assert counts[0] == counts[1]
    ours, theirs = (losses(read_log(log)) for log in logs)
    assert len(ours) == 3
    assert ours == theirs


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_give_way_to_what_is_set(preset):
    config = OmegaConf.structured(LLNRobertaConfig)
    config.encoder_layers = 7
    ARCH_CONFIG_REGISTRY[f"lln_roberta_{preset}"](config)
    sizes = [complete_config(config)[field] for field in SIZE_FIELDS]
    assert sizes == [7, *PRESETS[preset][1:]]


BAD_OPTIONS = [
    (("--attention", "lln_dia"), "invalid choice.*softmax"),
    (("--encoder-attention-heads", "5"), "embedding dimension 32 is not divisible by 5"),
    (("--lln-diag-block-size", "0"), "block_size must be at least 1, got 0"),
    (
        ("--max-positions", "32"),
        "a sample has 64 tokens, but the model .* at most 32: set --tokens-per-sample .* or raise --max-positions",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_of_fairseq_train(options, message, corpus, tmp_path, monkeypatch, capsys):
    with pytest.raises((InputError, SystemExit)) as caught:
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *options)
    assert re.search(message, str(caught.value) + capsys.readouterr().err)
    assert not (tmp_path / "a" / "checkpoint_last.pt").exists()


def test_bad_input_ends_in_one_line_and_an_exit_code(tmp_path):
    failed = run(sys.executable, "-m", "fairseq_cli.train", tmp_path, *TRAINING, *MASKED_LM, *LLN,
                 "--save-dir", tmp_path / "save")  # fmt: skip
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith(f"error: {tmp_path} is not a binarized data directory: ")
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=lln_dia"], "Could not find 'attention/lln_dia'.*lln_diag"),
        (["task.data=nowhere"], "^error: nowhere is not a binarized data directory: nowhere/dict.txt is missing$"),
        (["+model.lln_diag_blocksize=3"], "unknown option 'lln_diag_blocksize'; did you mean 'lln_diag_block_size'"),
        (["run=gpu8"], "^error: 8 workers on this machine need a GPU each"),
    ],
)
def test_bad_input_of_hydra(overrides, message, corpus, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as failed:
        hydra_train(monkeypatch, *HYDRA, f"task.data={corpus}", f"checkpoint.save_dir={tmp_path / 'save'}", *overrides)
    assert failed.value.code == 1
    said = capsys.readouterr().err
    assert re.search(message, said, re.DOTALL | re.MULTILINE), said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.exhaustive
def test_a_compiled_model_has_the_logits_of_the_model(corpus, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *MASKED_LM, *LLN, "--max-update", 1)
    model, task = load_model(str(tmp_path / "run/checkpoint_last.pt"))
    pad = task.source_dictionary.pad()
    tokens = torch.randint(4, 60, (3, 50), generator=torch.Generator().manual_seed(0))
    padded = tokens.clone()
    padded[1, 30:] = pad
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        for batch in (tokens, padded):
            (expected, _), (found, _), real = model(batch), compiled(batch), batch.ne(pad)
            assert relative_rms(found[real], expected[real]) <= FLOAT32_FORWARD
    torch.compiler.reset()


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("length", [50, 7])
def test_a_feed_forward_part_in_pieces_gives_the_same(normalize_before, length):
    """Outputs and gradients, with a last piece that is smaller and with one piece for all."""
    cfg = TransformerConfig(dropout=0.0, attention_dropout=0.0, activation_fn="gelu")
    cfg.encoder.embed_dim, cfg.encoder.ffn_embed_dim, cfg.encoder.attention_heads = 32, 64, 2
    cfg.encoder.normalize_before = normalize_before
    mask = torch.arange(length).expand(2, -1) >= torch.tensor([[length], [5]])
    found = []
    for tokens in (0, 16):
        torch.manual_seed(0)
        layer = LLNEncoderLayer(cfg, "lln_diag", {}, tokens)
        pieces = []
        layer.fc1.register_forward_hook(lambda module, args, out, seen=pieces: seen.append(args[0].shape[:2].numel()))
        x = torch.randn(length, 2, 32, requires_grad=True)
        layer(x, mask).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
        assert max(pieces) == (16 if tokens and length > 8 else 2 * length)
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
