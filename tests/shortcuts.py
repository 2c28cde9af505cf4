"""In every process that tests: what the host and Triton's interpreter do again and again is done once."""

import copy
import functools
import os
from collections.abc import Callable

from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser


def hurry() -> None:
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
