"""What is particular to the Triton kernels: splits, dropout, moment matching, memory layouts, and GPUs.

test_backends.py compares them with the oracles. All run in the interpreter on a CPU, natively where there is a GPU.
"""

import pytest
import torch

from lln_fairseq.ops import reference
from lln_fairseq.ops.autograd import hybrid_attention
from lln_fairseq.ops.backends import HybridSpec, triton
from lln_fairseq.ops.lln import lln_diag_attention
from tests import helpers
from tests.ops.mixes import MIXES, attend, errors, inputs, oracle, output_and_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
native = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
HALF = [torch.float16, pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, native])]  # the interpreter gets it wrong

pytestmark = pytest.mark.skipif(
    (reason := triton.is_supported(torch.empty(1, 1, 1, 64, device=DEVICE))) is not None, reason=str(reason)
)
every_mix = pytest.mark.parametrize("mix", MIXES)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a kernel forgets to write reads as NaN."""
    helpers.poison_empty(monkeypatch)


@pytest.fixture
def many_splits(monkeypatch):
    """Splits of 32 tokens, so that short sequences exercise the combining kernels."""
    for module in (triton, triton.joint):
        monkeypatch.setattr(module, "split_tokens", lambda length, dim: ((length + 31) // 32, 32))


def mask_of(batch, length, full_row=False):
    return helpers.random_padding(batch, length, seed=length, full_row=full_row, device=DEVICE)


def assert_float32(found, expected):
    wrong = errors(found, expected)
    assert wrong.pop("out") <= helpers.FLOAT32_FORWARD
    assert max(wrong.values()) <= helpers.FLOAT32_GRADIENT, wrong


@every_mix
def test_several_splits(many_splits, mix):
    tensors = inputs(mix, length=130, device=DEVICE)
    mask = torch.zeros(2, 130, dtype=torch.bool, device=DEVICE)
    mask[0, 20:100] = True  # splits and blocks without a real key
    mask[1, 3:] = True
    found = output_and_gradients(attend(mix, "triton", mask), tensors)
    assert_float32(found, output_and_gradients(oracle(mix, mask), tensors, torch.float64))


@pytest.mark.exhaustive
@every_mix
def test_the_real_number_of_splits(mix):
    tensors = inputs(mix, batch=1, heads=1, length=2100, dim=16, device=DEVICE)
    assert triton.split_tokens(2100, 16)[0] == 2
    mask = torch.arange(2100, device=DEVICE)[None, :] >= 2077
    found = output_and_gradients(attend(mix, "triton", mask, 64), tensors)
    assert_float32(found, output_and_gradients(oracle(mix, mask, 64), tensors, torch.float64))


@every_mix
def test_layouts_are_not_copied(mix):
    tensors = inputs(mix, device=DEVICE)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:3]]
    assert triton.aligned(*by_token)[2].data_ptr() == by_token[2].data_ptr()
    assert attend(mix, "triton")(*by_token, *tensors[3:]).stride() == by_token[0].stride()
    packed = torch.cat(by_token, dim=-1).chunk(3, -1)
    assert packed[1].data_ptr() == triton.aligned(*packed)[1].data_ptr()


def test_dropout_of_the_blocks():
    length, dim, p, block_size = 96, 64, 0.25, 48
    tensors = inputs("average", length=length, dim=dim, device=DEVICE)
    zeros = torch.zeros_like(tensors[0])

    def seeded(seed):
        mix = HybridSpec(0.5, 0.5, block_size, p, torch.tensor([seed], device=DEVICE))
        return lambda *tensors: hybrid_attention(*tensors, None, mix, "triton")

    # with q = k = 0 a block's row is uniform, so feeding unit vectors as v reads the kept entries off the output
    keep = torch.zeros(2, 3, length, length, device=DEVICE)
    for start in range(0, length, dim):
        v = torch.zeros_like(zeros)
        for i in range(min(dim, length - start)):
            v[:, :, start + i, i] = 1.0
        out = seeded(7)(zeros, zeros, v, *tensors[3:])
        keep[..., start : start + dim] = (2 * out - v.mean(-2, keepdim=True))[..., : length - start] * block_size
    block = torch.arange(length, device=DEVICE) // block_size
    same = (block[:, None] == block[None, :]).expand_as(keep)
    assert keep[~same].abs().max() < 1e-4
    keep = torch.where(same, (keep * (1 - p)).round(), keep.new_zeros(()))
    assert set(keep[same].unique().tolist()) == {0.0, 1.0}
    assert abs(keep[same].mean().item() - (1 - p)) < 4 * (p * (1 - p) / same.sum().item()) ** 0.5
    assert not torch.equal(keep[0, 0], keep[0, 1])

    def expected(q, k, v, alpha, beta):
        diag = reference.block_diag_matrix(q, k, block_size) * keep.double() / (1 - p)
        return (reference.lln_matrix(q, k, alpha, beta) + diag) @ v / 2

    found = output_and_gradients(seeded(7), tensors)
    assert_float32(found, output_and_gradients(expected, tensors, torch.float64))
    assert not torch.equal(seeded(8)(*tensors), found[0])


TABLE = (torch.tensor([-3.0, -1.0, 0.5, 2.0, 2.7]), torch.tensor([0.1, 0.9, 1.4, 2.6, 2.9]))


def matched(q, k, mask):
    """The formula in float64, one (batch, head) at a time."""
    result = torch.zeros(2, *q.shape[:2], dtype=torch.float64)
    for b in range(q.shape[0]):
        real = slice(None) if mask is None else ~mask[b].cpu()
        for h in range(q.shape[1]):
            sigma = [x[b, h].cpu().double()[real].std(correction=0).clamp_min(1e-6) for x in (q, k)]
            log_s = 2 * (sigma[0].log() + sigma[1].log())
            x, y = (t.double() for t in TABLE)
            i = int(((x <= log_s).sum() - 1).clamp(0, len(x) - 2))
            log_sigma2 = y[i] + (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (log_s - x[i])
            for j in range(2):
                result[j, b, h] = (log_sigma2 / 2).exp() / 2**0.5 / sigma[j]
    return result


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])  # below, inside and above the table
@pytest.mark.parametrize("splits", [False, True])
def test_moment_matching(request, scale, splits):
    if splits:
        request.getfixturevalue("many_splits")
    q, k, _ = helpers.random_qkv(3, 2, 130, 32, scale=scale, device=DEVICE)
    q = q + 100.0
    mask = mask_of(3, 130)
    mask[0, :40] = True  # a split without a real token
    table = [x.to(DEVICE) for x in TABLE]
    rows = mask[:, None, :, None]
    found = triton.match_moments(q.masked_fill(rows, 1e4), k.masked_fill(rows, 1e4), mask, table)
    for x, y in zip(found, matched(q, k, mask), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=2e-5, atol=0)
    for x, y in zip(triton.match_moments(q, k, None, table), matched(q, k, None), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=2e-5, atol=0)


def test_moment_matching_of_constant_and_of_no_tokens():
    q = torch.ones(2, 2, 40, 32, device=DEVICE)
    mask = torch.zeros(2, 40, dtype=torch.bool, device=DEVICE)
    mask[1] = True
    for x in triton.match_moments(q, q, mask, [x.to(DEVICE) for x in TABLE]):
        assert x.isfinite().all()


def test_what_is_not_supported_says_why():
    q = torch.zeros(1, 2, 8, 64, device=DEVICE)
    assert triton.is_supported(q) is None
    assert "float64" in triton.is_supported(q.double())
    assert "48" in triton.is_supported(q[..., :48])
    with pytest.raises(ValueError, match="blocks of 16 to 256 tokens, not 8"):
        lln_diag_attention(q, q, q, 1.0, 1.0, None, 8, backend="triton")


@native
@pytest.mark.gpu
@every_mix
def test_no_waiting_for_the_device(mix):
    tensors = inputs(mix, length=4096, dim=64, dtype=torch.float16, device=DEVICE)
    do, mask = torch.randn_like(tensors[0]), mask_of(2, 4096)
    table = [x.to(DEVICE) for x in TABLE]
    options = {} if mix == "lln" else {"dropout_p": 0.1}

    def run():
        leaves = [x.detach().requires_grad_() for x in tensors]
        torch.autograd.grad(attend(mix, "triton", mask, 64, **options)(*leaves), leaves, do)

    run()  # compiles
    triton.match_moments(*tensors[:2], mask, table)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton.match_moments(*tensors[:2], mask, table)
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@native
@pytest.mark.gpu
def test_cuda_graph_draws_new_dropout_at_each_replay():
    tensors = inputs("average", length=4096, dim=64, dtype=torch.float16, device=DEVICE)
    do = torch.randn_like(tensors[0])
    for p in (0.0, 0.1):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]

        def step(leaves=leaves, p=p):
            out = attend("average", "triton", None, 64, dropout_p=p)(*leaves)
            return [out, *torch.autograd.grad(out, leaves, do)]

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            eager = step()
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
        first = [x.clone() for x in captured]
        graph.replay()
        same = [torch.equal(x, y) for x, y in zip(first, captured, strict=True)]
        assert all(same) if p == 0 else not any(same[:4])
        if p == 0:
            assert all(torch.equal(x, y) for x, y in zip(first, eager, strict=True))


@native
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 36])  # 36 heads: more than 2**31 elements in a tensor
def test_a_million_tokens(monkeypatch, heads):
    monkeypatch.undo()  # poisoning would cost time here
    length, dim, block = 2**20, 64, 64
    q, k, v = (torch.randn(1, length, heads, dim, device=DEVICE, dtype=torch.float16).transpose(1, 2) for _ in range(3))
    out = lln_diag_attention(q, k, v, 1.4, 1.4, None, block, backend="triton")
    h = heads - 1
    y = 1.4 * k[0, h].float()
    features = (1.4 * q[0, h, -block:].float() + y.logsumexp(0)).softmax(-1)
    expected = features.double() @ (y.double().softmax(0).T @ v[0, h].double())
    last = [x[0, h, -block:].double() for x in (q, k, v)]
    expected = (expected + (last[0] @ last[1].T / dim**0.5).softmax(-1) @ last[2]) / 2
    assert helpers.relative_rms(out[0, h, -block:], expected) < 2e-3
