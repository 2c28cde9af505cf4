"""Importing the package imports little and leaves the state of the importing program unchanged."""

import subprocess
import sys

from tests.documentation import README, code_blocks

# Run before each test's code: `state()` is what an import could change, `before` and `loaded` are taken before it.
PREAMBLE = """
import logging, sys, threading, torch
def state():
    root = logging.getLogger()
    return (root.level, root.handlers[:], sys.excepthook, threading.excepthook, torch.serialization.get_safe_globals())
before = state()
loaded = set(sys.modules)
"""
# Run before the example of README: from here on, only torch, what torch requires, and Triton can be imported.
ONLY_TORCH = """
import importlib.metadata, re
def distributions(name):
    yield name
    for requirement in importlib.metadata.requires(name) or []:
        if "extra ==" not in requirement:
            try:
                yield from distributions(re.match("[A-Za-z0-9_.-]+", requirement)[0])
            except importlib.metadata.PackageNotFoundError:
                pass  # it is required elsewhere only, such as on a GPU
allowed = {*distributions("torch"), "triton"}
distributions_of = importlib.metadata.packages_distributions()
blocked = {package for package, names in distributions_of.items() if not allowed.intersection(names)}
blocked -= {"lln_fairseq", *sys.stdlib_module_names}
class Blocker:
    def find_spec(name, path, target=None):
        if name.partition(".")[0] in blocked:
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Blocker)
for name in loaded:
    if name.partition(".")[0] in blocked:
        del sys.modules[name]  # torch imports numpy if it is installed
"""


def run_python(code):
    """Run PREAMBLE and the code in a new process, which must succeed and print nothing on stderr."""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_operations_and_attentions_need_only_torch():
    (example,) = [code for code in code_blocks(README, "python") if "lln_diag_attention" in code]
    run_python(f"""
{ONLY_TORCH}
assert {{"numpy", "fairseq", "scipy"}} <= blocked
import lln_fairseq.ops.lln
assert "torch._dynamo" not in sys.modules  # the compiler takes long to import
{example}
from lln_fairseq.attention import ATTENTION_REGISTRY, build_attention
for name in ATTENTION_REGISTRY:
    build_attention(name, num_heads=2, head_dim=16, max_positions=5)
assert state() == before
""")


def test_importing_package_imports_nothing_else_and_keeps_root_logger():
    """A spawned process that receives a model imports the module of its class first."""
    run_python("""
import lln_fairseq
assert set(sys.modules) - loaded == {"lln_fairseq"}
import lln_fairseq.inference.text_model
assert state()[:2] == before[:2]
lln_fairseq.register()
lln_fairseq.register()
assert state()[:2] == before[:2]
""")
