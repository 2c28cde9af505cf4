"""The C kernels of a CPU: against PyTorch in float64, in every layout, and where they cannot be compiled.

test_lln.py, test_block_diag.py and the contract tests run on them too, wherever their inputs are float32.
"""

import ctypes
import logging
import multiprocessing
import os
import platform
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lln_fairseq.ops.autograd import mixture
from lln_fairseq.ops.backends import Mixture, choose_backend, cpu
from lln_fairseq.ops.backends.cpu import compile
from lln_fairseq.ops.backends.cpu.compile import CannotCompile, load_library
from lln_fairseq.ops.lln import lln_attention, lln_diag_attention
from lln_fairseq.ops.moment_matching import match_moments
from tests.helpers import FLOAT32_FORWARD, FLOAT32_GRADIENT, random_padding, random_qkv, relative_rms

reason = cpu.is_supported(torch.empty(1, 1, 1, 64))
needs_compiler = pytest.mark.skipif(reason is not None, reason=str(reason))
ZEROS = torch.zeros(3, 2)  # α and β where there is no LLN
JOINT = [Mixture(1.0, 1.0, size, joint=True) for size in (5, 64, 256)]
MIXTURES = [
    Mixture(1.0, 0.0),
    *(Mixture(0.5, 0.5, size) for size in (1, 5, 50, 64, 256)),
    Mixture(0.0, 1.0, 64),
    *JOINT,
]


def results(backend, mix, tensors, mask=None, dtype=torch.float32):
    """The output and the gradients of q, k, v, α, β for an incoming gradient; those of α, β only with LLN, and of the
    parameter with a joint form."""
    *inputs, grad = [x.detach().to(dtype) for x in tensors]
    wanted = [x.requires_grad_() for x in inputs][: 5 if mix.lln_weight else 3]
    if mix.joint:
        mix = replace(mix, parameter=torch.linspace(0.1, 0.9, inputs[3].numel(), dtype=dtype).view_as(inputs[3]))
        wanted.append(mix.parameter.requires_grad_())
    out = mixture(*inputs, mask, mix, backend)
    return out.detach(), *torch.autograd.grad(out, wanted, grad)


def random_tensors(length, dim, batch=3, heads=2):
    q, k, v = random_qkv(batch, heads, length, dim)
    alpha, beta = 1 + torch.rand(2, batch, heads, generator=torch.Generator().manual_seed(1))
    return q, k, v, alpha, beta, torch.randn(q.shape, generator=torch.Generator().manual_seed(2))


def check(actual, expected, about=None):
    names = ("out", "q", "k", "v", "alpha", "beta", "parameter")
    for name, a, e in zip(names, actual, expected, strict=False):
        assert relative_rms(a, e) <= (FLOAT32_FORWARD if name == "out" else FLOAT32_GRADIENT), (name, about)


@needs_compiler
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mix", MIXTURES, ids=lambda m: f"{m.lln_weight}-{m.diag_weight}-{m.block_size}")
@pytest.mark.parametrize(("length", "dim"), [(3, 64), (64, 64), (130, 64), (300, 64), (97, 16), (97, 48), (97, 112)])
def test_equals_pytorch_in_float64(length, dim, mix, padded):
    tensors = random_tensors(length, dim)
    mask = random_padding(3, length, full_row=True) if padded else None
    check(results("cpu", mix, tensors, mask), results("torch", mix, tensors, mask, torch.float64))


@needs_compiler
@pytest.mark.parametrize("mix", [*MIXTURES[:3], *JOINT[:2]], ids=lambda m: f"{m.lln_weight}-{m.block_size}")
def test_layouts_and_threads_change_no_bit(mix):
    tensors = random_tensors(130, 32)
    expected = results("cpu", mix, tensors)
    q, k, v, alpha, beta, grad = tensors
    layouts = {
        "sequence first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "features apart": lambda x: x.mT.contiguous().mT,
        "part of a wider tensor": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    }
    for layout in layouts.values():
        changed = results("cpu", mix, (*map(layout, (q, k, v)), alpha, beta, layout(grad)))
        assert all(map(torch.equal, changed, expected))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert all(map(torch.equal, results("cpu", mix, tensors), expected))
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_windows_that_overlap():
    """torch.empty_like of such a tensor has its features apart."""
    q = torch.randn(2, 2, 102).unfold(-1, 64, 1)
    check([lln_attention(q, q, q, backend="cpu")], [lln_attention(*3 * [q.double()], backend="torch")])


@needs_compiler
def test_sums_over_many_tokens_are_exact():
    k = torch.randn(1, 1, 200_000, 16, generator=torch.Generator().manual_seed(0))
    out = lln_attention(k, k, torch.ones_like(k), 1.0, 1.0, backend="cpu")  # means of ones
    assert (out - 1).abs().max() < 2e-6


@needs_compiler
def test_tensors_without_data_and_what_is_recorded_go_to_pytorch():
    q = torch.zeros(1, 2, 20, 64)
    assert choose_backend("auto", q) == "cpu"
    with FakeTensorMode():
        assert choose_backend("auto", torch.zeros(1, 2, 20, 64)) == "torch"
    traced = torch.jit.trace(lambda q: q + float(choose_backend("auto", q) == "torch"), q)
    assert (traced(q) == 1).all()


@needs_compiler
def test_gradients_with_dropout_are_those_of_the_same_draw():
    """The output is linear in v, so <grad, out> = <v, dv>; along q it is compared with a difference quotient."""
    q, k, v, _, _, grad = random_tensors(150, 32)
    mix = Mixture(0.0, 1.0, 64, dropout_p=0.3, seed=5)

    def value(q):
        return (mixture(q, k, v, ZEROS, ZEROS, None, mix, "cpu").double() * grad).sum().item()

    _, dq, _, dv = results("cpu", mix, (q, k, v, torch.zeros(3, 2), torch.zeros(3, 2), grad))
    assert (v.double() * dv).sum().item() == pytest.approx(value(q), rel=1e-4)
    step = 1e-2 * torch.randn(q.shape, generator=torch.Generator().manual_seed(3))
    assert (step * dq).sum().item() == pytest.approx((value(q + step) - value(q - step)) / 2, rel=2e-3)


@needs_compiler
def test_dropout_differs_between_heads_blocks_and_seeds():
    q, k, _ = random_qkv(batch=2, heads=2, length=128, dim=64)
    v = torch.eye(64).repeat(2, 1).expand_as(q)  # the output is then the matrices of the blocks
    draws = [
        mixture(q, k, v, ZEROS[:2], ZEROS[:2], None, Mixture(0.0, 1.0, 64, 0.5, seed), "cpu") != 0
        for seed in (1, 2, 2**40)
    ]
    blocks = torch.stack(draws).reshape(-1, 64 * 64).double()
    assert blocks.mean().item() == pytest.approx(0.5, abs=0.01)
    others = torch.corrcoef(blocks) - torch.eye(len(blocks))
    assert others.abs().max() < 0.08  # 5 standard deviations of the correlation of 4096 independent draws


@needs_compiler
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0])
def test_matched_moments_equal_pytorch_in_float64(scale, padded):
    q, k, _ = random_qkv(length=130, dim=64, scale=scale)
    mask = random_padding(2, 130, full_row=True) if padded else None
    expected = match_moments((q + 3 * scale).double(), k.double(), mask, backend="torch")
    for a, e in zip(match_moments(q + 3 * scale, k, mask, backend="cpu"), expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=0)


@needs_compiler
@pytest.mark.parametrize(("mean", "first"), [(1000.0, 1000.0), (0.0, 300.0)])
def test_a_large_mean_or_an_outlier_takes_no_digits_from_the_moments(mean, first):
    q, k, _ = random_qkv(length=130, dim=64)
    q = q + mean
    q[:, :, 0, 0] = first
    expected = match_moments(q.double(), k.double(), backend="torch")
    for a, e in zip(match_moments(q, k, backend="cpu"), expected, strict=True):
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


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize("arch", ["x86-64", "haswell"])
def test_narrower_vectors_give_the_same(arch, monkeypatch, cache, compiled):
    if arch == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    flags = [f"-march={arch}" if flag.startswith("-march") else flag for flag in compile.FLAGS]
    monkeypatch.setattr(compile, "FLAGS", flags)
    tensors = random_tensors(130, 48)
    for mix in (Mixture(0.5, 0.5, 48), Mixture(1.0, 1.0, 48, joint=True)):
        cpu._library.cache_clear()
        check(results("cpu", mix, tensors), results("torch", mix, tensors, None, torch.float64), mix)
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
    cpu._library.cache_clear()
    yield tmp_path / "cache"
    cpu._library.cache_clear()


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
        ({"CC": "false"}, "false ended with 1"),
        ({"CC": "no-such-compiler"}, "no-such-compiler"),
        ({"CC": "gcc '-DX"}, "No closing quotation"),
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
    assert (cache.stat().st_mode & 0o777, library.stat().st_mode & 0o777) == (0o700, 0o600)
    broken = tmp_path / "other" / library.name
    broken.parent.mkdir()
    broken.write_bytes(library.read_bytes()[:100])
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(broken.parent))
    load_library(source, A=42)
    assert len(compiled) == 2
    assert [path.name for path in broken.parent.iterdir()] == [library.name]


@needs_compiler
@pytest.mark.parametrize("damage", [lambda x: x[:5000], lambda x: x[:9000] + b"!" + x[9001:], lambda x: b""])
def test_a_damaged_library_is_compiled_again(source, damage, cache, compiled):
    load_library(source, A=42)
    (library,) = cache.iterdir()
    content = library.read_bytes()
    # A file of its own: the library that is loaded must stay whole.
    library.unlink()
    library.write_bytes(damage(content))
    library.chmod(0o600)
    load_library(source, A=42)
    assert len(compiled) == 2
    assert [path.read_bytes() for path in cache.iterdir()] == [content]


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
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_that_others_can_write_to_is_not_trusted(source, mode, cache, compiled, caplog):
    load_library(source, A=42)
    cache.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert load_library(source, A=42).answer() == 42
    assert len(compiled) == 2
    assert f"others may write to {cache}: empty it, and then chmod 700 {cache}" in caplog.text


@needs_compiler
def test_a_library_that_others_can_write_or_have_linked_is_not_trusted(source, cache, compiled, tmp_path):
    load_library(source, A=42)
    (library,) = cache.iterdir()
    library.chmod(0o620)
    load_library(source, A=42)
    assert len(compiled) == 2
    library.rename(tmp_path / library.name)
    library.symlink_to(tmp_path / library.name)
    load_library(source, A=42)
    assert len(compiled) == 3


@needs_compiler
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_cache_is_private_whatever_the_umask(source, umask, tmp_path, monkeypatch):
    cache = tmp_path / "above" / "cache"
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(cache))
    before = os.umask(umask)
    try:
        load_library(source, A=42)
    finally:
        os.umask(before)
    (library,) = cache.iterdir()
    modes = [path.stat().st_mode & 0o777 for path in (cache.parent, cache, library)]
    assert modes == [0o700, 0o700, 0o600]


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
    barrier, build = context.Barrier(3), compile._build  # they have all seen that there is none yet
    monkeypatch.setattr(compile, "_build", lambda *args: (barrier.wait(timeout=60), build(*args))[1])
    processes = [context.Process(target=load_library, args=(source,), kwargs={"A": 42}) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_what_the_compiler_says_is_passed_on(tmp_path, cache):
    source = tmp_path / "wrong.c"
    source.write_text("int f(void) { return nothing; }\n")
    with pytest.raises(CannotCompile, match="nothing"):
        load_library(source)


OFFSETS = """
#include <stddef.h>
#include "problem.h"
int64_t offsets[] = {%s, sizeof(problem)};
"""


@needs_compiler
def test_python_packs_what_c_reads(tmp_path, cache):
    names = [(kind, name) for kind, names in cpu.FIELDS for name in names]
    for header in cpu.SOURCE.parent.glob("*.h"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    source = tmp_path / "offsets.c"
    source.write_text(OFFSETS % ", ".join(f"offsetof(problem, {name})" for _, name in names))
    found = list((ctypes.c_int64 * (len(names) + 1)).in_dll(load_library(source, D=16), "offsets"))
    kinds = "".join(kind for kind, _ in names)
    assert found == [struct.calcsize(kinds[: i + 1]) - 8 for i in range(len(kinds))] + [struct.calcsize(kinds)]
