"""Compiles the kernels for an architecture without a GPU.

The host code runs as it does on a GPU, on CPU tensors, with a driver that only names the architecture: what is compiled
is exactly what would be launched, specialisation of strides and pointers included. Only in a process of its own,
without TRITON_INTERPRET: the driver stays.
"""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lln_fairseq.ops.backends.triton import launch


class NamedDriver:
    """The part of a triton driver that compilation asks for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(arch: int, compiled: Callable[..., None], timeout: int = 60) -> None:
    """From now on a launch compiles and calls `compiled(name, kernel, grid, positional, keywords)`.

    A kernel that takes longer than `timeout` seconds ends the process.
    """
    driver.set_active(NamedDriver(arch))
    launch.capability = lambda device: arch
    original = JITFunction.run

    def run(self: JITFunction, *positional: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        print("compiling", self.__name__, file=sys.stderr, flush=True)
        signal.alarm(timeout)
        kernel = original(self, *positional, grid=grid, warmup=True, **keywords)
        signal.alarm(0)
        compiled(self.__name__, kernel, grid, positional, keywords)
        return kernel

    JITFunction.run = run


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread and bytes of stack. Spilled registers live on the stack: 0 bytes say that none did."""
    found = re.search(r"Function (?!\$).*?:\s*REG:(\d+) STACK:(\d+)", _cuobjdump(kernel, "--dump-resource-usage"))
    return {"registers": int(found[1]), "stack": int(found[2])}


def instructions(kernel: Any) -> list[tuple[int, str]]:
    """Address and text of every machine instruction."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _cuobjdump(kernel, "--dump-sass"))
    return [(int(address, 16), text) for address, text in lines]


def _cuobjdump(kernel: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
