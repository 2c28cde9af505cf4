"""The causal language model through fairseq's own command lines: causality, generation, resuming and evaluation."""

import re
import shutil
import sys

import fairseq_cli.eval_lm
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.sequence_generator import SequenceGenerator

from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.modules.causal_self_attention import CausalSelfAttention
from tests import fairseq_runs
from tests.fairseq_runs import (
    TRAINING,
    USER_DIR,
    WORDS,
    assert_resumes_exactly,
    hydra_train,
    make_corpus,
    make_dictionary,
    split_options,
    train,
)
from tests.helpers import FLOAT32_FORWARD, relative_rms

TASK = (*USER_DIR, *split_options("--task lln_language_modeling --tokens-per-sample 64 --dropout 0"))
LM = (*TASK, "--arch", "lln_transformer_lm")
SIZES = split_options("""
    --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64
    --decoder-attention-heads 2 --decoder-normalize-before
""")


@pytest.fixture(scope="module", autouse=True)
def decoder_sizes():
    """Replace the sizes of an encoder in the default options of a run by those of a decoder."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fairseq_runs, "TRAINING", [*TRAINING[: TRAINING.index("--encoder-layers")], *SIZES])
        yield


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Train for three updates and return the directory and the log."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, train(monkeypatch, folder / "log", corpus, folder, *LM)


def load(folder):
    """Load the model of a run, in evaluation mode, and its task."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(folder / "checkpoint_last.pt")])
    return model.eval(), task


@pytest.fixture(params=[{}, {"alpha": 1.5, "beta": 2.0}], ids=["matched", "fixed"])
def model(run, request):
    """Return the trained model with matched or fixed α and β, and with attention as concentrated as after training."""
    model, _ = load(run[0])
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            vars(module).update(request.param)
            with torch.no_grad():
                module.q_proj.weight *= 4
                module.k_proj.weight *= 4
    return model


def random_tokens(rows=2, length=90):
    return torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_predictions_do_not_depend_on_later_tokens(model):
    tokens = random_tokens()
    scores = model(tokens)[0]
    for first in (1, 40, 89):
        changed_tokens = tokens.clone()
        changed_tokens[:, first:] = tokens[:, first:].roll(1, 1) ^ 1
        changed_scores = model(changed_tokens)[0]
        assert relative_rms(changed_scores[:, :first], scores[:, :first]) <= FLOAT32_FORWARD
        assert relative_rms(changed_scores[:, first:], scores[:, first:]) > 0.01
    model.train()
    assert relative_rms(model(tokens[:, :50])[0], scores[:, :50]) <= FLOAT32_FORWARD


@torch.no_grad()
def test_predictions_do_not_depend_on_padding(model):
    tokens = random_tokens()
    scores = model(tokens)[0]
    padded = torch.cat([tokens, tokens.new_full((2, 30), model.decoder.padding_idx)], dim=1)
    assert relative_rms(model(padded)[0][:, :90], scores) <= FLOAT32_FORWARD


@torch.no_grad()
def test_incremental_decoding_matches_full_forward(model):
    tokens = random_tokens()
    scores = model(tokens)[0]
    state = {}
    steps = [model.decoder(tokens[:, : end + 1], incremental_state=state)[0] for end in range(tokens.shape[1])]
    assert relative_rms(torch.cat(steps, dim=1), scores) <= FLOAT32_FORWARD

    shapes = {}
    for entry in state.values():
        for key, value in entry.items():
            if value is not None:
                shapes[key] = value.shape
    # These do not grow with the number of tokens.
    assert shapes["maximum"] == (2, 2, 1, 16)
    assert shapes["sums"] == (2, 2, 16, 17)


def test_beam_search_scores_match_full_forward(run, model):
    _, task = load(run[0])
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=3, max_len=12, normalize_scores=False)
    prefix = random_tokens(length=5)
    sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([5, 5])}}
    hypotheses = task.inference_step(generator, [model], sample, prefix_tokens=prefix)
    for row, (best, *_) in enumerate(hypotheses):
        tokens = best["tokens"]
        assert torch.equal(tokens[:5], prefix[row])
        inputs = torch.cat([torch.tensor([task.source_dictionary.eos()]), tokens[:-1]])
        with torch.no_grad():
            log_probabilities = model(inputs[None])[0].log_softmax(dim=-1)[0]
        expected = log_probabilities.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(best["positional_scores"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("updates", [2, 3])  # inside an epoch, and at its end
def test_training_learns_and_resumes_exactly(updates, corpus, tmp_path, monkeypatch):
    log = assert_resumes_exactly(monkeypatch, tmp_path, corpus, *LM, stop=updates, updates=6)
    assert float(log["6"][0]) < float(log["1"][0])


def test_parameters_match_stock_transformer_lm(corpus, run, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "stock", *TASK, "--arch", "transformer_lm")
    model, _ = load(run[0])
    stock, _ = load(tmp_path / "stock")
    assert model.state_dict().keys() == stock.state_dict().keys()
    model.load_state_dict(stock.state_dict())


def run_eval_lm(monkeypatch, corpus, run, *arguments):
    """Run fairseq-eval-lm on the validation set with the task options, but without --dropout."""
    command = ["fairseq-eval-lm", str(corpus), "--path", str(run[0] / "checkpoint_last.pt"), "--gen-subset", "valid"]
    monkeypatch.setattr(sys, "argv", [*command, "--cpu", *map(str, TASK[:-2]), *arguments])
    fairseq_cli.eval_lm.cli_main()


def test_fairseq_eval_lm_reports_validation_loss(corpus, run, monkeypatch, caplog):
    run_eval_lm(monkeypatch, corpus, run, "--batch-size", "3")
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", caplog.text)[1])
    assert loss == pytest.approx(float(run[1]["valid"][-1]["valid_loss"]), abs=2e-3)


def test_eval_lm_rejects_samples_that_are_too_long(corpus, run, monkeypatch):
    with pytest.raises(InputError, match="a sample has 100 tokens, but the model and --max-tokens allow at most 64"):
        run_eval_lm(monkeypatch, corpus, run, "--tokens-per-sample", "100")


def test_training_rejects_long_lines_unless_truncated(corpus, tmp_path, monkeypatch):
    options = ("--sample-break-mode", "complete", "--tokens-per-sample", 16)
    with pytest.raises(InputError, match=r"allow at most 16: set --tokens-per-sample .* to 16 with"):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path, *LM, *options)
    log = train(monkeypatch, tmp_path / "log", corpus, tmp_path, *LM, *options, "--shorten-method", "truncate")
    assert len(log["train"]) == 3


def test_training_rejects_data_with_another_dictionary(tmp_path, monkeypatch):
    first = make_corpus(tmp_path / "one")
    second = make_corpus(tmp_path / "other", words=WORDS[::-1])
    with pytest.raises(InputError, match="other symbols"):
        train(monkeypatch, tmp_path / "log", f"{first}:{second}", tmp_path / "run", *LM)
    make_dictionary(first / "dict.txt", WORDS[:30])
    with pytest.raises(InputError, match="has 34 symbols"):
        train(monkeypatch, tmp_path / "log", first, tmp_path / "run", *LM)


def test_language_model_recipe_trains(corpus, tmp_path, monkeypatch):
    overrides = (
        f"task.data={corpus}",
        f"checkpoint.save_dir={tmp_path}",
        "optimization.max_update=2",
        "common.log_format=none",
    )
    hydra_train(monkeypatch, *overrides, recipe="language_model")
    model, task = load(tmp_path)
    assert all(isinstance(layer.self_attn, CausalSelfAttention) for layer in model.decoder.layers)
    assert task.cfg.tokens_per_sample == 256


BAD_OPTIONS = [
    (("--lln-alpha", 2), "given together"),
    (("--lln-alpha", "inf", "--lln-beta", 2), "must be positive"),
    (("--sample-break-mode", "eos"), "use none or complete"),
]


@pytest.mark.parametrize(("bad_options", "message"), BAD_OPTIONS)
def test_training_rejects_bad_options(corpus, tmp_path, monkeypatch, bad_options, message):
    with pytest.raises(InputError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path, *LM, *bad_options)


def test_programs_for_encoders_reject_a_language_model(run):
    with pytest.raises(InputError, match="holds a language model"):
        load_model(str(run[0] / "checkpoint_last.pt"))


def test_text_in_a_checkpoint_is_never_evaluated(run, tmp_path):
    """fairseq would call eval() on this option."""
    state = torch.load(run[0] / "checkpoint_last.pt")
    state["cfg"]["model"]["adaptive_softmax_cutoff"] = "__import__('os').abort()"
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match="adaptive_softmax_cutoff is not supported"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint.pt")])


def test_resume_rejects_another_architecture(run, corpus, tmp_path, monkeypatch):
    folder = shutil.copytree(run[0], tmp_path / "run")
    with pytest.raises(InputError, match=r"model\._name = lln_transformer_lm .* transformer_lm"):
        train(monkeypatch, tmp_path / "log", corpus, folder, *LM, "--max-update", 5, "--arch", "transformer_lm")
