"""Test multi-query associative recall: the rows, a small run, its result file, and the split of the accuracy."""

import json

import pytest
import torch

from scripts.research import recall

SMALL = ["--tasks", "8x1", "--widths", "32", "--rows", "400", "--epochs", "3", "--batch", "16", "--rates", "0.01"]


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch):
    for name, value in {"VOCABULARY": 64, "FIRST_VALUE": 32, "MASK": 64, "HELD_OUT_ROWS": 100}.items():
        monkeypatch.setattr(recall, name, value)


@pytest.mark.parametrize("filler", ["zeros", "random"])
def test_every_mask_asks_for_the_value_of_a_pair(filler):
    rows = recall.make_rows(50, 64, 8, filler, seed=0)

    for tokens, masks, values in zip(rows.tokens.tolist(), rows.masks.tolist(), rows.values.tolist(), strict=True):
        pairs = dict(zip(tokens[0:16:2], tokens[1:16:2], strict=True))
        assert len(pairs) == 8
        assert [position for position in range(64) if tokens[position] == recall.MASK] == sorted(masks)
        assert min(masks) > 16
        assert [pairs[tokens[mask - 1]] for mask in masks] == values
        assert set(tokens[16:]) - {0, recall.MASK} == set(pairs) or filler == "random"


def test_draws_of_distinct_integers_are_permutations_of_a_full_range():
    drawn = recall.draw_distinct(20, 5, 10, 15, torch.Generator().manual_seed(0))

    assert drawn.sort(dim=1).values.tolist() == [[10, 11, 12, 13, 14]] * 20
    assert len(drawn.unique(dim=0)) > 1


def test_accuracy_is_split_by_the_block_of_the_query():
    rows = recall.RecallRows(torch.zeros(2, 128), torch.tensor([[31, 63], [97, 99]]), torch.tensor([[5, 6], [7, 8]]))

    class Answers(torch.nn.Module):
        """Predicts the values 5, 6, 7 and 0, of which the last one is wrong."""

        def forward(self, tokens, masks):
            return torch.nn.functional.one_hot(torch.tensor([[5, 6], [7, 0]]), 9)

    assert recall.recall_accuracy(Answers(), rows, 2) == {
        "all": 75.0,
        "same block": 100.0,
        "other block": pytest.approx(200 / 3),
        "beyond": 50.0,
    }


def test_last_layer_can_compute_softmax():
    settings = recall.RecallSettings(
        attention="window:block_size=4",
        softmax_last=True,
        length=16,
        pairs=2,
        filler="zeros",
        rows=8,
        width=32,
        head_dim=16,
        previous_token=True,
        lr=0.01,
        batch=4,
        epochs=1,
        target=99.0,
        seed=1,
    )

    _, first, last = recall.RecallModel(settings).layers

    assert type(first.attention).__name__ == "WindowAttention"
    assert type(last.attention).__name__ == "SoftmaxAttention"


@pytest.mark.parametrize("attention", ["softmax", "lln_diag:mix=joint_offset,block_size=4"])
def test_small_run_learns(attention, tmp_path, capsys):
    assert recall.main([str(tmp_path), "--attentions", attention, *SMALL]) == 0

    (file,) = tmp_path.iterdir()
    history = json.loads(file.read_text())["history"]
    assert history[-1]["loss"] < history[0]["loss"] - 1
    last = history[-1]["accuracy"]["all"]
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == [attention, "0.01", f"{last:.1f}", f"{last:.1f}", "–", "–", str(len(history))]


def test_previous_token_makes_recall_easy(tmp_path, capsys):
    sizes = ["--tasks", "16x2", "--widths", "64", "--rows", "6400", "--epochs", "4", "--rates", "0.003"]

    assert recall.main([str(tmp_path), "--attentions", "softmax", "--previous-token", *sizes, "--target", "80"]) == 0

    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["history"][-1]["accuracy"]["all"] >= 80


def test_table_has_the_best_learning_rate():
    def history(accuracy):
        return [{"accuracy": dict.fromkeys(recall.PARTS, accuracy)}]

    row = recall.best_rate_row("lln", {0.1: [history(10), history(50)], 0.01: [history(40), history(30) * 2]})

    assert row == ["lln", "0.01", *["35.0 (30.0–40.0)"] * 4, "1, 2"]


def test_finished_run_is_not_repeated(tmp_path, monkeypatch, capsys):
    assert recall.main([str(tmp_path), "--attentions", "softmax", *SMALL]) == 0
    table = capsys.readouterr().out.splitlines()[-3:]
    monkeypatch.setattr(recall, "train", lambda *_: pytest.fail("trained again"))

    assert recall.main([str(tmp_path), "--attentions", "softmax", *SMALL]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == table
    assert recall.main([str(tmp_path), "--attentions", "softmax", *SMALL, "--epochs", "4"]) == 1
    assert "was written with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "12x4"], "an even LENGTH of at least 4 * PAIRS, got '12x4'"),
        (["--widths", "48"], "--widths must be multiples of --head-dim 32, got 48"),
        (["--attentions", "softmax,lnl"], "unknown attention 'lnl'"),
        (["--attentions", "flash"], "flash replaces the whole encoder layer"),
    ],
)
def test_wrong_usage_is_explained(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        recall.main([str(tmp_path), *arguments])

    assert message in capsys.readouterr().err
