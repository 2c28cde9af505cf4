"""Settings that must be in place before anything else is imported."""

import os

import torch

if not torch.cuda.is_available():
    # Must be set before triton is first imported: the kernels then run, slowly, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
