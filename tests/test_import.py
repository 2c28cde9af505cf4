"""Importing the package leaves the program it is imported into alone."""

import subprocess
import sys


def test_logging_is_left_as_it_was():
    code = "import logging; before = logging.getLogger().level, logging.getLogger().handlers[:]; import lln_fairseq; "
    code += "assert (logging.getLogger().level, logging.getLogger().handlers) == before; print('same')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("same\n", "")


def test_operations_and_mechanisms_work_without_fairseq():
    code = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "fairseq" else find_spec(name, *a)
import torch
from lln_fairseq.attention import build_attention
from lln_fairseq.ops.lln import lln_diag_attention
q = torch.ones(1, 2, 5, 8)
lln_diag_attention(q, q, q, 1.0, 1.0)
build_attention("lln", num_heads=2, head_dim=16, max_positions=5)
assert not {"fairseq", "hydra", "omegaconf"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
