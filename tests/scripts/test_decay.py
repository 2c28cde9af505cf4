"""Test attention with decay: its matrix beside independent formulas, padding, large inputs, and small runs."""

import json

import pytest
import torch

from lln_fairseq.attention import ATTENTION_REGISTRY, Context
from lln_fairseq.ops import reference
from lln_fairseq.ops.moment_matching import match_moments
from scripts.research import decay, recall
from tests.fairseq_runs import make_corpus
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms

LENGTH = 70  # not a multiple of the block
LOG_TAU_WITHOUT_DECAY = 60.0


def build(weights):
    config = decay.DecayConfig(weights)
    return decay.DecayAttention(config, num_heads=3, head_dim=32, max_positions=LENGTH)


def matrix_without_decay(weights, q, k, padding):
    """Return the matrix (B, H, N, N) from functions of the package, in float64."""
    q = q.double()
    k = k.double()
    alpha, beta = match_moments(q, k, padding)
    if weights in ("lln", "lln_blocks"):
        return reference.lln_matrix(q, k, alpha, beta, padding)
    if weights == "softmax":
        return reference.softmax_matrix(q, k, padding)
    if weights == "blocks":
        return reference.block_diag_matrix(q, k, decay.BLOCK, padding)
    if weights == "uniform":
        return reference.softmax_matrix(0 * q, 0 * k, padding)
    phi_q = q * q.sigmoid() + 0.5
    phi_k = k * k.sigmoid() + 0.5
    return reference.kernel_matrix(phi_q, phi_k / phi_k.norm(dim=-1, keepdim=True), padding)


def decayed(matrix, tau):
    """Multiply each entry by λ^|i-j|, and divide each row by its sum, unless it is 0."""
    rate = (-1 / tau.double())[:, None, None].exp()
    index = torch.arange(matrix.shape[-1])
    weights = matrix * rate ** (index[:, None] - index).abs()
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("weights", decay.WEIGHTS)
def test_output_has_the_definition(weights, padded):
    q, k, v = random_qkv(length=LENGTH)
    padding = random_padding(2, LENGTH, full_row=True) if padded else None
    attention = build(weights)
    attention.log_tau.data = torch.tensor([0.5, 2.0, 4.0])
    expected = decayed(matrix_without_decay(weights, q, k, padding), attention.log_tau.detach().exp())
    if weights == "lln_blocks":
        expected = (expected + reference.block_diag_matrix(q.double(), k.double(), decay.BLOCK, padding)) / 2

    out = attention(q, k, v, Context(padding))

    assert relative_rms(out, expected @ v.double()) <= FLOAT32_FORWARD
    if padded:
        q[padding[:, None].expand(q.shape[:3])] = k[padding[:, None].expand(q.shape[:3])] = float("nan")
        real = ~padding[:, None, :, None].expand(out.shape)
        torch.testing.assert_close(attention(q, k, v, Context(padding))[real], out[real])


@pytest.mark.parametrize("weights", ["lln", "softmax", "blocks", "uniform"])
def test_without_decay_it_is_the_attention_of_the_package(weights):
    q, k, _ = random_qkv(length=LENGTH)
    attention = build(weights)
    torch.nn.init.constant_(attention.log_tau, LOG_TAU_WITHOUT_DECAY)

    expected = matrix_without_decay(weights, q, k, None)

    assert relative_rms(attention.attention_matrix(q, k).expand(expected.shape), expected) <= FLOAT32_FORWARD


@pytest.mark.parametrize("weights", decay.WEIGHTS)
def test_rows_of_large_inputs_sum_to_one(weights):
    q, k, v = random_qkv(length=LENGTH, scale=100.0)
    attention = build(weights)

    matrix = attention.attention_matrix(q.requires_grad_(), k)
    (matrix @ v).sum().backward()

    torch.testing.assert_close(matrix.sum(dim=-1), torch.ones(matrix.shape[:-1]))
    assert attention.log_tau.grad.isfinite().all()
    if weights != "uniform":
        assert q.grad.isfinite().all()


def test_four_heads_start_at_the_initial_tau():
    torch.testing.assert_close(decay.initial_log_tau(4).exp(), torch.tensor(decay.INITIAL_TAU))
    torch.testing.assert_close(decay.initial_log_tau(2).exp(), torch.tensor([1.5, 256.0]))


def test_recall_accepts_the_attention(tmp_path, monkeypatch):
    for name, value in {"VOCABULARY": 64, "FIRST_VALUE": 32, "MASK": 64, "HELD_OUT_ROWS": 100}.items():
        monkeypatch.setattr(recall, name, value)
    arguments = [str(tmp_path), "--attentions", "decay:weights=lln", "--tasks", "8x1", "--widths", "64"]

    assert decay.main(["recall", *arguments, "--rows", "64", "--epochs", "1", "--rates", "0.01"]) == 0

    (file,) = tmp_path.iterdir()
    assert len(json.loads(file.read_text())["history"]) == 1
    assert "decay" not in ATTENTION_REGISTRY


@pytest.mark.exhaustive
def test_characters_write_losses_and_tau(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    overrides = ["model=nano", "run=cpu", f"task.data={make_corpus(tmp_path / 'lm')}", "optimization.max_update=1"]
    words = [str(tmp_path / "learned"), *overrides, "--attentions", "decay:weights=uniform", "softmax"]

    assert decay.main(["characters", *words, "--results", str(tmp_path / "results")]) == 0

    with_decay = json.loads((tmp_path / "results" / "learned_decay-weights-uniform_seed1.json").read_text())
    softmax = json.loads((tmp_path / "results" / "learned_softmax_seed1.json").read_text())
    assert with_decay["tau"] == [[1.5], [1.5]]  # the two layers of model=nano have one head each
    assert softmax["tau"] == []
    assert with_decay["group"] == "learned"
    assert with_decay["updates"] == softmax["updates"] == [1]
    assert len(with_decay["bits"]) == len(softmax["bits"]) == 1


def test_report_has_a_table_and_a_panel_for_each_group(tmp_path, capsys):
    results = tmp_path / "decay"
    results.mkdir()
    runs = [("learned", "softmax", 1, [4.2, 3.0]), ("learned", "softmax", 2, [4.0, 3.2])]
    runs.append(("rotary", "decay:weights=lln", 1, [3.0, 2.0]))
    for group, attention, seed, bits in runs:
        content = {"group": group, "attention": attention, "seed": seed, "updates": [500, 1000], "bits": bits}
        (results / f"{group}_{seed}.json").write_text(json.dumps(content))

    assert decay.main(["report", "--results", str(results)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert "| attention | seeds | 500 | 1000 |" in lines
    assert "| softmax | 2 | 4.10 (4.00–4.20) | 3.10 (3.00–3.20) |" in lines
    assert "| decay:weights=lln | 1 | 3.00 | 2.00 |" in lines
    assert (tmp_path / "decay.png").stat().st_size > 5000
