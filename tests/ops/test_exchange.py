"""A sequence on several workers gives what it gives on one: outputs, gradients, and what is sent for it.

All workers start once and work through all cases.
"""

import itertools
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lln_fairseq.ops.backends import load_backend
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.exchange import Exchange
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import random_padding, random_qkv, relative_rms
from tests.workers import run_workers

WORKERS, BATCH, HEADS, DIM, BLOCK = 4, 2, 3, 32, 16
# The tokens of each worker: even, uneven, and none at all on one of them.
SHARDS = ((16, 81), (0, 64, 33), (32, 48, 0, 17))
IN_SPLITS = (16, 80)  # Triton takes these in splits of 32 tokens
FUNCTIONS = {
    "lln": lambda *args, **kw: lln_attention(*args, **kw),
    "lln_diag": lambda *args, **kw: lln_diag_attention(*args, block_size=BLOCK, **kw),
}
FACTORS = ("matched", "given")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}  # against one worker in this dtype


def cases():
    """(backend, function, shards, padded, factors, dtype)"""
    for backend, function, factors in itertools.product(("torch", "cpu"), FUNCTIONS, FACTORS):
        for shards in SHARDS:
            yield backend, function, shards, True, factors, torch.float32
        yield backend, function, (0, 64, 33), False, factors, torch.float32
    for function in FUNCTIONS:
        yield "torch", function, (16, 81), True, "given", torch.float64
        yield "torch", function, (16, 81), True, "matched", torch.bfloat16
        yield "cpu", function, (16, 81), True, "of the batch", torch.float32
        yield "torch cpu", function, (16, 81), True, "given", torch.float32  # one worker has no compiler
        yield "triton", function, (16, 81), True, "given", torch.float32
        yield "triton", function, IN_SPLITS, False, "given", torch.float32
    yield "triton", "lln_diag", (16, 81), False, "matched", torch.bfloat16


def inputs(length, padded, factors, dtype):
    """Tensors that want gradients, the incoming gradient, and a mask with whole shards, and a whole row, of padding."""
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


def run(case, tensors, grad, mask, group=None):
    """The output and the gradients of the tensors, with numbers for what padding answers."""
    backends, function, *_ = case
    backend = backends.split()[dist.get_rank(group) if " " in backends else 0]
    tensors = [x.clone().requires_grad_() for x in tensors]
    q, k, v, *factors = tensors
    scope = "batch" if case[4] == "of the batch" else "head"
    kw = dict(key_padding_mask=mask, backend=backend, scope=scope, group=group)
    out = FUNCTIONS[function](q, k, v, *(factors or (None, None)), **kw)
    grads = torch.autograd.grad(out, tensors, grad)
    if mask is not None:
        out = out.detach().masked_fill(mask[:, None, :, None], 0.0)
    return [out, *grads]


def compare(case, group):
    """The relative errors of what this worker holds against one worker that has all tokens."""
    _, _, shards, *settings = case
    if shards == IN_SPLITS:
        load_backend("triton").split_tokens = lambda length, dim: ((length + 31) // 32, 32)
    tensors, grad, mask = inputs(sum(shards), *settings)
    expected = run(case, tensors, grad, mask)
    rank = dist.get_rank(group)
    here = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    local = [x[:, :, here] for x in tensors[:3]] + tensors[3:]
    found = run(case, local, grad[:, :, here], None if mask is None else mask[:, here], group)
    for x in found[4:]:  # of α and β a worker has a part
        dist.all_reduce(x, group=group)
    expected = [x[:, :, here] for x in expected[:4]] + expected[4:]
    return [relative_rms(x, y) if x.numel() else 0.0 for x, y in zip(found, expected, strict=True)]


class Counted:
    """A collective that adds up the bytes of what this worker gives."""

    def __init__(self, name, tensor):
        self.original, self.tensor, self.sent = getattr(dist, name), tensor, []
        setattr(dist, name, self)

    def __call__(self, *args, **kw):
        self.sent.append(args[self.tensor].nbytes)
        return self.original(*args, **kw)


def sent_bytes(group):
    """By collective, of one call with matched factors, forward and backward."""
    gather, reduce = Counted("all_gather", 1), Counted("all_reduce", 0)
    try:
        for length in (32, 4096):
            q, k, v = (x.requires_grad_() for x in random_qkv(BATCH, HEADS, length, DIM))
            lln_diag_attention(q, k, v, block_size=BLOCK, group=group).sum().backward()
    finally:
        dist.all_gather, dist.all_reduce = gather.original, reduce.original
    return gather.sent, reduce.sent


def merged_with_nothing(group):
    """What comes out where one worker has no real key for the first head, and none has one for the second."""
    here = torch.tensor([dist.get_rank(group) == 1, False])
    top, total = torch.where(here, -200.0, 0.0)[:, None], torch.where(here, 3.0, 0.0)[:, None]
    return [x.flatten().tolist() for x in Exchange(group).merge_states(top, total, total[..., None] * 7)]


def error_at_a_large_mean(group):
    """Return the relative error of α and β where mean / σ is 1000, against one worker in float64."""
    q, k, _ = (x + 1000 for x in random_qkv(BATCH, HEADS, 40, DIM))
    here = slice(0, 24) if dist.get_rank(group) == 0 else slice(24, 40)
    found = match_moments(q[:, :, here], k[:, :, here], group=group)
    return relative_rms(torch.stack(found), torch.stack(match_moments(q.double(), k.double(), backend="torch")))


def said(function, *args, **kw):
    """The message of an error, and after how many seconds it came."""
    begin = time.monotonic()
    try:
        function(*args, **kw)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "no error", time.monotonic() - begin


def refusals(group, other):
    """What a worker says before it exchanges anything."""
    q, k, v = random_qkv(BATCH, HEADS, 24, DIM)
    first = dist.get_rank(group) == 0
    found = {
        "joint": said(lln_diag_attention, q, k, v, block_size=8, mix="joint", group=group)[0],
        "block": said(lln_diag_attention, q, k, v, block_size=BLOCK, group=group)[0] if first else "",
        "member": said(lln_attention, q, k, v, group=other)[0],
        "traced": said(torch.func.vmap(lambda x: lln_attention(x, x, x, 1.0, 1.0, group=group)), torch.stack([q]))[0],
    }
    out = lln_attention(q.requires_grad_(), k, v, group=group)
    found["second"] = said(torch.autograd.grad, out.sum(), q, create_graph=True)[0]
    return found


def losses(rank, groups):
    """Of a worker that is late (rank 0 waits for 1), and of one that has died (rank 2 waits for 3)."""
    q, k, v = random_qkv(BATCH, HEADS, 24, DIM)
    if rank == 3:
        os._exit(1)
    return said(lln_attention, q, k, v, group=groups[rank]) if rank in (0, 2) else None


def work(rank, chosen):
    groups = {count: dist.new_group(range(count)) for count in range(1, WORKERS + 1)}
    others = {2: dist.new_group([0, 1]), 0: dist.new_group([2, 3])}
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    results = {}
    for case in chosen:
        count = len(case[2])
        if rank < count:
            results[case] = compare(case, groups[count])
    if rank < 2:
        results["bytes"] = sent_bytes(groups[2])
        results["large mean"] = error_at_a_large_mean(groups[2])
        results["nothing"] = merged_with_nothing(groups[2])
        results["refused"] = refusals(groups[2], others[0])
    dist.barrier()
    results["lost"] = losses(rank, {0: impatient, 2: others[0]})
    return results


def runnable(case):
    return all(load_backend(name).is_supported(torch.empty(1, 1, 1, DIM)) is None for name in case[0].split())


CASES = list(cases())


@pytest.fixture(scope="module")
def results():
    return run_workers(WORKERS, work, [case for case in CASES if runnable(case)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_workers_compute_what_one_does(case, results):
    if not runnable(case):
        pytest.skip("this backend cannot run here")
    count = len(case[2])
    for rank, result in enumerate(results[: min(count, WORKERS - 1)]):  # the last one has died meanwhile, see `losses`
        assert max(result[case]) <= TOLERANCE[case[-1]], (rank, result[case])


def test_what_is_sent_does_not_depend_on_the_number_of_tokens(results):
    heads = BATCH * HEADS
    forward, backward, moments = 4 * heads * DIM * (DIM + 2), 4 * heads * DIM * (DIM + 1), 8 * 6 * heads
    for result in results[:2]:
        gathered, reduced = result["bytes"]
        assert gathered == [forward, forward]
        assert reduced == [moments, backward, moments, backward]


def test_large_mean_costs_no_digits(results):
    for result in results[:2]:
        assert result["large mean"] <= 1e-5


def test_a_worker_without_a_real_key_changes_nothing(results):
    for result in results[:2]:
        assert result["nothing"] == [[-200.0, 0.0], [3.0, 0.0], [21.0, 0.0]]


def test_what_cannot_be_is_refused_in_one_line(results):
    for rank, result in enumerate(results[:2]):
        found = result["refused"]
        assert found["joint"] == "ValueError: mix 'joint' cannot be computed over several workers, choose average"
        assert "group must be a process group of torch.distributed that includes this worker" in found["member"]
        assert "several workers cannot be traced" in found["traced"]
        assert found["second"] == "RuntimeError: attention over several workers has no second derivative"
        if rank == 0:
            assert "worker 0 of 2 holds 24 tokens: every worker but the last must hold" in found["block"]


def test_nobody_waits_for_ever_for_a_worker_that_is_late_or_dead(results):
    for rank, patience in ((0, 15), (2, 15)):
        message, seconds = results[rank]["lost"]
        assert message.startswith(
            "WorkerLost: no exchange with the workers that share this one's sequences, has one of them ended?"
        )
        assert "\n" not in message
        assert seconds < patience
