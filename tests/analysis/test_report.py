"""`lln-fairseq analyze` on checkpoints that were trained here."""

import json
import math
import re
from pathlib import Path

import matplotlib.image
import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.analysis import entropy, measure
from lln_fairseq.analysis.analyze import analyse
from lln_fairseq.analysis.probe import record, spread_batches
from lln_fairseq.analysis.report import VARIANTS, collect
from lln_fairseq.inference.loading import load_model
from tests.fairseq_runs import CLASSIFICATION, MASKED_LM, make_classification, make_corpus, train

USER_DIR = ("--user-dir", Path(__file__).parents[2] / "lln_fairseq")
LLN = (*USER_DIR, "--arch", "lln_roberta_tiny")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, monkeypatch = tmp_path_factory.mktemp("trained"), pytest.MonkeyPatch()
    data = make_corpus(folder / "data")
    for attention in ("lln_diag", "softmax"):
        train(monkeypatch, folder / "log", data, folder / attention, *MASKED_LM, *LLN, "--attention", attention,
              "--max-update", 2)  # fmt: skip
    monkeypatch.undo()
    return data, {name: folder / name / "checkpoint_last.pt" for name in ("lln_diag", "softmax")}


def run(capsys, *arguments):
    code = main(["analyze", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("attention", ["lln_diag", "softmax"])
def test_table_json_and_picture(attention, trained, tmp_path, capsys):
    data, checkpoints = trained
    out, png = tmp_path / "a.json", tmp_path / "a.png"
    code, said, _ = run(capsys, checkpoints[attention], data, "--batches", 2, "--batch-size", 3, "--json", out,
                        "--png", png)  # fmt: skip
    assert code == 0
    assert "split 'valid': 4 sequences" in said  # all there are
    found = json.loads(out.read_text())
    assert found["sequences"] == 4
    assert found["longest"] <= 64
    assert len(found["layers"]) == 2
    for layer in found["layers"]:
        assert len(layer["entropy"]["by_head"]) == 2
        assert f"{layer['entropy']['mean']:.3f}" in said
        assert 0 < layer["entropy"]["mean"] <= math.log2(64)
        assert layer["entropy"]["mean"] == pytest.approx(sum(layer["entropy"]["by_head"]) / 2)
        assert (layer["tau_lln"]["mean"] is None) == (attention == "softmax")
        assert 0 < layer["q_ks"]["mean"] < 0.2
        assert 1 <= layer["rank"]["mean"] <= 64
    for name in ("residual", "rank"):
        assert set(found[name]) == set(VARIANTS)
        assert all(len(values) == 3 for values in found[name].values())
    assert found["residual"]["neither"][2] < found["residual"]["model"][2]
    assert "nan" not in said
    assert matplotlib.image.imread(png).std() > 0.1


def test_the_numbers_are_the_means_over_sequences(trained):
    data, checkpoints = trained
    report = analyse(str(checkpoints["softmax"]), str(data), batches=1, batch_size=3)
    model, task = load_model(str(checkpoints["softmax"]), str(data))
    task.load_dataset("valid")
    (batch,) = spread_batches(task.dataset("valid"), 1, 3, model)
    layer = record(model, batch)[1]
    P = layer.attention.attention_matrix(layer.q, layer.k, layer.key_padding_mask)
    expected = entropy(P, layer.key_padding_mask).double().mean(dim=0)
    torch.testing.assert_close(report.layers[1]["entropy"], expected)


def test_long_sequences_are_announced(trained, monkeypatch, capsys):
    data, checkpoints = trained
    monkeypatch.setattr(measure, "MAX_TOKENS", 40)
    code, said, _ = run(capsys, checkpoints["softmax"], data)
    assert code == 0
    assert "More than 40 tokens a sequence" in said
    assert "  -  " in said


def test_a_fine_tuned_model(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, "--max-update", 1)
    code, said, _ = run(capsys, tmp_path / "run" / "checkpoint_last.pt", data, "--split", "train")
    assert code == 0
    assert "split 'train': 16 sequences" in said


def test_bad_input_is_one_line(trained, tmp_path, monkeypatch, capsys):
    data, checkpoints = trained
    ours, broken, other = checkpoints["softmax"], tmp_path / "broken.pt", make_classification(tmp_path / "other")
    broken.write_bytes(b"no checkpoint")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "stock", *MASKED_LM, *USER_DIR, "--arch", "roberta",
          "--max-update", 1)  # fmt: skip
    for arguments, message in [
        ((broken, data), "cannot load .*broken.pt"),
        ((ours, other), "is not a binarized data directory: .*dict.txt is missing"),
        ((ours, data, "--batches", 0), "must be at least 1"),
        ((tmp_path / "stock" / "checkpoint_last.pt", data), "no attention of this package"),
        ((ours, data, "--json", tmp_path / "no" / "folder.json"), "no such directory: .*no"),
    ]:
        code, _, complaint = run(capsys, *arguments)
        assert code == 1
        assert complaint.count("\n") == 1
        assert re.search(f"^error: .*{message}", complaint), complaint


def test_a_sequence_longer_than_the_model_is_refused(trained):
    data, checkpoints = trained
    model, _ = load_model(str(checkpoints["softmax"]), str(data))
    batch = {"src_tokens": torch.full((1, 70), 5), "src_lengths": torch.tensor([70])}
    with pytest.raises(ValueError, match="a sequence of 70 tokens, and the model takes 64 at most"):
        collect(model, [batch])
