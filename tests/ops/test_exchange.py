"""Attention over several workers: outputs and gradients equal those of one worker.

The workers start once and go through all cases.
"""

import itertools
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.exchange import Exchange
from lln_fairseq.ops.formula import LLN, Spec, compute_dtype
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import random_padding, random_qkv, relative_rms
from tests.workers import run_workers

pytestmark = pytest.mark.exhaustive  # starting the workers and going through all cases takes half a minute

WORKERS = 4
BATCH = 2
HEADS = 3
DIM = 32
BLOCK = 16
# The tokens of each worker: even, uneven, and one worker without tokens.
SHARDS = ((16, 81), (0, 64, 33), (32, 48, 0, 17))
SPLIT_SHARDS = (16, 80)  # Triton computes these in splits of 32 tokens
FUNCTIONS = {
    "lln": lambda *args, **kw: lln_attention(*args, **kw),
    "lln_diag": lambda *args, **kw: lln_diag_attention(*args, block_size=BLOCK, **kw),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}  # against one worker in this dtype


def make_cases():
    """Yield (backend, function, shards, padded, factors, dtype).

    "torch cpu" gives rank 0 the first backend and all others the second. The factors α and β are "given", or "matched"
    by head, or matched "of the batch".
    """
    for backend, function, factors in itertools.product(("torch", "cpu"), FUNCTIONS, ("matched", "given")):
        for shards in SHARDS:
            yield backend, function, shards, True, factors, torch.float32
        yield backend, function, (0, 64, 33), False, factors, torch.float32
    for function in FUNCTIONS:
        yield "torch", function, (16, 81), True, "given", torch.float64
        yield "torch", function, (16, 81), True, "matched", torch.bfloat16
        yield "cpu", function, (16, 81), True, "of the batch", torch.float32
        yield "torch cpu", function, (16, 81), True, "given", torch.float32  # one worker has no compiler
        yield "triton", function, (16, 81), True, "given", torch.float32
        yield "triton", function, SPLIT_SHARDS, False, "given", torch.float32
    yield "triton", "lln_diag", (16, 81), False, "matched", torch.bfloat16


def make_inputs(length, padded, factors, dtype):
    """Return the tensors to differentiate, the incoming gradient and the mask.

    With padding, whole shards and a whole row are padded, and all padding is NaN.
    """
    q, k, v = random_qkv(BATCH, HEADS, length, DIM, dtype=dtype)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = None
    if padded:
        mask = torch.cat([random_padding(BATCH, length, full_row=True), torch.arange(length)[None] >= 10])
        mask[0, 3:5] = True
        q, k, v, grad = (torch.cat([x, x[:1]]) for x in (q, k, v, grad))
        q, k, v = (x.masked_fill(mask[:, None, :, None], torch.nan) for x in (q, k, v))
        grad = grad.masked_fill(mask[:, None, :, None], 0.0)
    tensors = [q, k, v]
    if factors == "given":
        generator = torch.Generator().manual_seed(2)
        tensors += (0.5 + torch.rand(2, *q.shape[:2], generator=generator)).to(compute_dtype(dtype))
    return tensors, grad, mask


def run_case(case, tensors, grad, mask, group=None):
    """Return the output, 0 in padded rows, and the gradients of the tensors."""
    backends, function, _, _, factors, _ = case
    backend = backends.split()[dist.get_rank(group) if " " in backends else 0]
    tensors = [x.clone().requires_grad_() for x in tensors]
    q, k, v, *alpha_beta = tensors
    scope = "batch" if factors == "of the batch" else "head"
    options = dict(key_padding_mask=mask, backend=backend, scope=scope, group=group)
    out = FUNCTIONS[function](q, k, v, *(alpha_beta or (None, None)), **options)
    grads = torch.autograd.grad(out, tensors, grad)
    if mask is not None:
        out = out.detach().masked_fill(mask[:, None, :, None], 0.0)
    return [out, *grads]


def compare_with_one_worker(case, group):
    """Return the relative errors of this worker's part of the output and of each gradient."""
    _, _, shards, *settings = case
    if shards == SPLIT_SHARDS:
        load_backend("triton").split_tokens = lambda length, dim: ((length + 31) // 32, 32)
    tensors, grad, mask = make_inputs(sum(shards), *settings)
    expected = run_case(case, tensors, grad, mask)
    rank = dist.get_rank(group)
    tokens = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    local = [x[:, :, tokens] for x in tensors[:3]] + tensors[3:]
    actual = run_case(case, local, grad[:, :, tokens], None if mask is None else mask[:, tokens], group)
    for x in actual[4:]:  # each worker has a part of the gradients of α and β
        dist.all_reduce(x, group=group)
    expected = [x[:, :, tokens] for x in expected[:4]] + expected[4:]
    return [relative_rms(x, y) if x.numel() else 0.0 for x, y in zip(actual, expected, strict=True)]


def merge_missing_keys(group):
    """Merge states where only rank 1 has a real key in the first head, and no worker has one in the second."""
    has_key = torch.tensor([dist.get_rank(group) == 1, False])
    maximum = torch.where(has_key, -200.0, 0.0)[:, None]
    total = torch.where(has_key, 3.0, 0.0)[:, None]
    return [x.flatten().tolist() for x in Exchange(group).merge_states(maximum, total, total[..., None] * 7)]


def error_at_a_large_mean(group):
    """Return the relative error of α and β where mean / σ is 1000, against one worker in float64."""
    q, k, _ = (x + 1000 for x in random_qkv(BATCH, HEADS, 40, DIM))
    tokens = slice(0, 24) if dist.get_rank(group) == 0 else slice(24, 40)
    actual = match_moments(q[:, :, tokens], k[:, :, tokens], group=group)
    return relative_rms(torch.stack(actual), torch.stack(match_moments(q.double(), k.double(), backend="torch")))


def numbers_sent(group, length):
    """Return how many numbers this worker sends in the forward and the backward pass over so many tokens of its own."""
    q, k, v = random_qkv(BATCH, HEADS, length, DIM)
    sent = []

    def count_and_call(exchange, collective, *tensors):
        sent.append(tensors[-1].numel())
        collective(*tensors, group=exchange.group)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Exchange, "_call", count_and_call)
        lln_attention(q.requires_grad_(), k, v, group=group).sum().backward()
    return sum(sent)


def error_and_seconds(function, *args, **kw):
    """Return the type and message of the error that a call raises, and how long it took."""
    start = time.monotonic()
    try:
        function(*args, **kw)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def call_with_errors(group, foreign_group):
    """Return the messages of calls that must fail on a worker before it exchanges anything."""
    q, k, v = random_qkv(BATCH, HEADS, 24, DIM)

    def message(function, *args, **kw):
        return error_and_seconds(function, *args, **kw)[0]

    traced = torch.func.vmap(lambda x: lln_attention(x, x, x, 1.0, 1.0, group=group))
    messages = {
        "joint": message(lln_diag_attention, q, k, v, block_size=8, mix="joint_offset", group=group),
        "member": message(lln_attention, q, k, v, group=foreign_group),
        "traced": message(traced, torch.stack([q])),
    }
    if dist.get_rank(group) == 0:
        messages["block"] = message(lln_diag_attention, q, k, v, block_size=BLOCK, group=group)
    out = lln_attention(q.requires_grad_(), k, v, group=group)
    messages["second"] = message(torch.autograd.grad, out.sum(), q, create_graph=True)
    return messages


def wait_for_missing_worker(rank, groups):
    """On rank 0, wait for rank 1, which never calls; on rank 2, wait for rank 3, which dies here."""
    q, k, v = random_qkv(BATCH, HEADS, 24, DIM)
    if rank == 3:
        os._exit(1)
    if rank == 1:
        return None
    return error_and_seconds(lln_attention, q, k, v, group=groups[rank])


def work(rank, cases):
    """Run everything that this worker takes part in, and return the results by case or name."""
    groups = {count: dist.new_group(range(count)) for count in range(1, WORKERS + 1)}
    last_two = dist.new_group([2, 3])
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    results = {}
    for case in cases:
        count = len(case[2])
        if rank < count:
            results[case] = compare_with_one_worker(case, groups[count])
    if rank < 2:
        results["large mean"] = error_at_a_large_mean(groups[2])
        results["sent"] = [numbers_sent(groups[2], length) for length in (16, 48)]
        results["missing keys"] = merge_missing_keys(groups[2])
        results["errors"] = call_with_errors(groups[2], last_two)
    dist.barrier()
    results["lost"] = wait_for_missing_worker(rank, {0: impatient, 2: last_two})
    return results


def is_runnable(case):
    return all(
        load_backend(name).reason_against(Spec(LLN), torch.empty(1, 1, 1, DIM)) is None for name in case[0].split()
    )


CASES = list(make_cases())


@pytest.fixture(scope="module")
def results():
    return run_workers(WORKERS, work, [case for case in CASES if is_runnable(case)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_workers_equal_one_worker(case, results):
    if not is_runnable(case):
        pytest.skip("this backend cannot run here")
    count = len(case[2])
    with_results = results[: min(count, WORKERS - 1)]  # the last worker died in `wait_for_missing_worker`
    for rank, result in enumerate(with_results):
        assert max(result[case]) <= TOLERANCE[case[-1]], (rank, result[case])


def test_large_mean_costs_no_digits(results):
    for result in results[:2]:
        assert result["large mean"] <= 1e-5


def test_worker_without_a_real_key_changes_nothing(results):
    for result in results[:2]:
        assert result["missing keys"] == [[-200.0, 0.0], [3.0, 0.0], [21.0, 0.0]]


def test_sent_numbers_do_not_depend_on_tokens(results):
    moments = 6
    states = DIM * (DIM + 2) + DIM * (DIM + 1)
    for result in results[:2]:
        assert result["sent"] == [BATCH * HEADS * (moments + states)] * 2


def test_wrong_calls_are_rejected(results):
    for result in results[:2]:
        messages = result["errors"]
        assert "mix 'joint_offset' cannot be computed over several workers" in messages["joint"]
        assert "group must be a process group of torch.distributed that includes this worker" in messages["member"]
        assert "several workers cannot be traced" in messages["traced"]
        assert "attention over several workers has no second derivative" in messages["second"]
        assert all("\n" not in message for message in messages.values())
    assert "worker 0 of 2 holds 24 tokens" in results[0]["errors"]["block"]


def test_missing_worker_times_out(results):
    for rank in (0, 2):
        message, seconds = results[rank]["lost"]
        assert message.startswith("WorkerLost: the exchange with the workers that hold the same sequences failed")
        assert "\n" not in message
        assert seconds < 15
