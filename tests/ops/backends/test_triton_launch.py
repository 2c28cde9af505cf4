"""The arguments of a kernel are the same whether Triton launches it or the compiled kernel is called directly.

Nothing is compiled and no GPU is needed: a driver and a compiled kernel that only record take their places.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lln_fairseq.ops.backends.triton import launch


class Driver:
    """A driver with one device, whose current stream is `stream`."""

    stream = 11

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return self.stream


class RecordingKernel(CompiledKernel):
    """A compiled kernel that appends the arguments of its launches to `launches`."""

    function = 5
    packed_metadata = (4, 1)

    def __init__(self):
        self.launches = []

    @property
    def run(self):
        return lambda *arguments: self.launches.append(arguments)

    def launch_metadata(self, grid, stream, *arguments):
        return (grid, stream, arguments)


def kernel_function(x, y, N, STEP, FINAL: triton.language.constexpr, META: triton.language.constexpr):
    pass


@pytest.fixture
def launched(monkeypatch):
    """Return a kernel, the `RecordingKernel` that Triton's cache has for it, and the driver."""
    function = JITFunction(kernel_function)
    compiled = RecordingKernel()
    fake = Driver()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(launch, "CAN_CALL_COMPILED", True)

    def bind(*arguments, **options):
        parameters = function.signature.bind(
            *arguments, **{k: v for k, v in options.items() if k in function.arg_names}
        )
        return dict(parameters.arguments), [], {}

    class Cache(dict):
        def get(self, key, default=None):
            return compiled

    function.device_caches[0] = (Cache(), {}, None, None, bind)
    constants = {"META": "meta", "FINAL": True, "num_warps": 4}
    return launch.Kernel(function, (6, 2, 1), torch.device("cpu"), (300, 7), constants), compiled, fake


def test_direct_call_has_the_arguments_of_triton(launched):
    kernel, compiled, _ = launched
    x = torch.zeros(3)

    launch.launch_kernel(kernel, x, None)
    assert kernel.compiled is compiled
    launch.launch_kernel(kernel, x, None)

    by_triton, directly = compiled.launches
    assert directly == by_triton
    assert directly[:4] == (6, 2, 1, 11)
    assert directly[-6:] == (x, None, 300, 7, True, "meta")


def test_direct_call_reads_the_stream_and_the_hooks(launched, monkeypatch):
    kernel, compiled, fake = launched
    launch.launch_kernel(kernel, None, None)
    fake.stream = 12
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", "enter")
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", "exit")

    launch.launch_kernel(kernel, None, None)

    _, _, _, stream, _, _, metadata, enter, leave, *_ = compiled.launches[1]
    assert (stream, enter, leave) == (12, "enter", "exit")
    assert metadata[:2] == ((6, 2, 1), 12)


def test_unknown_versions_of_triton_launch_every_time(launched, monkeypatch):
    kernel, compiled, _ = launched
    monkeypatch.setattr(launch, "CAN_CALL_COMPILED", False)

    launch.launch_kernel(kernel, None, None)
    launch.launch_kernel(kernel, None, None)

    assert kernel.compiled is None
    assert len(compiled.launches) == 2
