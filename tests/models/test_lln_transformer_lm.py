"""The language model through fairseq's own command lines: what it sees, generation, resuming, evaluation."""

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
    hydra_train,
    make_corpus,
    make_dictionary,
    options,
    train,
)
from tests.helpers import FLOAT32_FORWARD, relative_rms

TASK = (*USER_DIR, *options("--task lln_language_modeling --tokens-per-sample 64 --dropout 0"))
LM = (*TASK, "--arch", "lln_transformer_lm")
SIZES = options("""
    --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64
    --decoder-attention-heads 2 --decoder-normalize-before
""")


@pytest.fixture(scope="module", autouse=True)
def sizes_of_a_decoder():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fairseq_runs, "TRAINING", [*TRAINING[: TRAINING.index("--encoder-layers")], *SIZES])
        yield


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Folder and log of a training of three updates."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, train(monkeypatch, folder / "log", corpus, folder, *LM)


def load(folder):
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(folder / "checkpoint_last.pt")])
    return model.eval(), task


@pytest.fixture(params=[{}, {"alpha": 1.5, "beta": 2.0}], ids=["matched", "fixed"])
def model(run, request):
    model, _ = load(run[0])
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            vars(module).update(request.param)
            with torch.no_grad():  # as concentrated as in a trained model
                module.q_proj.weight *= 4
                module.k_proj.weight *= 4
    return model


def random_tokens(rows=2, length=90):
    return torch.randint(4, 64, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_no_prediction_depends_on_a_later_token(model):
    tokens = random_tokens()
    scores = model(tokens)[0]
    for first in (1, 40, 89):
        changed = tokens.clone()
        changed[:, first:] = tokens[:, first:].roll(1, 1) ^ 1
        found = model(changed)[0]
        assert relative_rms(found[:, :first], scores[:, :first]) <= FLOAT32_FORWARD
        assert relative_rms(found[:, first:], scores[:, first:]) > 0.01
    model.train()  # and not in training either
    assert relative_rms(model(tokens[:, :50])[0], scores[:, :50]) <= FLOAT32_FORWARD


@torch.no_grad()
def test_padding_changes_nothing(model):
    tokens = random_tokens()
    scores = model(tokens)[0]
    padded = torch.cat([tokens, tokens.new_full((2, 30), model.decoder.padding_idx)], dim=1)
    assert relative_rms(model(padded)[0][:, :90], scores) <= FLOAT32_FORWARD


@torch.no_grad()
def test_token_by_token_is_all_at_once(model):
    tokens, state = random_tokens(), {}
    scores = model(tokens)[0]
    steps = [model.decoder(tokens[:, : end + 1], incremental_state=state)[0] for end in range(tokens.shape[1])]
    assert relative_rms(torch.cat(steps, dim=1), scores) <= FLOAT32_FORWARD
    kept = {key: value.shape for entry in state.values() for key, value in entry.items() if value is not None}
    assert kept["maximum"] == (2, 2, 1, 16)
    assert kept["sums"] == (2, 2, 16, 17)  # of one size whatever the length


def test_beam_search_scores_as_the_whole_sequence_does(run, model):
    _, task = load(run[0])
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=3, max_len=12, normalize_scores=False)
    prefix = random_tokens(length=5)
    sample = {"net_input": {"src_tokens": prefix, "src_lengths": torch.tensor([5, 5])}}
    for row, found in enumerate(task.inference_step(generator, [model], sample, prefix_tokens=prefix)):
        tokens = found[0]["tokens"]
        assert torch.equal(tokens[:5], prefix[row])
        given = torch.cat([torch.tensor([task.source_dictionary.eos()]), tokens[:-1]])
        with torch.no_grad():
            scores = model(given[None])[0].log_softmax(dim=-1)[0].gather(1, tokens[:, None])
        torch.testing.assert_close(found[0]["positional_scores"], scores[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("updates", [2, 3])  # inside an epoch, and at its end
def test_it_learns_and_resumes_exactly(updates, corpus, tmp_path, monkeypatch):
    def losses(folder, updates):
        log = tmp_path / f"{folder}{updates}.log"
        rows = train(monkeypatch, log, corpus, tmp_path / folder, *LM, "--max-update", updates)["train"]
        return {row["num_updates"]: (row["loss"], row["gnorm"]) for row in rows}

    whole, begun = losses("whole", 6), losses("parts", updates)
    assert begun | losses("parts", 6) == whole
    assert len(begun) == updates
    assert float(whole["6"][0]) < float(whole["1"][0])


def test_parameters_are_those_of_fairseqs_model(corpus, run, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "log", corpus, tmp_path / "stock", *TASK, "--arch", "transformer_lm")
    ours, stock = load(run[0])[0], load(tmp_path / "stock")[0]
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict())


def test_fairseq_eval_lm(corpus, run, monkeypatch, caplog):
    arguments = [str(corpus), "--path", str(run[0] / "checkpoint_last.pt"), "--gen-subset", "valid", "--cpu"]
    monkeypatch.setattr(sys, "argv", ["fairseq-eval-lm", *arguments, *map(str, TASK[:-2]), "--batch-size", "3"])
    fairseq_cli.eval_lm.cli_main()
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", caplog.text)[1])
    assert loss == pytest.approx(float(run[1]["valid"][-1]["valid_loss"]), abs=2e-3)


def test_eval_lm_refuses_samples_that_it_would_not_score(corpus, run, monkeypatch):
    arguments = [str(corpus), "--path", str(run[0] / "checkpoint_last.pt"), "--gen-subset", "valid", "--cpu"]
    monkeypatch.setattr(
        sys, "argv", ["fairseq-eval-lm", *arguments, *map(str, TASK[:-2]), "--tokens-per-sample", "100"]
    )
    with pytest.raises(InputError, match="a sample has 100 tokens, but the model and --max-tokens take at most 64"):
        fairseq_cli.eval_lm.cli_main()


def test_training_refuses_lines_that_do_not_fit(corpus, tmp_path, monkeypatch):
    options = ("--sample-break-mode", "complete", "--tokens-per-sample", 16)
    with pytest.raises(InputError, match=r"take at most 16: set --tokens-per-sample .* to 16 with"):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path, *LM, *options)
    rows = train(monkeypatch, tmp_path / "log", corpus, tmp_path, *LM, *options, "--shorten-method", "truncate")
    assert len(rows["train"]) == 3


def test_data_of_another_dictionary_are_refused(tmp_path, monkeypatch):
    one, other = make_corpus(tmp_path / "one"), make_corpus(tmp_path / "other", words=WORDS[::-1])
    with pytest.raises(InputError, match="other symbols"):
        train(monkeypatch, tmp_path / "log", f"{one}:{other}", tmp_path / "run", *LM)
    make_dictionary(one / "dict.txt", WORDS[:30])
    with pytest.raises(InputError, match="has 34 symbols"):
        train(monkeypatch, tmp_path / "log", one, tmp_path / "run", *LM)


def test_the_recipe(corpus, tmp_path, monkeypatch):
    hydra_train(monkeypatch, f"task.data={corpus}", f"checkpoint.save_dir={tmp_path}",
                "optimization.max_update=2", "common.log_format=none", recipe="language_model")  # fmt: skip
    model, task = load(tmp_path)
    assert all(isinstance(layer.self_attn, CausalSelfAttention) for layer in model.decoder.layers)
    assert task.cfg.tokens_per_sample == 256


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--lln-alpha", 2), "given together"),
        (("--lln-alpha", "inf", "--lln-beta", 2), "must be positive"),
        (("--sample-break-mode", "eos"), "none or complete do"),
    ],
)
def test_bad_options_are_named(corpus, tmp_path, monkeypatch, given, message):
    with pytest.raises(InputError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path, *LM, *given)


def test_programs_for_encoders_refuse_it(run):
    with pytest.raises(InputError, match="holds a language model"):
        load_model(str(run[0] / "checkpoint_last.pt"))


def test_a_checkpoint_cannot_have_its_text_evaluated(run, tmp_path):
    state = torch.load(run[0] / "checkpoint_last.pt")
    state["cfg"]["model"]["adaptive_softmax_cutoff"] = "__import__('os').abort()"
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match="adaptive_softmax_cutoff is not supported"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint.pt")])


def test_a_run_does_not_go_on_with_another_attention(run, corpus, tmp_path, monkeypatch):
    folder = shutil.copytree(run[0], tmp_path / "run")
    with pytest.raises(InputError, match=r"model\._name = lln_transformer_lm .* transformer_lm"):
        train(monkeypatch, tmp_path / "log", corpus, folder, *LM, "--max-update", 5, "--arch", "transformer_lm")
