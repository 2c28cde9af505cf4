"""Freed memory is reused after disable_malloc_trim; measured as page faults, in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

COUNT_PAGE_FAULTS = """
import resource, sys, threading
import torch
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.ops.lln import lln_attention

if "disable" in sys.argv:
    disable_malloc_trim()

q = torch.randn(1, 1, 150_000, 64)  # 38 MB: glibc returns blocks of more than 32 MB when they are freed

def count_page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    lln_attention(q, q, q, 1.0, 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# The first calls allocate memory, and sometimes a free block is too small.
print(sorted(count_page_faults() for _ in range(16))[4])
# glibc serves other threads from other memory, which must work too.
thread = threading.Thread(target=count_page_faults)
thread.start()
thread.join()
"""
FEW_PAGES = 1000  # a tensor of the size of q has 9375 pages of 4 KiB


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="disable_malloc_trim only affects glibc")
@pytest.mark.parametrize(
    ("arguments", "environment", "is_reused"),
    [(["disable"], {}, True), (["disable"], {"MALLOC_ARENA_MAX": "2"}, False), ([], {}, False)],
    ids=["disabled", "environment", "default"],
)
def test_freed_memory_is_reused(arguments, environment, is_reused):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", COUNT_PAGE_FAULTS, *arguments]
    result = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True)
    assert (int(result.stdout) < FEW_PAGES) == is_reused, result.stdout
