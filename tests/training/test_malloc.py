"""What a process keeps of the memory that it frees: counted in page faults, in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource, sys, threading
import torch
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.ops.lln import lln_attention

if len(sys.argv) > 1:
    disable_malloc_trim()

q = torch.randn(1, 1, 150_000, 64)  # 38 MB: glibc gives blocks of over 32 MB back when they are freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    lln_attention(q, q, q, 1.0, 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(sorted(faults() for _ in range(16))[4])  # some make room, others find holes that are too small
thread = threading.Thread(target=faults)  # of another thread: glibc serves it from elsewhere
thread.start()
thread.join()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize(
    ("arguments", "environment", "kept"),
    [(["keep"], {}, True), (["keep"], {"MALLOC_ARENA_MAX": "2"}, False), ([], {}, False)],
)
def test_large_results_are_computed_in_memory_that_was_freed_before(arguments, environment, kept):
    """Where the program asks for it, and unless the user tunes the allocator."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PAGE_FAULTS, *arguments]
    result = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    assert (int(result.stdout) < 1000) == kept, result.stdout  # of 9375 pages of 4 KiB
