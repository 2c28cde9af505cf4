"""Test the program that cuts softmax attention to the neighborhood of a token."""

import json

import pytest
import torch

from data_prep.glue_held_out import build_glue_held_out
from scripts.research import cut_softmax
from scripts.research.cut_softmax import Cuts, same_block, same_sentence, within_window
from tests.fairseq_runs import CLASSIFICATION, LLN, train, widen_attention
from tests.text_runs import PAIR, write_raw_tasks, write_tokenizer


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Return the path and the data of a classifier of pairs with softmax attention whose outputs depend on it."""
    folder = tmp_path_factory.mktemp("pairs")
    source = write_raw_tasks(folder / "raw")
    data = folder / "data"
    build_glue_held_out(data, "RTE", str(write_tokenizer(folder)), train=28, test=20, source=source, workers=1)
    options = ("--criterion", "lln_sentence_prediction", *LLN, "--attention", "softmax", *PAIR, "--num-classes", 2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", data, folder / "run", *CLASSIFICATION, *options, "--max-update", 2)
    path = folder / "run" / "checkpoint_last.pt"
    widen_attention(path)
    return path, data


def test_a_token_is_near_its_block_its_window_and_its_sentence():
    tokens = torch.tensor([[5, 9, 6, 7, 9, 8]])

    assert same_block(4)(tokens)[1].tolist() == [True, True, True, True, False, False]
    assert within_window(2)(tokens)[1].tolist() == [True, True, True, True, False, False]
    assert within_window(2)(tokens)[4].tolist() == [False, False, True, True, True, True]
    sentence = same_sentence(torch.tensor([9]))(tokens)[0]
    assert sentence[0].tolist() == [True, True, False, False, False, False]  # the end belongs to the sentence
    assert sentence[2].tolist() == [False, False, True, True, True, False]


def test_cut_leaves_the_first_text_and_what_is_near(classifier):
    cuts = Cuts(str(classifier[0]), str(classifier[1]), rows=20)
    tokens = cuts.samples[0]["net_input"]["src_tokens"][:1]
    length = int(cuts.first_text(tokens).sum())

    allowed = cuts.allowed_pairs(tokens, within_window(0))[0, 0]

    assert tokens[0, length - 1 : length + 1].tolist() == [cuts.eos, cuts.eos]  # <s> A </s></s> B </s>
    assert allowed[:length].all()
    assert allowed[:, :length].all()
    assert torch.equal(allowed[length:, length:], torch.eye(tokens.shape[1] - length, dtype=torch.bool))


def test_wide_cut_changes_nothing_and_a_narrow_one_does(classifier):
    cuts = Cuts(str(classifier[0]), str(classifier[1]), rows=20)
    original = cuts.outputs(None)

    wide = cut_softmax.compare(cuts.task, cuts.outputs(within_window(1000)), original)
    narrow = cut_softmax.compare(cuts.task, cuts.outputs(same_block(2)), original)
    restored = cuts.outputs(same_block(2), softmax_layer=0)

    assert wide["divergence"] < 1e-6
    assert wide["same"] == 100
    assert narrow["divergence"] > 1e-4
    assert not torch.allclose(restored.logits, cuts.outputs(same_block(2)).logits)


def test_report_has_a_row_for_every_cut_and_layer(classifier, tmp_path, capsys):
    file = tmp_path / "cuts.json"

    assert cut_softmax.main([*map(str, classifier), "--rows", "12", "--json", str(file)]) == 0

    content = json.loads(file.read_text())
    assert content["rows"] == 12
    assert {"no cut", "the own sentence", "blocks of 32, softmax in layer 1"} <= content["cuts"].keys()
    for shares in content["attention_shares"]:
        assert sum(shares) == pytest.approx(100, abs=1e-3)
        assert min(shares) > 0
    assert "other sentences [%]" in capsys.readouterr().out


def test_model_without_softmax_is_refused(classifier, tmp_path, capsys):
    state = torch.load(classifier[0], weights_only=False)
    state["cfg"]["model"]["attention"] = "lln"
    torch.save(state, tmp_path / "lln.pt")

    assert cut_softmax.main([str(tmp_path / "lln.pt"), str(classifier[1])]) == 1

    assert "lln.pt has lln attention" in capsys.readouterr().err
