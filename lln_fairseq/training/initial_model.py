"""Build the model of a run like the model of the checkpoint that the run starts from.

The sizes, the attention and the options of the attention are taken from the checkpoint. Values that the user sets on
the command line are kept, and so are values that a file in configs/ sets to something other than the default.
configs/hydra/callbacks/user_dir.yaml installs the callback for every recipe in configs/. fairseq-train has no such step
and needs the options of the checkpoint on its command line.
"""

import copy
import dataclasses
import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.checkpoints.compatibility import longest_sequence
from lln_fairseq.checkpoints.config import (
    OURS,
    STOCK,
    STOCK_ATTENTION,
    checked_config,
    parameter_sizes,
    plain_options,
    stored_options,
)
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.errors import UserError
from lln_fairseq.models.lln_roberta import DEFAULT_PRESET, LLNRobertaConfig, complete_config
from lln_fairseq.models.presets import SIZE_FIELDS

START = "checkpoint.finetune_from_model"
# Options of the model, apart from the sizes and the attention, that its parameters were trained with.
LAYER_OPTIONS = (
    "activation_fn",
    "encoder_normalize_before",
    "layernorm_embedding",
    "layer_norm_eps",
    "untie_weights_roberta",
    "pair_form",
    "rotary",
    "rotary_base",
)


class InitialModel(Callback):
    """A Hydra callback that completes the options of the model from the checkpoint that a run starts from."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Set the options in the configuration, in place. End the program with one line if that is impossible.

        save_dir is created, because Hydra's directory is in it, and Hydra would end in a traceback.
        """
        options = _options_or_exit(config)
        with open_dict(config):
            for key, value in options.items():
                config.model[key] = value
        save_dir = _save_dir(config)  # it can have the attention in its name
        try:
            os.makedirs(save_dir, exist_ok=True)
        except OSError as error:
            _exit(f"{save_dir}: {error.strerror}")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Append the options to the overrides that all jobs of a sweep share."""
        for key, value in _options_or_exit(config).items():
            config.hydra.overrides.task.append(f"++model.{key}={_format_value(value)}")


def _options_or_exit(config: DictConfig) -> dict[str, Any]:
    """Return `missing_options(config)`. Print a UserError and exit."""
    try:
        return missing_options(config)
    except UserError as error:
        _exit(str(error))


def _exit(message: str) -> NoReturn:
    """Print an error and end the program: Hydra would turn an exception into a warning."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1) from None


def missing_options(config: DictConfig) -> dict[str, Any]:
    """Return the options that a run's model takes from the checkpoint that the run starts from.

    Options that the user has set are left out. max_positions is not below the length of the task's texts. The result is
    empty if the run does not start from a checkpoint, if it trains another model than lln_roberta, and if the
    checkpoint has no configuration. All checkpoints of a sweep must have the same options.
    """
    overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    model: Any = {}
    if OmegaConf.is_dict(config.model):
        model = OmegaConf.to_container(config.model, resolve=False)
    if ARCH_MODEL_NAME_REGISTRY.get(model.get("_name")) != OURS:
        return {}
    checkpoints = _initial_checkpoints(config, overrides)
    if not checkpoints:
        return {}
    stored = checkpoint_options(checkpoints[0])
    for path in checkpoints[1:]:
        if checkpoint_options(path) != stored:
            raise UserError(
                f"the checkpoints of a sweep must have the same sizes and attention, but {path} has others: start one "
                "run for each of them"
            )
    if not stored:
        return {}
    given = {override.key_or_group for override in overrides}
    swept = {override.key_or_group for override in overrides if override.is_sweep_override()}
    defaults = {field.name: field.default for field in dataclasses.fields(LLNRobertaConfig)}

    def is_unset(key: str) -> bool:
        return f"model.{key}" not in given and model.get(key) in (None, defaults[key])

    names = list(LAYER_OPTIONS)
    if "model" not in given and "model._name" not in given and model["_name"] == f"{OURS}_{DEFAULT_PRESET}":
        names += SIZE_FIELDS
    if "attention" not in given and is_unset("attention"):
        has_same_attention = True
        names.append("attention")
    elif {"attention", "model.attention"} & swept:
        has_same_attention = False  # in some of the jobs
    else:
        has_same_attention = model["attention"] == stored["attention"]
    if has_same_attention:
        names.append("softmax_layers")
        for field in dataclasses.fields(MECHANISMS[stored["attention"]].config):
            names.append(f"{stored['attention']}_{field.name}")
    options = {name: stored[name] for name in names if is_unset(name)}
    if set(SIZE_FIELDS) <= options.keys() and ARCH_MODEL_NAME_REGISTRY[stored["_name"]] == OURS:
        options["_name"] = stored["_name"]
    if is_unset("max_positions"):
        # The data may have longer texts than the checkpoint: `resize_positions` makes its position embeddings longer.
        data_limit = OmegaConf.select(config, "task.max_positions")
        if data_limit is None:
            data_limit = OmegaConf.select(config, "task.tokens_per_sample")
        options["max_positions"] = max(stored["max_positions"], data_limit or 0)
    return options


def _initial_checkpoints(config: DictConfig, overrides: Iterable[Override]) -> list[str]:
    """Return the checkpoints to take options from: one per swept value in a sweep over START, otherwise at most one.

    If the checkpoint of a single run no longer exists, its own last checkpoint is returned, which the run resumes from.
    If there is none, UserError is raised.
    """
    for override in overrides:
        if override.key_or_group == START and override.is_sweep_override():
            return [str(getattr(path, "text", path)) for path in override.sweep_iterator()]  # .text: without quotes
    path = OmegaConf.select(config, START)
    if not path:
        return []
    if os.path.isfile(path):
        return [path]
    if config.hydra.mode == RunMode.MULTIRUN:  # each job has its own directory, and reports the error itself
        return []
    last = os.path.join(_save_dir(config), LAST)
    if os.path.isfile(last):
        return [last]
    raise UserError(f"{START}={path}: no such checkpoint")


def _save_dir(config: DictConfig) -> str:
    """Return the save_dir of a configuration before Hydra has installed it in HydraConfig, which it may refer to."""
    current = HydraConfig.instance()
    previous = current.cfg
    resolved = copy.deepcopy(config)
    current.set_config(resolved)
    try:
        return str(resolved.checkpoint.save_dir)
    finally:
        current.cfg = previous


def checkpoint_options(path: str) -> dict[str, Any]:
    """Return the model options of a checkpoint, of this project's RoBERTa or fairseq's own.

    Options that are not stored have their defaults. max_positions is the longest sequence that the position embeddings
    allow. The result is empty if the checkpoint has no configuration. A checkpoint of another model raises UserError.
    """
    state = load_checkpoint_lazily(path)
    if not stored_options(state)["model"]:
        return {}
    model = checked_config(state, path).model
    options = plain_options(model)
    name = options.get("_name") or options.get("arch")
    if ARCH_MODEL_NAME_REGISTRY[name] not in (OURS, STOCK):
        raise UserError(f"{path} holds the model {name}, and this run trains a RoBERTa: give another {START}")
    options.setdefault("attention", STOCK_ATTENTION)
    sizes = parameter_sizes(state["model"])
    completed = OmegaConf.create({**options, **sizes})
    ARCH_CONFIG_REGISTRY[name](completed)
    options = plain_options(complete_config(completed))
    options["max_positions"] = longest_sequence(state)
    return options


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    if value is None:
        return "null"
    return str(value).lower()
