"""Tune what the C library does with freed memory."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def disable_malloc_trim() -> None:
    """Let this process keep the memory that it frees, as on a GPU.

    New pages under large tensors are otherwise a sixth of the time of a training step.
    For programs that train or measure; call it once, before the work. glibc gives blocks of over 32 MB back to the
    system as soon as they are freed. The price is memory: 3 % more at the peak where lengths stay, 17 % where they
    vary, and none of it is given back. Where the C library is not glibc, or the environment tunes it by MALLOC_... or
    GLIBC_TUNABLES, nothing changes.
    """
    if sys.platform.startswith("linux") and not any(name.startswith(("MALLOC_", "GLIBC_T")) for name in os.environ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
