"""The Triton kernels against the quadratic oracles: in the interpreter on a CPU, natively where a GPU is."""

import pytest
import torch
import torch.nn.functional as F

from lln_fairseq.ops import reference
from lln_fairseq.ops.autograd import mixture
from lln_fairseq.ops.backends import Mixture, triton
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from tests import helpers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
native = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
HALF = [torch.float16, pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, native])]  # the interpreter gets it wrong

pytestmark = pytest.mark.skipif(
    (reason := triton.is_supported(torch.empty(1, 1, 1, 64, device=DEVICE))) is not None, reason=str(reason)
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a kernel forgets to write reads as NaN."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poison(*args, original=original, **kwargs):
            x = original(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        monkeypatch.setattr(torch, name, poison)


@pytest.fixture
def many_splits(monkeypatch):
    """Splits of 32 tokens, so that short sequences exercise the combining kernels."""
    monkeypatch.setattr(triton, "split_tokens", lambda length, dim: ((length + 31) // 32, 32))


def inputs(batch=2, heads=2, length=97, dim=32, dtype=torch.float32, scale=1.0, seed=0):
    """q, k, v, α, β (different for every head) and an incoming gradient."""
    q, k, v = helpers.random_qkv(batch, heads, length, dim, dtype, scale, seed, DEVICE)
    generator = torch.Generator().manual_seed(seed + 1)
    alpha, beta = (0.6 + torch.rand(2, batch, heads, generator=generator)).to(DEVICE)
    do = torch.randn(q.shape, generator=generator).to(DEVICE, dtype)
    return [q, k, v, alpha, beta], do


def mask_of(batch, length, full_row=False):
    return helpers.random_padding(batch, length, seed=length, full_row=full_row, device=DEVICE)


def gradients(function, tensors, do):
    """function(*tensors) and its gradients with respect to every tensor."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, do.to(out.dtype))]


def diag(q, k, v, alpha, beta, mask=None, block_size=64, dropout_p=0.0, seed=None):
    """½ (LLN + Diag) with a seed, an int or a tensor."""
    seed = torch.tensor([seed], device=DEVICE) if isinstance(seed, int) else seed
    return mixture(q, k, v, alpha, beta, mask, Mixture(0.5, 0.5, block_size, dropout_p, seed), "triton")


def kernels(mask, block_size, **options):
    def function(q, k, v, alpha, beta):
        if block_size is None:
            return lln_attention(q, k, v, alpha, beta, mask, backend="triton")
        return diag(q, k, v, alpha, beta, mask, block_size, **options)

    return function


def oracle(mask, block_size):
    def function(q, k, v, alpha, beta):
        if block_size is None:
            return reference.lln_matrix(q, k, alpha, beta, mask) @ v
        return reference.lln_diag_matrix(q, k, alpha, beta, block_size, mask) @ v

    return function


def exact(tensors, do, mask, block_size):
    return gradients(oracle(mask, block_size), [x.double() for x in tensors], do.double())


def plain(mask, block_size):
    """A (Wᵀv) and blockwise softmax written with torch operations: matrices in the dtype of q, float32 exponentials."""

    def function(q, k, v, alpha, beta):
        length, dtype = q.shape[-2], q.dtype
        y = beta[..., None, None] * k.float()
        if mask is not None:
            y = y.masked_fill(mask[:, None, :, None], float("-inf"))
        features = (alpha[..., None, None] * q.float() + y.logsumexp(-2, keepdim=True)).softmax(-1).to(dtype)
        out = features @ (y.softmax(-2).to(dtype).transpose(-2, -1) @ v)
        if block_size is None:
            return out
        block = torch.arange(length, device=q.device) // block_size
        allowed = (block[:, None] == block[None, :])[None, None]
        if mask is not None:
            allowed = allowed & ~mask[:, None, None, :]
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).float()
        scores = scores.masked_fill(~allowed, torch.finfo(torch.float32).min).softmax(-1)
        return (out + scores.masked_fill(~allowed, 0.0).to(dtype) @ v) / 2

    return function


def errors(actual, expected):
    return [helpers.relative_rms(a, e) for a, e in zip(actual, expected, strict=True)]


def assert_float32(actual, expected):
    found = errors(actual, expected)
    print("out, dq, dk, dv, dα, dβ:", *(f"{x:.1e}" for x in found))
    assert found[0] <= helpers.FLOAT32_FORWARD
    assert max(found[1:]) <= helpers.FLOAT32_GRADIENT


CASES = [  # length, dim, block size
    (1, 32, None), (63, 16, None), (97, 64, None), (130, 128, None),
    (1, 16, 16), (63, 32, 32), (97, 64, 64), (130, 128, 128),
    (130, 32, 16), (97, 32, 48), (150, 16, 100), (300, 16, 256),
]  # fmt: skip


@pytest.mark.parametrize(("length", "dim", "block_size"), CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_float32_equals_the_oracle(length, dim, block_size, padded):
    tensors, do = inputs(length=length, dim=dim)
    mask = mask_of(2, length, full_row=True) if padded else None
    assert_float32(gradients(kernels(mask, block_size), tensors, do), exact(tensors, do, mask, block_size))


@pytest.mark.parametrize("block_size", [None, 64])
def test_float32_over_several_splits(many_splits, block_size):
    tensors, do = inputs(length=130)
    mask = torch.zeros(2, 130, dtype=torch.bool, device=DEVICE)
    mask[0, 20:100] = True  # splits and blocks without a real key
    mask[1, 3:] = True
    assert_float32(gradients(kernels(mask, block_size), tensors, do), exact(tensors, do, mask, block_size))


@pytest.mark.parametrize("block_size", [None, 64])
def test_float32_at_the_real_number_of_splits(block_size):
    tensors, do = inputs(batch=1, heads=1, length=2100, dim=16)
    assert triton.split_tokens(2100, 16)[0] == 2
    mask = torch.arange(2100, device=DEVICE)[None, :] >= 2077
    assert_float32(gradients(kernels(mask, block_size), tensors, do), exact(tensors, do, mask, block_size))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("length", "dim", "block_size"), [(97, 64, None), (70, 128, 128), (97, 32, 48), (130, 64, 16)])
def test_half_precision_is_as_good_as_pytorch(many_splits, dtype, length, dim, block_size):
    tensors, do = inputs(heads=6, length=length, dim=dim, dtype=dtype)  # 12 values of dα and dβ
    mask = mask_of(2, length)
    expected = exact(tensors, do, mask, block_size)
    ours = errors(gradients(kernels(mask, block_size), tensors, do), expected)
    theirs = errors(gradients(plain(mask, block_size), tensors, do), expected)
    print("ours", *(f"{x:.1e}" for x in ours), "pytorch", *(f"{x:.1e}" for x in theirs))
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        factor = helpers.HALF_GRADIENT_FACTOR if i else helpers.HALF_FORWARD_FACTOR
        assert our <= factor * their + helpers.HALF_FLOOR, i


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("block_size", [None, 32])
def test_extreme_inputs_stay_finite(dtype, block_size):
    tensors, do = inputs(length=97, dtype=dtype, scale=50.0)
    tensors[3:] = [torch.full_like(x, 30.0) for x in tensors[3:]]
    # the true gradients are some 1e5 times do, beyond float16: scale it as a mean over tokens would
    for x in gradients(kernels(mask_of(2, 97, full_row=True), block_size), tensors, do / 97):
        assert x.isfinite().all()


@pytest.mark.parametrize("block_size", [None, 32])
def test_padding_changes_nothing(many_splits, block_size):
    tensors, do = inputs(batch=3)
    mask = mask_of(3, 97, full_row=True)
    rows = mask[:, None, :, None].expand_as(do)
    poisoned_tensors = [x.masked_fill(rows, 1e4) for x in tensors[:3]] + tensors[3:]
    after = gradients(kernels(mask, block_size), poisoned_tensors, do.masked_fill(rows, 0.0))
    before = gradients(kernels(mask, block_size), tensors, do.masked_fill(rows, 0.0))
    for x, y in zip(before[:4], after[:4], strict=True):
        torch.testing.assert_close(x[~rows], y[~rows], rtol=0, atol=0)
    for x in after[2:4]:
        assert (x[rows] == 0).all()
    for x in after[:4]:
        assert (x[-1] == 0).all()


@pytest.mark.parametrize("block_size", [None, 32])
def test_layouts_give_the_same_bits_without_copies(block_size):
    tensors, do = inputs()
    expected = gradients(kernels(None, block_size), tensors, do)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors[:3]]
    assert triton.aligned(*by_token)[2].data_ptr() == by_token[2].data_ptr()
    out = kernels(None, block_size)(*by_token, *tensors[3:])
    assert out.stride() == by_token[0].stride()
    found = [out, *torch.autograd.grad(out, by_token, do)]
    packed = torch.cat([x.detach() for x in by_token], dim=-1).requires_grad_()
    assert packed.chunk(3, -1)[1].data_ptr() == triton.aligned(*packed.chunk(3, -1))[1].data_ptr()
    out = kernels(None, block_size)(*packed.chunk(3, -1), *tensors[3:])
    (gradient,) = torch.autograd.grad(out, packed, do)
    for x, y, z in zip(expected, found, [out, *gradient.chunk(3, -1)], strict=False):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
        torch.testing.assert_close(x, z, rtol=0, atol=0)


def test_mixed_layouts_and_an_expanded_gradient():
    tensors, _ = inputs()
    tensors[0] = torch.cat([tensors[0]] * 2, dim=-1)[..., :32]  # not dense
    tensors[1] = tensors[1].transpose(1, 2).contiguous().transpose(1, 2)
    expected = exact(tensors, torch.ones_like(tensors[0]), None, 32)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = kernels(None, 32)(*leaves)
    out.sum().backward()
    assert_float32([out, *(x.grad for x in leaves)], expected)


@pytest.mark.parametrize("shape", [(), (2,), (3, 1), (3, 2)])
def test_alpha_and_beta_broadcast(shape):
    (q, k, v, _, _), do = inputs(batch=3, length=40)
    alpha, beta = torch.full(shape, 1.2, device=DEVICE), torch.full(shape, 0.7, device=DEVICE)
    found = gradients(kernels(None, None), [q, k, v, alpha, beta], do)
    assert found[4].shape == shape
    expected = gradients(
        lambda q, k, v, a, b: reference.lln_matrix(q, k, a.expand(3, 2), b.expand(3, 2)) @ v,
        [x.double() for x in (q, k, v, alpha, beta)],
        do.double(),
    )
    assert_float32(found, expected)
    same = lln_attention(q, k, v, 1.2, 0.7, backend="triton")
    torch.testing.assert_close(same, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [None, 32])
def test_results_repeat_and_do_not_depend_on_batch_mates(many_splits, block_size):
    tensors, do = inputs(batch=3, length=70)
    mask = mask_of(3, 70)
    whole = gradients(kernels(mask, block_size), tensors, do)
    for x, y in zip(whole, gradients(kernels(mask, block_size), tensors, do), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    alone = gradients(kernels(mask[1:2], block_size), [x[1:2] for x in tensors], do[1:2])
    for x, y in zip(whole, alone, strict=True):
        torch.testing.assert_close(x[1:2], y, rtol=0, atol=0)


@pytest.mark.parametrize("block_size", [32, 48])
def test_dropout_of_the_blocks(block_size):
    length, dim, p = 96, 64, 0.25
    tensors, do = inputs(length=length, dim=dim)
    zeros = torch.zeros_like(tensors[0])
    # with q = k = 0 a block's row is uniform, so feeding unit vectors as v reads the kept entries off the output
    keep = torch.zeros(2, 2, length, length, device=DEVICE)
    for start in range(0, length, dim):
        v = torch.zeros_like(zeros)
        for i in range(min(dim, length - start)):
            v[:, :, start + i, i] = 1.0
        out = diag(zeros, zeros, v, tensors[3], tensors[4], None, block_size, p, 7)
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

    found = gradients(kernels(None, block_size, dropout_p=p, seed=7), tensors, do)
    assert_float32(found, gradients(expected, [x.double() for x in tensors], do.double()))
    seed = torch.tensor([7], device=DEVICE)
    torch.testing.assert_close(kernels(None, block_size, dropout_p=p, seed=seed)(*tensors), found[0], rtol=0, atol=0)
    assert not torch.equal(kernels(None, block_size, dropout_p=p, seed=8)(*tensors), found[0])
    assert kernels(None, block_size, dropout_p=p)(*tensors).isfinite().all()


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
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("splits", [False, True])
def test_moment_matching(request, scale, offset, splits):
    if splits:
        request.getfixturevalue("many_splits")
    (q, k, *_), _ = inputs(batch=3, length=130, scale=scale)
    q = q + offset
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
    with pytest.raises(ValueError, match="one shape"):
        lln_attention(q, q[:, :, :4], q, 1.0, 1.0, backend="triton")
    with pytest.raises(ValueError, match="key_padding_mask"):
        lln_attention(q, q, q, 1.0, 1.0, torch.zeros(1, 9, dtype=torch.bool, device=DEVICE), backend="triton")
    with pytest.raises(ValueError, match="blocks of 16 to 256 tokens, not 8"):
        lln_diag_attention(q, q, q, 1.0, 1.0, None, 8, backend="triton")


def test_blockwise_part_equals_scaled_dot_product_attention():
    """β = 0 makes W uniform and S the mean of v: what remains is torch's attention inside blocks."""
    (q, k, v, _, _), _ = inputs(length=128, dim=64)
    blocks = [x.reshape(2, 2, 2, 64, 64) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*(x.double() for x in blocks)).reshape_as(q).float()
    out = lln_diag_attention(q, k, v, 1.0, 0.0, None, 64, backend="triton")
    torch.testing.assert_close(2 * out - v.mean(-2, keepdim=True), expected, rtol=1e-4, atol=1e-5)


@native
@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [None, 64])
def test_no_waiting_for_the_device(block_size):
    tensors, do = inputs(length=4096, dim=64, dtype=torch.float16)
    mask = mask_of(2, 4096)
    table = [x.to(DEVICE) for x in TABLE]
    function = kernels(mask, block_size, **({} if block_size is None else {"dropout_p": 0.1}))
    gradients(function, tensors, do)  # compiles
    triton.match_moments(*tensors[:2], mask, table)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tensors[3:] = triton.match_moments(*tensors[:2], mask, table)
        gradients(function, tensors, do)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@native
@pytest.mark.gpu
def test_cuda_graph_draws_new_dropout_at_each_replay():
    tensors, do = inputs(length=4096, dim=64, dtype=torch.float16)
    for p in (0.0, 0.1):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]

        def step(leaves=leaves, p=p):
            out = kernels(None, 64, dropout_p=p)(*leaves)
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
