"""Time and memory of the Triton kernels on a GPU, against the bytes that must move, SDPA's flash kernel and PyTorch.

For every length the batch holds the same number of tokens. Columns:

    floor   the tensors that must be read and written (forward 6 of B H N D, backward 9; LLN alone 4 and 7), over the
            bandwidth of a device-to-device copy measured in this run
    of floor   floor / time: 1.0 is the best there is
    flash, torch   time of SDPA (flash kernel, same q, k, v) and of the PyTorch path, over ours: larger is better
    graph   time of the same work replayed from a CUDA graph: what is left when launches cost nothing
    MB      peak memory beyond q, k, v and the incoming gradient, ours and SDPA's
"""

from lln_fairseq.command import UserError, start

if __name__ == "__main__":
    start(__spec__.name)

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lln_fairseq.ops import lln
from lln_fairseq.ops.backends import triton as backend
from scripts.benchmarks import meter

PASSES = {"lln_diag": (6, 15), "lln": (4, 11)}  # tensors moved forward, and forward + backward


def milliseconds(function: Callable[[], object], repeats: int = 20, cache: Tensor | None = None) -> float:
    """Median time of a call on the device; `cache` is overwritten before each, so that nothing is left in the L2."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        if cache is not None:
            cache.zero_()
        times.append(meter.milliseconds(function, "cuda"))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    return 2 * x.numel() / (milliseconds(lambda: y.copy_(x)) * 1e-3)


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def peak_megabytes(function: Callable[[], object]) -> float:
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def torch_path(block_size: int | None) -> Callable[..., Tensor]:
    """The PyTorch backend of the same mechanism."""
    if block_size is None:
        return functools.partial(lln.lln_attention, backend="torch")
    return functools.partial(lln.lln_diag_attention, block_size=block_size, backend="torch")


def both(function: Callable[..., Tensor], tensors: list[Tensor], do: Tensor) -> Callable[[], object]:
    """Forward and backward, with gradients of q, k, v."""

    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(function(*leaves), leaves, do)

    return run


def report(name: str, block_size: int | None, args: argparse.Namespace, bandwidth: float) -> bool:
    """The rows of one mechanism; whether the errors are in order."""
    dtype, good = getattr(torch, args.dtype), True
    cache = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    print(f"\n{name}, block size {block_size}, H = {args.heads}, D = {args.dim}, {args.dtype}")
    print("     N   B pass      us  floor of floor  graph   flash  torch   MB  flash MB    error")
    for length in args.lengths:
        batch = max(args.tokens // length, 1)
        shape = (batch, length, args.heads, args.dim)
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(4))
        alpha, beta = torch.full((2, batch, args.heads), args.alpha, device="cuda")

        def ours(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor = alpha, beta: Tensor = beta) -> Tensor:
            if block_size is None:
                return lln.lln_attention(q, k, v, alpha, beta, backend="triton")
            return lln.lln_diag_attention(q, k, v, alpha, beta, None, block_size, backend="triton")

        def plain(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor = alpha, beta: Tensor = beta) -> Tensor:
            return torch_path(block_size)(q, k, v, alpha, beta)

        def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v)

        one = [x[:1, :1].double() for x in (q, k, v, do)]
        factors = (
            alpha[:1, :1].double(),
            beta[:1, :1].double(),
            block_size if length % (block_size or 1) == 0 else None,
        )
        leaves = [x.requires_grad_() for x in one[:3]]
        expected = oracle(*leaves, *factors)
        expected = [expected.detach(), *torch.autograd.grad(expected, leaves, one[3])]
        found = [ours(q, k, v), *both(ours, [q, k, v], do)()]
        error = max(meter.relative_rms(x[:1, :1], y) for x, y in zip(found, expected, strict=True))
        good &= error < (2e-2 if args.dtype == "bfloat16" else 3e-3)
        del expected, found, leaves, one

        for i, label in enumerate(("fwd", "both")):
            calls = [
                both(f, [q, k, v], do) if i else (lambda f=f, q=q, k=k, v=v: f(q, k, v)) for f in (ours, flash, plain)
            ]
            floor = PASSES[name][i] * q.numel() * q.element_size() / bandwidth * 1e3
            time, flash_time, torch_time = (milliseconds(f, args.repeats, cache) for f in calls)
            graph_time = milliseconds(graphed(calls[0]), args.repeats, cache)
            memory = [peak_megabytes(f) for f in calls[:2]]
            print(
                f"{length:6} {batch:3} {label:4} {1e3 * time:7.0f} {1e3 * floor:6.0f} {floor / time:8.2f} "
                f"{1e3 * graph_time:6.0f} {flash_time / time:7.2f} {torch_time / time:6.2f} "
                f"{memory[0]:4.0f} {memory[1]:9.0f} {error:8.1e}",
                flush=True,
            )
    return good


def oracle(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, block_size: int | None) -> Tensor:
    """A (Wᵀv), or its mean with softmax over blocks, in the float64 of its inputs; N a multiple of the block size."""
    y = beta[..., None, None] * k
    out = (alpha[..., None, None] * q + y.logsumexp(-2, keepdim=True)).softmax(-1) @ (y.softmax(-2).mT @ v)
    if block_size is None:
        return out
    q, k, w = (x.unflatten(-2, (-1, block_size)) for x in (q, k, v))
    return (out + ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ w).flatten(-3, -2)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens in a batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=1.4)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("no CUDA device: torch.cuda.is_available() is False")
    if reason := backend.is_supported(torch.empty(1, 1, 1, args.dim, device="cuda", dtype=getattr(torch, args.dtype))):
        raise UserError(reason)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e12:.2f} TB/s (read + written)")
    good = [report("lln_diag", args.block_size, args, bandwidth), report("lln", None, args, bandwidth)]
    if not all(good):
        raise UserError("the kernels' error is too large")
