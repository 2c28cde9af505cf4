"""Importing the package imports little and leaves the state of the importing program unchanged."""

import subprocess
import sys

# Run before each test's code: `state()` is what an import could change, `before` and `loaded` are taken before it.
PREAMBLE = """
import logging, sys, threading, torch
def state():
    root = logging.getLogger()
    return (root.level, root.handlers[:], sys.excepthook, threading.excepthook, torch.serialization.get_safe_globals())
before = state()
loaded = set(sys.modules)
"""
HEAVY_PACKAGES = {"fairseq", "hydra", "omegaconf", "scipy", "matplotlib"}


def run_python(code):
    """Run PREAMBLE and the code in a new process, which must succeed and print nothing on stderr."""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_package_imports_nothing_else():
    run_python("""
import lln_fairseq
assert set(sys.modules) - loaded == {"lln_fairseq"}
""")


def test_operations_and_attentions_need_only_torch():
    run_python(f"""
from lln_fairseq.attention import build_attention
from lln_fairseq.ops.lln import lln_diag_attention
q = torch.ones(1, 2, 5, 8)
lln_diag_attention(q, q, q, 1.0, 1.0)
build_attention("lln", num_heads=2, head_dim=16, max_positions=5)
assert not {HEAVY_PACKAGES} & set(sys.modules)
assert state() == before
""")


def test_register_keeps_root_logger():
    run_python("""
import lln_fairseq
lln_fairseq.register()
lln_fairseq.register()
assert state()[:2] == before[:2]
""")


def test_importing_inference_keeps_root_logger():
    """A spawned process that receives a model imports the module of its class first."""
    run_python("""
import lln_fairseq.inference.text_model
assert state()[:2] == before[:2]
""")
