"""Tests of the C kernels: the sizes that only they support, their numbers, and their compilation.

test_backends.py compares them with the oracles, like all backends.
"""

import ctypes
import logging
import multiprocessing
import platform
import struct
from pathlib import Path

import pytest
import torch

from lln_fairseq.ops.backends import cpu
from lln_fairseq.ops.backends.cpu import compile
from lln_fairseq.ops.backends.cpu.compile import load_library
from lln_fairseq.ops.dispatch import choose_backend
from lln_fairseq.ops.formula import DIAG, LLN, Inputs, Spec
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import FLOAT32_FORWARD, random_padding, random_qkv, relative_rms
from tests.ops.mixes import (
    GLOBAL,
    TESTED_MIXES,
    assert_float32_accuracy,
    attend,
    clear_rounding,
    holes,
    inputs,
    oracle,
    output_and_gradients,
)

unsupported_reason = cpu.reason_against(Spec(LLN), torch.empty(1, 1, 1, 64))
needs_compiler = pytest.mark.skipif(unsupported_reason is not None, reason=str(unsupported_reason))


# ---- numbers ----


@needs_compiler
@pytest.mark.parametrize("mix", TESTED_MIXES)
@pytest.mark.parametrize(("length", "dim", "block"), [(3, 64, 1), (97, 16, 5), (97, 48, 50), (300, 48, 256)])
def test_sizes_that_only_these_kernels_support_equal_the_oracle(length, dim, block, mix):
    tensors = inputs(mix, batch=3, length=length, dim=dim)
    mask = holes(3, length)
    expected = output_and_gradients(oracle(mix, mask, block), tensors, torch.float64)
    clear_rounding(expected)
    assert_float32_accuracy(output_and_gradients(attend(mix, "cpu", mask, block), tensors), expected)


@needs_compiler
@pytest.mark.parametrize("mix", TESTED_MIXES)
def test_number_of_threads_does_not_change_a_bit(mix):
    tensors = inputs(mix, length=130)
    threads = torch.get_num_threads()
    expected = output_and_gradients(attend(mix, "cpu"), tensors)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert all(map(torch.equal, output_and_gradients(attend(mix, "cpu"), tensors), expected))
    finally:
        torch.set_num_threads(threads)


@needs_compiler
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_of_global_tokens_are_computed_in_parts(dropout, monkeypatch):
    """The parts of 48 keys, one of which is all padding, have the results of a single part, with any threads."""
    tensors = inputs(GLOBAL, batch=3, heads=2, length=150)
    mask = holes(3, 150)
    function = attend(GLOBAL, "cpu", mask, dropout_p=dropout)

    def compute():
        torch.manual_seed(1)
        return output_and_gradients(function, tensors)

    whole = compute()
    monkeypatch.setattr(cpu, "PART_TOKENS", 48)
    in_parts = compute()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert all(map(torch.equal, compute(), in_parts))
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(in_parts[0], whole[0])
    if dropout:  # the tiles of other parts begin at other tokens, so that other weights are dropped
        assert relative_rms(in_parts[0], whole[0]) < 1
    else:
        assert_float32_accuracy(in_parts, output_and_gradients(oracle(GLOBAL, mask), tensors, torch.float64))


@needs_compiler
def test_overlapping_windows_are_supported():
    """torch.empty_like of such a tensor does not have contiguous features."""
    q = torch.randn(2, 2, 102).unfold(-1, 64, 1)
    expected = lln_attention(*3 * [q.double()], backend="torch")
    assert relative_rms(lln_attention(q, q, q, backend="cpu"), expected) <= FLOAT32_FORWARD


@needs_compiler
def test_sums_over_many_tokens_are_accurate():
    k = torch.randn(1, 1, 200_000, 16, generator=torch.Generator().manual_seed(0))
    out = lln_attention(k, k, torch.ones_like(k), 1.0, 1.0, backend="cpu")  # weighted means of ones
    assert (out - 1).abs().max() < 2e-6


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
def test_matched_moments_equal_pytorch_in_float64(scale):
    q, k, _ = random_qkv(length=130, dim=64, scale=scale)
    q[:, :, 0, 0] = 300 * scale  # an outlier must not cost digits
    mask = random_padding(2, 130, full_row=True)
    expected = match_moments(q.double(), k.double(), mask, backend="torch")
    for actual, exact in zip(match_moments(q, k, mask, backend="cpu"), expected, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=0)


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
def test_narrower_vectors_equal_the_oracle(arch, monkeypatch, cache, compiler_calls):
    if arch == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    flags = [f"-march={arch}" if flag.startswith("-march") else flag for flag in compile.FLAGS]
    monkeypatch.setattr(compile, "FLAGS", flags)
    for mix in TESTED_MIXES[1:]:
        tensors = inputs(mix, length=130, dim=48)
        cpu._load_kernels.cache_clear()
        expected = output_and_gradients(oracle(mix), tensors, torch.float64)
        assert_float32_accuracy(output_and_gradients(attend(mix, "cpu"), tensors), expected)
    assert len(compiler_calls) == len(list(cache.iterdir())) == 1  # the second mix loaded it from the cache


def test_unsupported_inputs_are_named():
    q = torch.empty(1, 1, 4, 64)
    for unsupported, message in ((q.double(), "float32"), (q[..., :40], "not 40")):
        tensors = Inputs(unsupported, unsupported, unsupported)
        assert message in cpu.reason_against(Spec(LLN), unsupported)
        assert choose_backend("auto", Spec(LLN), tensors) == "torch"
        with pytest.raises(ValueError, match=f"backend 'cpu' cannot run here: .*{message}"):
            choose_backend("cpu", Spec(LLN), tensors)
    assert "up to 256 tokens, not 257" in cpu.reason_against(Spec(DIAG, 257), q)


# ---- compiling ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Use an empty cache of compiled kernels, and return its directory, which does not exist yet."""
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(tmp_path / "cache"))
    cpu._load_kernels.cache_clear()
    yield tmp_path / "cache"
    cpu._load_kernels.cache_clear()


@pytest.fixture
def source(tmp_path):
    """Write a C file with one function, which compiles faster than the kernels."""
    path = tmp_path / "source" / "answer.c"
    path.parent.mkdir()
    path.write_text("int answer(void) { return A; }\n")
    return path


@pytest.fixture
def compiler_calls(monkeypatch):
    """Return a list to which every command of the compiler is appended."""
    commands = []
    original = compile._compile

    def record(command):
        commands.append(command)
        original(command)

    monkeypatch.setattr(compile, "_compile", record)
    return commands


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CC": "false"}, "false ended with exit status 1"),
        ({"CC": "", "PATH": "/nowhere"}, "none of gcc, cc, clang is installed"),
    ],
)
def test_pytorch_replaces_kernels_that_cannot_be_compiled(environment, message, cache, monkeypatch, caplog):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    q, k, v = random_qkv(length=20)

    with caplog.at_level(logging.WARNING):
        out = lln_attention(q, k, v, 2.0, 2.0)
        lln_attention(q, k, v, 2.0, 2.0)

    (record,) = caplog.records  # one warning for two calls
    assert "runs in PyTorch" in record.getMessage()
    assert message in record.getMessage()
    assert torch.equal(out, lln_attention(q, k, v, 2.0, 2.0, backend="torch"))
    with pytest.raises(ValueError, match="backend 'cpu' cannot run here: They could not be compiled"):
        lln_attention(q, k, v, 2.0, 2.0, backend="cpu")
    assert not list(cache.glob("*"))


@needs_compiler
def test_library_is_compiled_once(source, cache, compiler_calls):
    load_library(source, A=42)
    load_library(source, A=42)
    assert len(compiler_calls) == 1
    assert len(list(cache.iterdir())) == 1
    assert cache.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.parametrize("damage", ["start", "half", "one byte less", "zeros at the end"])
def test_damaged_library_is_compiled_again(damage, source, cache, compiler_calls, tmp_path, monkeypatch):
    load_library(source, A=42)
    (library,) = cache.iterdir()
    data = library.read_bytes()
    half = len(data) // 2
    damaged = {
        "start": data[:100],
        "half": data[:half],
        "one byte less": data[:-1],
        "zeros at the end": data[:half] + bytes(len(data) - half),
    }
    copy = tmp_path / "copy" / library.name
    copy.parent.mkdir()
    copy.write_bytes(damaged[damage])
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(copy.parent))

    assert load_library(source, A=42).answer() == 42

    assert len(compiler_calls) == 2
    assert [path.name for path in copy.parent.iterdir()] == [library.name]
    load_library(source, A=42)
    assert len(compiler_calls) == 2


@needs_compiler
def test_cache_of_another_user_is_not_used(source, cache, compiler_calls, monkeypatch, caplog):
    load_library(source, A=42)
    monkeypatch.setattr("os.geteuid", lambda: cache.stat().st_uid + 1)
    with caplog.at_level(logging.WARNING):
        assert load_library(source, A=42).answer() == 42
    assert len(compiler_calls) == 2
    assert str(cache) not in str(compiler_calls[1])
    assert f"{cache} belongs to another user: set LLN_KERNEL_CACHE" in caplog.text


@needs_compiler
def test_cache_writable_by_other_users_is_not_used(source, cache, compiler_calls, caplog):
    load_library(source, A=42)
    cache.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        assert load_library(source, A=42).answer() == 42
    assert len(compiler_calls) == 2
    assert f"other users can write to {cache}: empty it, and then run chmod 700 {cache}" in caplog.text


@needs_compiler
def test_unwritable_cache_is_not_needed(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    assert load_library(source, A=42).answer() == 42


def test_users_without_a_home_have_no_cache(monkeypatch):
    for name in ("LLN_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert compile.library_cache() is None


@needs_compiler
def test_processes_can_compile_at_the_same_time(source, cache, monkeypatch):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    build_library = compile._build_library

    def build_together(*args):
        barrier.wait(timeout=60)  # until all processes have seen an empty cache
        return build_library(*args)

    monkeypatch.setattr(compile, "_build_library", build_together)
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
def test_python_packs_the_fields_where_c_reads_them(tmp_path, cache):
    for header in cpu.SOURCE.parent.glob("*.h"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    source = tmp_path / "offsets.c"
    source.write_text(OFFSETS % ", ".join(f"offsetof(problem, {name})" for _, name in cpu.FIELDS))

    library = load_library(source, D=16, **cpu.CONSTANTS)
    offsets_in_c = list((ctypes.c_int64 * (len(cpu.FIELDS) + 1)).in_dll(library, "offsets"))

    kinds = "".join(kind for kind, _ in cpu.FIELDS)
    sizes = [struct.calcsize(kinds[:count]) for count in range(1, len(kinds) + 1)]
    offsets = [size - 8 for size in sizes]  # every field has 8 bytes
    assert offsets_in_c == [*offsets, sizes[-1]]
