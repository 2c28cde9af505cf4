"""Speed up every process that runs tests: work that Hydra and Triton's interpreter repeat is done only once."""

import copy
import dataclasses
import functools
import os
from collections.abc import Callable

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig


def install_shortcuts() -> None:
    """Patch Hydra, and Triton's interpreter if it is in use, for the rest of this process."""
    speed_up_hydra()
    if os.environ.get("TRITON_INTERPRET") == "1":
        speed_up_triton_interpreter()


def speed_up_hydra() -> None:
    """Let Hydra parse each default only once, and not copy its store of dataclasses for every configuration.

    Otherwise three quarters of the time of a training with one update goes into the configuration of fairseq's 300
    options.
    """
    parser = OverridesParser.create()
    parse = functools.cache(OverridesParser.parse_rule)
    OverridesParser.parse_rule = lambda self, text, rule: copy.copy(parse(parser, text, rule))

    def init_without_deep_copy(self: CachingConfigRepository, delegate: IConfigRepository) -> None:
        self.delegate = copy.copy(delegate)
        self.cache = {}

    CachingConfigRepository.__init__ = init_without_deep_copy


def speed_up_triton_interpreter() -> None:
    """Let Triton's interpreter patch triton.language only once per kernel, and not check integers for overflow.

    Otherwise it searches the module in every call of a function inside a kernel, which takes half of its time, and
    the checks take a third of the rest. The tests on a GPU have tensors whose indices need 64 bits.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang

    def patch_unless_patched(fn: Callable) -> object:
        languages = [x for x in fn.__globals__.values() if x is interpreter.tl or x is interpreter.tl.core]
        if languages and all(language.range.__name__ == "_new_range" for language in languages):
            return interpreter._LangPatchScope()  # which restores nothing
        return patch(fn)

    interpreter._patch_lang = patch_unless_patched


def speed_up_fairseq_train() -> None:
    """Let fairseq-train compose the defaults of a task, a model and the like only once.

    Otherwise a third of the time of a training with three updates goes into their composition.
    """
    from fairseq.dataclass import utils

    compose = utils.compose
    parser = OverridesParser.create()

    @functools.cache
    def compose_groups(config_name: str, groups: tuple[str, ...]) -> DictConfig:
        return compose(config_name, overrides=list(groups), strict=False)

    def compose_once(config_name: str, overrides: list[str], strict: bool) -> DictConfig:
        values = [override for override in overrides if "." in override.split("=")[0]]
        groups = tuple(override for override in overrides if override not in values)
        config = copy.deepcopy(compose_groups(config_name, groups))
        ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides(values), config)
        return config

    utils.compose = compose_once
