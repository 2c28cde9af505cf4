"""Tests of the benchmark of training iterations (Table 2) at the smallest size, and of its parts."""

import json
import os
import signal

import pytest
import torch
import torch.nn.functional as F

from lln_fairseq.attention import LAYER_REGISTRY, MECHANISMS
from scripts.benchmarks import model as benchmark
from scripts.benchmarks.meter import OutOfMemory, in_child
from scripts.benchmarks.model import Adam, Training
from scripts.research.training import compose_config
from tests.helpers import with_representatives


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def parse(*options):
    """Return the arguments of a smoke run on one thread, without dropout, with 50 words."""
    args = benchmark.parse_arguments(["--device", "cpu", "--threads", "1", "--dropout", "0", "--smoke", *options])
    args.vocabulary = 50
    return args


@pytest.fixture
def losses(monkeypatch):
    """Return a list to which every iteration appends its loss."""
    recorded = []
    cross_entropy = F.cross_entropy

    def recording_cross_entropy(*args):
        loss = cross_entropy(*args)
        recorded.append(loss)
        return loss

    monkeypatch.setattr(F, "cross_entropy", recording_cross_entropy)
    return recorded


def train(training, name):
    """Run eight iterations at a high learning rate."""
    _, optimizers = training.mechanisms[name]
    for optimizer in optimizers:
        optimizer.optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(8):
        training.iteration(name)


@pytest.mark.exhaustive
def test_smoke_run_covers_every_mechanism(tmp_path, capsys):
    output = tmp_path / "t.json"

    assert benchmark.main(["--smoke", "--device", "cpu", "--threads", "1", "--json", str(output), "--no-memory"]) == 0

    rows = json.loads(output.read_text())["rows"]
    names = (*MECHANISMS, benchmark.MATRIX, *benchmark.PAPER_ROWS, *benchmark.RECIPE_ROWS)
    assert {(row["attention"], row["column"]) for row in rows} == {(name, "96") for name in names}
    assert all(row["time"][0] > 0 and not row["oom"] for row in rows)
    assert "as a multiple of softmax" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_smoke_run_measures_memory(tmp_path):
    output = tmp_path / "t.json"
    options = ["--smoke", "--device", "cpu", "--threads", "1", "--json", str(output)]

    assert benchmark.main([*options, "--attentions", "lln_diag", "softmax_matrix"]) == 0

    assert all(row["memory"] > 0 for row in json.loads(output.read_text())["rows"])


def test_child_returns_the_result():
    assert in_child(len, "ab") == 2


def test_child_without_memory_raises_out_of_memory():
    with pytest.raises(OutOfMemory):
        in_child(bytearray, 2**45)


def test_killed_child_raises_out_of_memory():
    with pytest.raises(OutOfMemory):
        in_child(kill_this_process)


def test_child_raises_the_error_of_its_function():
    with pytest.raises(TypeError):
        in_child(len, 1)


def test_both_softmax_rows_compute_the_same(monkeypatch):
    training = Training(parse(), 64)
    logits = []
    training.model.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    monkeypatch.setattr(Adam, "step", lambda self: None)

    for name in ("softmax", benchmark.MATRIX):
        training.add(name)
        training.iteration(name)

    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[1])  # the same to the bit would mean the same kernel


@pytest.mark.parametrize("dtype", with_representatives(["float32", "float16"], "float32"))
def test_iterations_train_all_parameters(dtype, losses):
    training = Training(parse("--dtype", dtype), 64)
    training.add("linformer")  # an attention with parameters
    modules, _ = training.mechanisms["linformer"]
    head = training.model.encoder.lm_head
    layer = training.layers[0]
    trained = [*modules.parameters(), head.dense.weight, layer.fc1.weight, layer.self_attn.q_proj.weight]
    before = [parameter.detach().clone() for parameter in trained]

    train(training, "linformer")

    assert losses[-1] < 0.9 * losses[0]
    assert all(p.dtype == benchmark.DTYPES[dtype] for p in training.model.parameters())
    assert not any(map(torch.equal, before, trained))


@pytest.mark.parametrize("name", with_representatives(LAYER_REGISTRY, "flash"))
def test_replacement_layers_are_trained_and_removed_again(name, losses):
    """RoBERTa's own layers do not change meanwhile, and the next attention uses them again."""
    training = Training(parse(), 64)
    roberta_layers = list(training.layers)
    parameters = [parameter for layer in roberta_layers for parameter in layer.parameters()]
    for mechanism in (name, "lln"):
        training.add(mechanism)
    before = [parameter.detach().clone() for parameter in parameters]
    modules, _ = training.mechanisms[name]

    train(training, name)
    assert list(training.layers) == list(modules)
    assert losses[-1] < 0.95 * losses[0]
    after = [parameter for layer in roberta_layers for parameter in layer.parameters()]
    assert all(map(torch.equal, before, after))

    training.iteration("lln")
    assert list(training.layers) == roberta_layers


@pytest.mark.exhaustive
def test_every_task_is_measured_and_compared_with_the_paper(tmp_path, monkeypatch, capsys):
    """The lengths and batches are tiny; the next test checks the real ones."""
    small = {task: (96, 2, classes, towers) for task, (_, _, classes, towers) in benchmark.TASKS.items()}
    monkeypatch.setattr(benchmark, "TASKS", small)
    attentions = ["softmax", "lln_diag", "reformer:hashes=2"]
    out = tmp_path / "t.json"
    options = ["--device", "cpu", "--threads", "1", "--repeats", "1", "--divide", "1", "--no-memory"]

    assert benchmark.main([*options, "--json", str(out), "--tasks", *small, "--attentions", *attentions]) == 0

    table = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert table["LLN+Diag (paper)"][2:] == ["0.14", "0.30", "0.14", "0.45", "0.31"]
    rows = json.loads(out.read_text())["rows"]
    expected = []
    for task in small:
        expected += [(task, attention) for attention in attentions]
    assert [(row["column"], row["attention"]) for row in rows] == expected
    assert all(row["time"][0] > 0 for row in rows)


def test_tasks_have_lengths_and_batches_of_recipes():
    for name, (length, batch, classes, towers) in benchmark.TASKS.items():
        task = compose_config("lra", [f"lra={name}"]).task
        assert (length, batch, classes) == (task.max_positions, task.global_batch, task.num_classes)
        assert towers == (2 if task.two_towers else 1)
