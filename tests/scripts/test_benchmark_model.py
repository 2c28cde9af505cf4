"""Table 2 at the smallest size, and the parts of it that can be wrong."""

import json
import os
import signal

import pytest
import torch
import torch.nn.functional as F

from lln_fairseq.attention import LAYER_REGISTRY, MECHANISMS, build_attention
from lln_fairseq.models.presets import PRESETS
from scripts.benchmarks import model as benchmark
from scripts.benchmarks import model_training
from scripts.benchmarks.meter import OutOfMemory, in_child
from scripts.benchmarks.model_report import Row, table
from scripts.benchmarks.model_training import Adam, Training
from scripts.benchmarks.plain_roberta import PlainRoberta
from tests.helpers import with_representatives


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def arguments(*words):
    return benchmark.parse(["--device", "cpu", "--threads", "1", "--smoke", *words])


@pytest.mark.exhaustive
def test_smoke_run_covers_every_attention_and_adds_to_what_is_there(tmp_path, capsys):
    out = tmp_path / "t.json"
    common = ["--smoke", "--device", "cpu", "--threads", "1", "--json", str(out), "--add"]
    assert benchmark.main([*common, "--no-time", "--attentions", "lln_diag", "softmax_matrix"]) == 0
    assert benchmark.main([*common, "--no-memory", "--png", str(tmp_path / "t.png")]) == 0
    rows = {(row["attention"], row["length"]): row for row in json.loads(out.read_text())["rows"]}
    names = (*MECHANISMS, benchmark.MATRIX, *benchmark.PAPER_ROWS, *benchmark.RECIPE_ROWS)
    assert rows.keys() == {(name, 96) for name in names}
    assert all(row["time"][0] > 0 and not row["oom"] for row in rows.values())
    assert {name for (name, _), row in rows.items() if row["memory"]} == {"lln_diag", "softmax_matrix"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "times as fast as softmax" in capsys.readouterr().out
    assert benchmark.main([*common, "--dropout", "0"]) == 1
    assert "other settings" in capsys.readouterr().err


def test_what_is_out_of_memory_is_said_and_the_rest_measured(monkeypatch):
    def peak(name, length, args):
        if name == "softmax":
            raise OutOfMemory
        return 10**9

    add = Training.add

    def full(self, name):
        if name == "lln":
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")
        add(self, name)

    monkeypatch.setattr(benchmark, "peak_memory", peak)
    monkeypatch.setattr(Training, "add", full)
    rows = [Row(name, 64) for name in ("softmax", "lln", "elu")]
    benchmark.measure(rows, 64, arguments())
    assert [row.oom for row in rows] == [True, True, False]
    lines = {line.split()[0]: line.split()[1:] for line in table(benchmark.settings(arguments()), rows).splitlines()
             if line}  # fmt: skip
    assert lines["softmax"] == lines["lln"] == ["OOM"]
    assert lines["elu"] == ["1.000"]


def test_a_child_without_memory_is_told_from_one_with_an_error():
    assert in_child(len, "ab") == 2
    with pytest.raises(OutOfMemory):
        in_child(bytearray, 2**45)
    with pytest.raises(OutOfMemory):
        in_child(kill_oneself)
    with pytest.raises(RuntimeError, match="len failed: TypeError"):
        in_child(len, 1)


def test_both_softmax_rows_compute_the_same(monkeypatch):
    training = Training(arguments("--dropout", "0"), 64)
    logits = []
    training.model.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    monkeypatch.setattr(Adam, "step", lambda self: None)
    for name in ("softmax", benchmark.MATRIX):
        training.add(name)
        training.iteration(name)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("dtype", with_representatives(["float32", "float16"], "float32"))
def test_an_iteration_lowers_the_loss(dtype, monkeypatch):
    training = Training(arguments("--dtype", dtype, "--dropout", "0", "--vocabulary", "50"), 64)
    training.add("linformer")  # which has parameters of its own
    losses, cross_entropy = [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args: losses.append(loss := cross_entropy(*args)) or loss)
    modules, optimizers = training.rows["linformer"]
    head, layer = training.model.encoder.lm_head, training.layers[0]
    trained = [*modules.parameters(), head.dense.weight, layer.fc1.weight, layer.self_attn.q_proj.weight]
    before = [parameter.detach().clone() for parameter in trained]
    for optimizer in optimizers:
        optimizer.optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(8):
        training.iteration("linformer")
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.dtype == benchmark.DTYPES[dtype] for p in training.model.parameters())
    assert not any(map(torch.equal, before, trained))


@pytest.mark.parametrize("name", with_representatives(LAYER_REGISTRY, "flash"))
def test_a_layer_that_replaces_robertas_is_trained_and_put_out_again(name, monkeypatch):
    """RoBERTa's own layers stay as they are meanwhile; the rows that follow find them again."""
    training = Training(arguments("--dropout", "0", "--vocabulary", "50"), 64)
    layers = list(training.layers)
    for row in (name, "lln"):
        training.add(row)
    before = [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]
    modules, optimizers = training.rows[name]
    losses, cross_entropy = [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args: losses.append(loss := cross_entropy(*args)) or loss)
    for optimizer in optimizers:
        optimizer.optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(8):
        training.iteration(name)
    assert list(training.layers) == list(modules)
    assert losses[-1] < 0.95 * losses[0]
    assert all(map(torch.equal, before, (parameter for layer in layers for parameter in layer.parameters())))
    training.iteration("lln")
    assert list(training.layers) == layers


def test_the_plain_model_is_fairseqs():
    args = arguments("--dropout", "0", "--attentions", "lln_diag")
    training = Training(args, 64)
    training.add("lln_diag")
    training.iteration("lln_diag")  # puts the attention in place
    attention = build_attention("lln_diag", num_heads=2, head_dim=64, max_positions=64)
    plain = PlainRoberta(PRESETS["tiny"], args.vocabulary, 64, attention)
    state = {key: value for key, value in training.model.state_dict().items() if "version" not in key}
    plain.load_state_dict(state)
    given = {"src_tokens": training.words, "masked_tokens": training.masked}
    with torch.no_grad():
        torch.testing.assert_close(plain(**given)[0], training.model(**given)[0], rtol=1e-5, atol=1e-5)


def test_it_runs_without_fairseq(monkeypatch):
    for module in (benchmark, model_training):
        monkeypatch.setattr(module, "has_fairseq", lambda: False)
    training = Training(arguments(), 64)
    assert isinstance(training.model, PlainRoberta)
    for name in ("elu", "transnormer_t1", "flash", "tnn", "elu"):
        training.add(name)
        training.iteration(name)
    assert "plain torch" in benchmark.settings(arguments())["model"]


def test_bad_arguments_end_in_one_line(capsys):
    for words, message in ((["--attentions", "lln_dia"], "did you mean 'lln_diag'"), (["--add"], "--add needs --json")):
        with pytest.raises(SystemExit):
            benchmark.parse(["--device", "cpu", *words])
        assert message in capsys.readouterr().err.splitlines()[-1]
