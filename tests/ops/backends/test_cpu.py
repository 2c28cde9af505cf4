"""The C kernels of a CPU: the sizes that they alone take, their numbers, and where they cannot be compiled.

test_backends.py compares them with the oracles, as it does all backends.
"""

import ctypes
import logging
import multiprocessing
import platform
import struct
from pathlib import Path

import pytest
import torch

from lln_fairseq.ops.autograd import hybrid_attention
from lln_fairseq.ops.backends import HybridSpec, choose_backend, cpu
from lln_fairseq.ops.backends.cpu import compile
from lln_fairseq.ops.backends.cpu.compile import load_library
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_padding, random_qkv, relative_rms
from tests.ops.mixes import MIXES, attend, errors, holes, inputs, oracle, output_and_gradients

reason = cpu.is_supported(torch.empty(1, 1, 1, 64))
needs_compiler = pytest.mark.skipif(reason is not None, reason=str(reason))
ZEROS = torch.zeros(2, 2)  # α and β where there is no LLN


def check(actual, expected):
    wrong = errors(actual, expected)
    assert wrong.pop("out") <= FLOAT32_FORWARD
    assert max(wrong.values()) <= FLOAT32_GRADIENT, wrong


@needs_compiler
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("length", "dim", "block"), [(3, 64, 1), (97, 16, 5), (97, 48, 50), (300, 48, 256)])
def test_blocks_and_head_dimensions_of_these_kernels_alone(length, dim, block, mix):
    tensors, mask = inputs(mix, batch=3, length=length, dim=dim), holes(3, length)
    expected = output_and_gradients(oracle(mix, mask, block), tensors, torch.float64)
    if (expected[-1].abs() < 1e-12).all():  # no query sees a key outside its block
        expected[-1].zero_()
    check(output_and_gradients(attend(mix, "cpu", mask, block), tensors), expected)


@needs_compiler
@pytest.mark.parametrize("mix", MIXES)
def test_threads_change_no_bit(mix):
    tensors, threads = inputs(mix, length=130), torch.get_num_threads()
    expected = output_and_gradients(attend(mix, "cpu"), tensors)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert all(map(torch.equal, output_and_gradients(attend(mix, "cpu"), tensors), expected))
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_windows_that_overlap():
    """torch.empty_like of such a tensor has its features apart."""
    q = torch.randn(2, 2, 102).unfold(-1, 64, 1)
    expected = lln_attention(*3 * [q.double()], backend="torch")
    assert relative_rms(lln_attention(q, q, q, backend="cpu"), expected) <= FLOAT32_FORWARD


@needs_compiler
def test_sums_over_many_tokens_are_exact():
    k = torch.randn(1, 1, 200_000, 16, generator=torch.Generator().manual_seed(0))
    out = lln_attention(k, k, torch.ones_like(k), 1.0, 1.0, backend="cpu")  # means of ones
    assert (out - 1).abs().max() < 2e-6


@needs_compiler
def test_dropout_differs_between_heads_blocks_and_seeds():
    q, k, _ = random_qkv(batch=2, heads=2, length=128, dim=64)
    v = torch.eye(64).repeat(2, 1).expand_as(q)  # the output is then the matrices of the blocks
    draws = [
        hybrid_attention(q, k, v, ZEROS, ZEROS, None, HybridSpec(0.0, 1.0, 64, 0.5, seed), "cpu") != 0
        for seed in (1, 2, 2**40)
    ]
    blocks = torch.stack(draws).reshape(-1, 64 * 64).double()
    assert blocks.mean().item() == pytest.approx(0.5, abs=0.01)
    others = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert others.abs().max() < 0.08  # 5 standard deviations of the correlation of 4096 independent draws


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
def test_matched_moments_equal_pytorch_in_float64(scale):
    q, k, _ = random_qkv(length=130, dim=64, scale=scale)
    q[:, :, 0, 0] = 300 * scale  # an outlier takes no digits
    mask = random_padding(2, 130, full_row=True)
    expected = match_moments(q.double(), k.double(), mask, backend="torch")
    for a, e in zip(match_moments(q, k, mask, backend="cpu"), expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=0)


@needs_compiler
def test_nan_shows_in_its_head_unless_it_is_padding():
    q, k, v = random_qkv(batch=1, heads=2, length=70)
    mask = torch.arange(70)[None] >= 60
    k[0, 0, 65] = torch.nan
    assert lln_diag_attention(q, k, v, 2.0, 2.0, mask, backend="cpu").isfinite().all()
    assert match_moments(q, k, mask, backend="cpu")[0].isfinite().all()
    k[0, 0, 5] = torch.nan
    out = lln_diag_attention(q, k, v, 2.0, 2.0, mask, backend="cpu")
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
    assert match_moments(q, k, mask, backend="cpu")[0].isnan().tolist() == [[True, False]]


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize("arch", ["x86-64", "haswell"])
def test_narrower_vectors_give_the_same(arch, monkeypatch, cache, compiled):
    if arch == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    flags = [f"-march={arch}" if flag.startswith("-march") else flag for flag in compile.FLAGS]
    monkeypatch.setattr(compile, "FLAGS", flags)
    for mix in MIXES[1:]:
        tensors = inputs(mix, length=130, dim=48)
        cpu._load_kernels.cache_clear()
        expected = output_and_gradients(oracle(mix), tensors, torch.float64)
        check(output_and_gradients(attend(mix, "cpu"), tensors), expected)
    assert len(compiled) == len(list(cache.iterdir())) == 1  # the second time it came from the cache


def test_what_the_kernels_do_not_take():
    q = torch.empty(1, 1, 4, 64)
    for other, message in ((q.double(), "float32"), (q.half(), "float32"), (q[..., :40], "not 40")):
        assert message in cpu.is_supported(other)
        assert choose_backend("auto", other) == "torch"
        with pytest.raises(ValueError, match=f"backend 'cpu' cannot run here: .*{message}"):
            choose_backend("cpu", other)
    assert "up to 256 tokens, not 257" in cpu.is_supported(q, block_size=257)


# ---- compiling ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(tmp_path / "cache"))
    cpu._load_kernels.cache_clear()
    yield tmp_path / "cache"
    cpu._load_kernels.cache_clear()


@pytest.fixture
def source(tmp_path):
    """A library of one function, which gcc makes in no time: the cache does not know what it keeps."""
    path = tmp_path / "source" / "answer.c"
    path.parent.mkdir()
    path.write_text("int answer(void) { return A; }\n")
    return path


@pytest.fixture
def compiled(monkeypatch):
    """The commands of the compiler."""
    commands, original = [], compile._compile
    monkeypatch.setattr(compile, "_compile", lambda command: (commands.append(command), original(command)))
    return commands


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CC": "false"}, "false ended with exit status 1"),
        ({"CC": "", "PATH": "/nowhere"}, "none of gcc, cc, clang is installed"),
    ],
)
def test_without_a_compiler_pytorch_computes_and_says_so_once(environment, message, cache, monkeypatch, caplog):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    q, k, v = random_qkv(length=20)
    with caplog.at_level(logging.WARNING):
        out = lln_attention(q, k, v, 2.0, 2.0)
        lln_attention(q, k, v, 2.0, 2.0)
    (record,) = caplog.records
    assert "runs in PyTorch" in record.getMessage()
    assert message in record.getMessage()
    assert torch.equal(out, lln_attention(q, k, v, 2.0, 2.0, backend="torch"))
    with pytest.raises(ValueError, match="backend 'cpu' cannot run here: They could not be compiled"):
        lln_attention(q, k, v, 2.0, 2.0, backend="cpu")
    assert not list(cache.glob("*"))


@needs_compiler
def test_the_library_is_compiled_once_and_again_if_it_is_broken(source, cache, compiled, tmp_path, monkeypatch):
    load_library(source, A=42)
    load_library(source, A=42)
    assert len(compiled) == 1
    (library,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    broken = tmp_path / "other" / library.name
    broken.parent.mkdir()
    broken.write_bytes(library.read_bytes()[:100])
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(broken.parent))
    load_library(source, A=42)
    assert len(compiled) == 2
    assert [path.name for path in broken.parent.iterdir()] == [library.name]


@needs_compiler
def test_a_cache_of_somebody_else_is_not_trusted(source, cache, compiled, monkeypatch, caplog):
    load_library(source, A=42)
    monkeypatch.setattr("os.geteuid", lambda: cache.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING):
        assert load_library(source, A=42).answer() == 42
    assert len(compiled) == 2
    assert not str(compiled[1]).count(str(cache))
    assert f"{cache} belongs to another user: set LLN_KERNEL_CACHE" in caplog.text


@needs_compiler
def test_a_cache_that_others_can_write_to_is_not_trusted(source, cache, compiled, caplog):
    load_library(source, A=42)
    cache.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        assert load_library(source, A=42).answer() == 42
    assert len(compiled) == 2
    assert f"other users can write to {cache}: empty it, and then run chmod 700 {cache}" in caplog.text


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    assert load_library(source, A=42).answer() == 42


def test_users_without_a_home_have_no_cache(monkeypatch):
    for name in ("LLN_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert compile.cache_directory() is None


@needs_compiler
def test_processes_that_compile_at_the_same_time(source, cache, monkeypatch):
    context = multiprocessing.get_context("fork")
    barrier, build = context.Barrier(3), compile._build_library  # they have all seen that there is none yet
    monkeypatch.setattr(compile, "_build_library", lambda *args: (barrier.wait(timeout=60), build(*args))[1])
    processes = [context.Process(target=load_library, args=(source,), kwargs={"A": 42}) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


OFFSETS = """
#include <stddef.h>
#include "problem.h"
int64_t offsets[] = {%s, sizeof(problem)};
"""


@needs_compiler
def test_python_packs_what_c_reads(tmp_path, cache):
    for header in cpu.SOURCE.parent.glob("*.h"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    source = tmp_path / "offsets.c"
    source.write_text(OFFSETS % ", ".join(f"offsetof(problem, {name})" for _, name in cpu.FIELDS))
    found = list((ctypes.c_int64 * (len(cpu.FIELDS) + 1)).in_dll(load_library(source, D=16), "offsets"))
    kinds = "".join(kind for kind, _ in cpu.FIELDS)
    assert found == [struct.calcsize(kinds[: i + 1]) - 8 for i in range(len(kinds))] + [struct.calcsize(kinds)]
