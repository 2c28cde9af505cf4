"""The RoBERTa model through fairseq's own command lines: stock checkpoints, both command lines, and bad input."""

import re
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.gelu import gelu
from omegaconf import OmegaConf

from lln_fairseq.attention import ATTENTION_REGISTRY, Context
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.layer import LLNEncoderLayer
from lln_fairseq.models.lln_roberta import PRESETS, SIZE_FIELDS, LLNRobertaConfig, complete_config
from tests.fairseq_runs import (
    LLN,
    MASKED_LM,
    assert_resumes_exactly,
    hydra_train,
    losses_and_norms,
    read_log,
    train,
)
from tests.helpers import with_representatives

ROOT = Path(__file__).parents[2]
USER_DIR = ("--user-dir", ROOT / "lln_fairseq")


def test_softmax_trains_exactly_like_stock_roberta(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, "--required-batch-size-multiple", 1)
    stock_options = (*options, "--arch", "roberta", *USER_DIR)
    softmax_options = (*options, *LLN, "--attention", "softmax")
    stock = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *stock_options)
    softmax = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *softmax_options)
    assert len(losses_and_norms(stock)) == 3
    assert losses_and_norms(stock) == losses_and_norms(softmax)
    assert stock["valid"][0]["valid_loss"] == softmax["valid"][0]["valid_loss"]


@pytest.mark.parametrize("attention", with_representatives(sorted(ATTENTION_REGISTRY), "lln", "linformer"))
def test_every_attention_trains_and_loads(attention, corpus, tmp_path, monkeypatch):
    log = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--attention", attention)
    assert len(log["train"]) == 3
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "a" / "checkpoint_last.pt")])
    module = model.encoder.sentence_encoder.layers[0].self_attn.attention
    assert type(module) is ATTENTION_REGISTRY[attention].cls


def test_resumed_run_draws_the_same_random_features(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--attention", "performer", "--performer-redraw-every", 2)
    assert_resumes_exactly(monkeypatch, tmp_path, corpus, *options, stop=3, updates=6)


HYDRA = ("model=tiny", "corpus=demo", "run=cpu")


def test_both_command_lines_build_the_same_model(corpus, tmp_path, monkeypatch):
    options = """
        --lln-diag-scope batch --lln-diag-block-size 24 --dropout 0 --attention-dropout 0 --clip-norm 1
        --weight-decay 0.01 --adam-betas (0.9,0.98) --adam-eps 1e-6
    """
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *options.split())
    overrides = """
        task.tokens_per_sample=64 task.sample_break_mode=none task.mask_prob=0.15 model.encoder_layers=2
        model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=64 model.encoder_attention_heads=2
        model.lln_diag_scope=batch model.lln_diag_block_size=24 dataset.batch_size=8 common.seed=3
        common.log_format=json common.log_interval=1 lr_scheduler._name=fixed ~lr_scheduler.warmup_updates
        ~lr_scheduler.total_num_update optimization.max_update=3 optimization.lr=[0.001]
    """
    paths = (
        f"task.data={corpus}",
        f"checkpoint.save_dir={tmp_path / 'b'}",
        f"common.log_file={tmp_path / 'b.log'}",
    )
    hydra_train(monkeypatch, *HYDRA, *paths, *overrides.split())

    argparse_log = (tmp_path / "a.log").read_text()
    hydra_log = (tmp_path / "b.log").read_text()
    pattern = r"parameters +([\d,]+)"
    assert re.search(pattern, argparse_log)[1] == re.search(pattern, hydra_log)[1]
    argparse_losses = losses_and_norms(read_log(argparse_log))
    assert len(argparse_losses) == 3
    assert argparse_losses == losses_and_norms(read_log(hydra_log))


def test_run_resumes_with_text_option_as_number_or_text(corpus, tmp_path, monkeypatch):
    """The values of these options are texts. Hydra reads a value without quotes as a number."""
    overrides = """
        lr_scheduler.warmup_updates=1 task.global_batch=8 dataset.batch_size=8 dataset.num_workers=0
        model.encoder_layers=1 model.lln_diag_block_size=8 model.lln_diag_mix=joint_offset
    """
    arguments = (*HYDRA, *overrides.split(), f"task.data={corpus}", f"checkpoint.save_dir={tmp_path / 'run'}")

    def train_until(update, global_tokens, softmax_layers):
        options = (f"model.lln_diag_global_tokens={global_tokens}", f"model.softmax_layers={softmax_layers}")
        hydra_train(monkeypatch, *arguments, *options, f"optimization.max_update={update}")

    train_until(1, "16", "0")
    train_until(2, "'16'", "'0'")
    for changed in (("17", "0"), ("16", "null")):
        with pytest.raises(SystemExit):
            train_until(3, *changed)
    model, _ = load_model(str(tmp_path / "run/checkpoint_last.pt"), str(corpus))
    assert (model.args.lln_diag_global_tokens, model.args.softmax_layers) == ("16", "0")


@pytest.mark.parametrize("preset", PRESETS)
def test_explicit_size_overrides_preset(preset):
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
        "a sample has 64 tokens, but the model .* at most 32: set --tokens-per-sample .* or raise --max-tokens",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_fairseq_train_rejects_bad_options(options, message, corpus, tmp_path, monkeypatch, capsys):
    with pytest.raises((UserError, SystemExit)) as caught:
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *options)
    assert re.search(message, str(caught.value) + capsys.readouterr().err)
    assert not (tmp_path / "a" / "checkpoint_last.pt").exists()


BAD_OVERRIDES = [
    (["attention=lln_dia"], "Could not find 'attention/lln_dia'.*lln_diag"),
    (["task.data=nowhere"], "^error: nowhere does not exist: prepare the data first, see docs/data.md$"),
    (["+model.lln_diag_blocksize=3"], "unknown option 'lln_diag_blocksize'; did you mean 'lln_diag_block_size'"),
    (["+checkpoint.safe_dir=x"], "^error: unknown option 'checkpoint.safe_dir'; did you mean 'save_dir'"),
    (["+optimization.max_updates=2"], "unknown option 'optimization.max_updates'; did you mean 'max_update'"),
    (["+bpe.gpt2_vocab=x"], r"unknown option 'bpe.gpt2_vocab' \(known: _name\)"),
    (["+comon.seed=3"], "unknown group of options 'comon'; did you mean 'common'"),
    (["run=gpu8"], "^error: fp16 needs a GPU, but there is none: choose run=cpu "),
]


@pytest.mark.parametrize(("overrides", "message"), BAD_OVERRIDES)
def test_hydra_reports_bad_input_without_traceback(overrides, message, corpus, tmp_path, monkeypatch, capsys):
    paths = (f"task.data={corpus}", f"checkpoint.save_dir={tmp_path / 'save'}")
    with pytest.raises(SystemExit) as failed:
        hydra_train(monkeypatch, *HYDRA, *paths, "optimization.max_update=1", *overrides)
    assert failed.value.code == 1
    output = capsys.readouterr().err
    assert re.search(message, output, re.DOTALL | re.MULTILINE), output
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("length", [50, 7])  # two sequences of 7 fit into one piece, of 50 leave a smaller last piece
def test_feed_forward_in_pieces_gives_the_same_gradients(normalize_before, length):
    cfg = TransformerConfig(dropout=0.0, attention_dropout=0.0, activation_fn="gelu")
    cfg.encoder.embed_dim = 32
    cfg.encoder.ffn_embed_dim = 64
    cfg.encoder.attention_heads = 2
    cfg.encoder.normalize_before = normalize_before
    mask = torch.arange(length).expand(2, -1) >= torch.tensor([[length], [5]])

    def gradients_and_largest_piece(feed_forward_tokens):
        torch.manual_seed(0)
        layer = LLNEncoderLayer(cfg, "lln_diag", {}, feed_forward_tokens)
        piece_sizes = []
        layer.fc1.register_forward_hook(lambda module, args, out: piece_sizes.append(args[0].shape[:2].numel()))
        x = torch.randn(length, 2, 32, requires_grad=True)
        layer(x, Context(mask)).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in layer.parameters())], max(piece_sizes)

    expected, whole_size = gradients_and_largest_piece(0)
    gradients, piece_size = gradients_and_largest_piece(16)

    assert whole_size == 2 * length
    assert piece_size == min(16, 2 * length)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_in_half_precision_has_the_bits_of_fairseqs(dtype):
    cfg = TransformerConfig(dropout=0.0, attention_dropout=0.0, activation_fn="gelu")
    cfg.encoder.embed_dim = 32
    cfg.encoder.ffn_embed_dim = 64
    cfg.encoder.attention_heads = 2
    layer = LLNEncoderLayer(cfg, "softmax", {}).to(dtype)
    x = (3 * torch.randn(50, 2, 32)).to(dtype)

    def output_and_gradients():
        layer.zero_grad()
        out = layer(x)
        out.square().sum().backward()
        return [out.detach(), *(parameter.grad for parameter in layer.parameters())]

    actual = output_and_gradients()
    layer.activation_fn = lambda inner: gelu(inner)  # not the function that the layer replaces

    for value, expected in zip(actual, output_and_gradients(), strict=True):
        assert torch.equal(value, expected)
