"""Importing the package leaves the program it is imported into alone."""

import subprocess
import sys

STATE = """
import logging, sys, threading, torch
def state():
    root = logging.getLogger()
    return (root.level, root.handlers[:], sys.excepthook, threading.excepthook, torch.serialization.get_safe_globals())
before, loaded = state(), set(sys.modules)
"""
HEAVY = {"fairseq", "hydra", "omegaconf", "scipy", "matplotlib"}


def run(code):
    done = subprocess.run([sys.executable, "-c", STATE + code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_operations_and_mechanisms_load_torch_alone_and_change_nothing():
    code = f"""
import lln_fairseq
assert set(sys.modules) - loaded == {{"lln_fairseq"}}
from lln_fairseq.attention import build_attention
from lln_fairseq.ops.lln import lln_diag_attention
q = torch.ones(1, 2, 5, 8)
lln_diag_attention(q, q, q, 1.0, 1.0)
build_attention("lln", num_heads=2, head_dim=16, max_positions=5)
assert not {HEAVY} & set(sys.modules)
assert state() == before
"""
    run(code)


def test_registering_leaves_the_root_logger_as_it_was():
    run("""
import lln_fairseq
lln_fairseq.register(); lln_fairseq.register()
assert state()[:2] == before[:2]
""")
