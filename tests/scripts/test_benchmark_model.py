"""Table 2 at the smallest size, and the parts of it that can be wrong."""

import json
import os
import signal

import pytest
import torch
import torch.nn.functional as F

from lln_fairseq.attention import LAYER_REGISTRY, MECHANISMS
from scripts.benchmarks import model as benchmark
from scripts.benchmarks.meter import OutOfMemory, in_child
from scripts.benchmarks.model_training import Adam, Training
from tests.helpers import with_representatives


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def arguments(*words):
    args = benchmark.parse(["--device", "cpu", "--threads", "1", "--dropout", "0", "--smoke", *words])
    args.vocabulary = 50
    return args


@pytest.fixture
def losses(monkeypatch):
    """The losses of all iterations."""
    found = []
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args: found.append(loss := cross_entropy(*args)) or loss)
    return found


def train(training, name):
    """Eight iterations at a high learning rate."""
    _, optimizers = training.rows[name]
    for optimizer in optimizers:
        optimizer.optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(8):
        training.iteration(name)


@pytest.mark.exhaustive
def test_smoke_run_covers_every_attention(tmp_path, capsys):
    command = ["--smoke", "--device", "cpu", "--threads", "1", "--json", str(tmp_path / "t.json")]
    assert benchmark.main([*command, "--no-memory"]) == 0
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    names = (*MECHANISMS, benchmark.MATRIX, *benchmark.PAPER_ROWS, *benchmark.RECIPE_ROWS)
    assert {(row["attention"], row["length"]) for row in rows} == {(name, 96) for name in names}
    assert all(row["time"][0] > 0 and not row["oom"] for row in rows)
    assert "times as fast as softmax" in capsys.readouterr().out
    assert benchmark.main([*command, "--attentions", "lln_diag", "softmax_matrix"]) == 0
    assert all(row["memory"] > 0 for row in json.loads((tmp_path / "t.json").read_text())["rows"])


def test_a_child_without_memory_is_told_from_one_with_an_error():
    assert in_child(len, "ab") == 2
    with pytest.raises(OutOfMemory):
        in_child(bytearray, 2**45)
    with pytest.raises(OutOfMemory):
        in_child(kill_oneself)
    with pytest.raises(TypeError):
        in_child(len, 1)


def test_both_softmax_rows_compute_the_same(monkeypatch):
    training = Training(arguments(), 64)
    logits = []
    training.model.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    monkeypatch.setattr(Adam, "step", lambda self: None)
    for name in ("softmax", benchmark.MATRIX):
        training.add(name)
        training.iteration(name)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("dtype", with_representatives(["float32", "float16"], "float32"))
def test_an_iteration_lowers_the_loss(dtype, losses):
    training = Training(arguments("--dtype", dtype), 64)
    training.add("linformer")  # which has parameters of its own
    modules, _ = training.rows["linformer"]
    head, layer = training.model.encoder.lm_head, training.layers[0]
    trained = [*modules.parameters(), head.dense.weight, layer.fc1.weight, layer.self_attn.q_proj.weight]
    before = [parameter.detach().clone() for parameter in trained]
    train(training, "linformer")
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.dtype == benchmark.DTYPES[dtype] for p in training.model.parameters())
    assert not any(map(torch.equal, before, trained))


@pytest.mark.parametrize("name", with_representatives(LAYER_REGISTRY, "flash"))
def test_a_layer_that_replaces_robertas_is_trained_and_put_out_again(name, losses):
    """RoBERTa's own layers stay as they are meanwhile; the rows that follow find them again."""
    training = Training(arguments(), 64)
    layers = list(training.layers)
    for row in (name, "lln"):
        training.add(row)
    before = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]
    modules, _ = training.rows[name]
    train(training, name)
    assert list(training.layers) == list(modules)
    assert losses[-1] < 0.95 * losses[0]
    assert all(map(torch.equal, before, (parameter for layer in layers for parameter in layer.parameters())))
    training.iteration("lln")
    assert list(training.layers) == layers
