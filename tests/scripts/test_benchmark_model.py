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
from scripts.benchmarks.model import Training
from scripts.train_tasks import compose_config
from tests.helpers import with_representatives


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


# One repeat with 96 tokens, which are more than a block and than the number of landmarks.
SMALL = ("--device", "cpu", "--threads", "1", "--preset", "tiny", "--lengths", "96", "--repeats", "1")


def parse(*options):
    """Return the arguments of a small run without dropout, with 50 words."""
    args = benchmark.parse_arguments([*SMALL, "--dropout", "0", *options])
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


@pytest.mark.exhaustive
def test_every_mechanism_is_measured(tmp_path, capsys):
    output = tmp_path / "t.json"

    assert benchmark.main([*SMALL, "--json", str(output), "--no-memory"]) == 0

    rows = json.loads(output.read_text())["rows"]
    names = (*MECHANISMS, benchmark.MATRIX, *benchmark.PAPER_ROWS, *benchmark.RECIPE_ROWS)
    assert {(row["attention"], row["column"]) for row in rows} == {(name, "96") for name in names}
    assert all(row["time"][0] > 0 and not row["oom"] for row in rows)
    assert "as a multiple of softmax" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_memory_is_measured(tmp_path):
    output = tmp_path / "t.json"

    assert benchmark.main([*SMALL, "--json", str(output), "--attentions", "lln_diag", "softmax_matrix"]) == 0

    assert all(row["memory"] > 0 for row in json.loads(output.read_text())["rows"])


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
    logits = []
    for name in ("softmax", benchmark.MATRIX):
        training = Training(name, 64, parse())
        training.model.register_forward_hook(lambda module, args, out: logits.append(out[0]))
        training.iteration()

    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[1])  # the same to the bit would mean the same kernel


def test_options_of_a_row_reach_its_model():
    training = Training("lln_diag:block_size=16,dropout=0.3", 64, parse())

    attention = training.model.encoder.sentence_encoder.layers[0].self_attn.attention
    assert (attention.config.block_size, attention.dropout) == (16, 0.3)


def test_memory_of_local_global_can_be_measured(losses):
    """Also the small model that is trained first needs the four layers of the recipe."""
    args = parse()
    args.preset = "small"

    benchmark.prepare_training("local_global", 64, args)()

    assert len(losses) == 4


def test_softmax_is_the_unit_of_ratios(tmp_path, capsys):
    output = tmp_path / "t.json"
    options = ("--attentions", "softmax", "lln_diag", "--no-memory", "--tokens", "384", "--json", str(output))
    assert benchmark.main([*SMALL, *options]) == 0

    blocks = capsys.readouterr().out.split("\n\n")
    assert "batch 384 tokens" in blocks[0]
    multiples = {line.split("  ")[0]: line.split()[-1] for line in blocks[2].splitlines()}
    assert multiples["softmax"] == "1.00"
    speeds = {line.split("  ")[0]: line.split()[-1] for line in blocks[3].splitlines()}
    assert float(speeds["lln_diag"].replace(",", "")) > 0
    assert json.loads(output.read_text())["provenance"]["versions"]["torch"] == torch.__version__


TRAINED = [
    ("linformer", "float32"),
    ("linformer", "float16"),
    ("linformer", "bfloat16"),
    *((name, "float32") for name in LAYER_REGISTRY),
]


@pytest.mark.parametrize("case", with_representatives(TRAINED, TRAINED[0], ("flash", "float32")))
def test_iterations_train_all_parameters(case, losses):
    name, dtype = case
    training = Training(name, 64, parse("--dtype", dtype))
    training.adam.optimizer.param_groups[0]["lr"] = 1e-3
    layer = training.model.encoder.sentence_encoder.layers[0]
    trained = [training.model.encoder.lm_head.dense.weight, *layer.parameters()]
    before = [parameter.detach().clone() for parameter in trained]

    for _ in range(8):
        training.iteration()

    assert losses[-1] < 0.95 * losses[0]
    assert all(p.dtype == benchmark.DTYPES[dtype] for p in training.model.parameters())
    assert not any(map(torch.equal, before, trained))


@pytest.mark.exhaustive
def test_every_task_is_measured(tmp_path, monkeypatch):
    """The lengths and batches are tiny; the next test checks the real ones."""
    small = {name: task._replace(length=96, batch=2) for name, task in benchmark.TASKS.items()}
    monkeypatch.setattr(benchmark, "TASKS", small)
    attentions = ["softmax", "lln_diag", "reformer:hashes=2"]
    out = tmp_path / "t.json"
    options = ["--device", "cpu", "--threads", "1", "--repeats", "1", "--divide", "1", "--no-memory"]

    assert benchmark.main([*options, "--json", str(out), "--tasks", *small, "--attentions", *attentions]) == 0

    rows = json.loads(out.read_text())["rows"]
    expected = []
    for task in small:
        expected += [(task, attention) for attention in attentions]
    assert [(row["column"], row["attention"]) for row in rows] == expected
    assert all(row["time"][0] > 0 for row in rows)


def test_tasks_have_lengths_and_batches_of_recipes():
    for name, sizes in benchmark.TASKS.items():
        task = compose_config("lra", [f"lra={name}"]).task
        assert sizes[:3] == (task.max_positions, task.global_batch, task.num_classes)
        assert sizes.sequences == (2 if task.two_towers else 1)
