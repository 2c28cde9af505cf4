"""Settings that must be in place before anything else is imported, and what every test leaves as it found it."""

import copy
import functools
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser

from lln_fairseq.memory import keep_freed_memory

if not torch.cuda.is_available():
    # Must be set before triton is first imported: the kernels then run, slowly, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what it runs in the background, and every program that a test starts would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

keep_freed_memory()  # half the time of quadratic oracles goes into fresh pages otherwise

# They train, start processes or interpret kernels: scripts/test.sh --fast leaves them out.
SLOW = (
    "analysis/test_probe", "analysis/test_report", "fuzz", "hf", "host", "kill", "models", "ops/backends",
    "ops/test_compile", "ops/test_exchange", "ops/test_joint", "ops/test_moment_matching", "scripts", "tasks",
    "test_command", "test_documented_commands", "test_evaluate", "test_import", "test_linearize", "test_memory",
    "test_predict", "test_release", "test_train",
)  # fmt: skip


def is_slow(path: Path) -> bool:
    return path.relative_to(Path(__file__).parent).as_posix().startswith(SLOW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nor are they imported where they are left out."""
    return (config.option.markexpr == "not slow" and is_slow(collection_path)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)


def pytest_sessionstart() -> None:
    hurry()


def hurry() -> None:
    """In every process that tests: what the host and Triton's interpreter do again and again is done once."""
    compose_in_half_the_time()
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_triton_once()


def compose_in_half_the_time() -> None:
    """Three quarters of a training of one update go into Hydra's configuration of fairseq's 300 options. Here their
    defaults are parsed once, and the store of all dataclasses is not copied for every configuration."""
    parse, parser = functools.cache(OverridesParser.parse_rule), OverridesParser.create()
    OverridesParser.parse_rule = lambda self, text, rule: copy.copy(parse(parser, text, rule))

    def of(self: CachingConfigRepository, delegate: IConfigRepository) -> None:
        self.delegate, self.cache = copy.copy(delegate), {}

    CachingConfigRepository.__init__ = of


def patch_triton_once() -> None:
    """Saves the interpreter the search through triton.language in every call of a function inside a kernel, half of
    its time, when what it patches there is in place since the kernel began."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def unless_patched(fn: Callable) -> object:
        languages = [x for x in fn.__globals__.values() if x is interpreter.tl or x is interpreter.tl.core]
        if languages and all(x.range.__name__ == "_new_range" for x in languages):
            return interpreter._LangPatchScope()  # nothing to restore
        return patch(fn)

    interpreter._patch_lang = unless_patched


@pytest.fixture(autouse=True)
def _handlers_of_the_root_logger():
    """fairseq-validate and Hydra put handlers there that write to the stdout of their test, closed in the next one."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data-bin of a few sentences; who changes it copies it."""
    from tests.fairseq_runs import make_corpus  # and fairseq, which the fast tests do without

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two separable classes of pairs of sentences; who changes it copies it."""
    from tests.fairseq_runs import make_classification

    return make_classification(tmp_path_factory.mktemp("task"))
