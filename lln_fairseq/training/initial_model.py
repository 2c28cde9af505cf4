"""Build the model of a run like the model of the checkpoint that the run starts from.

The sizes, the attention and the options of the attention are taken from the checkpoint. Values that the user sets on
the command line are kept, and so are values that a file in configs/ sets to something other than the default. This is
done for every recipe in configs/, see hydra_callback.py. fairseq-train has no such step and needs the options of the
checkpoint on its command line.
"""

import copy
import dataclasses
import os
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.checkpoints.compatibility import longest_sequence
from lln_fairseq.checkpoints.config import (
    OURS,
    STOCK_ATTENTION,
    checked_config,
    parameter_sizes,
    plain_options,
    stored_options,
)
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.errors import UserError
from lln_fairseq.files import no_such_checkpoint
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
# Options that the parameters of a classification head were trained with.
HEAD_OPTIONS = ("pooler_activation_fn", "pooler_dropout", "pooler_dim", "pooling")


def missing_options(config: DictConfig) -> dict[str, Any]:
    """Return the options that a run's model takes from the checkpoint that the run starts from.

    Options that the user has set are left out. max_positions is not below the length of the task's texts. The result is
    empty if the run does not start from a checkpoint, if it trains another model than lln_roberta, and if the
    checkpoint has no configuration.
    """
    model: Any = {}
    if OmegaConf.is_dict(config.model):
        model = OmegaConf.to_container(config.model, resolve=False)
    if ARCH_MODEL_NAME_REGISTRY.get(model.get("_name")) != OURS:
        return {}
    checkpoint = _initial_checkpoint(config)
    if not checkpoint:
        return {}
    stored = checkpoint_options(checkpoint)
    if not stored:
        return {}
    overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    given = {override.key_or_group for override in overrides}
    defaults = {field.name: field.default for field in dataclasses.fields(LLNRobertaConfig)}

    def is_unset(key: str) -> bool:
        return f"model.{key}" not in given and model.get(key) in (None, defaults[key])

    names = list(LAYER_OPTIONS)
    if model.get("load_checkpoint_heads"):
        names += HEAD_OPTIONS
    if "model" not in given and "model._name" not in given and model["_name"] == f"{OURS}_{DEFAULT_PRESET}":
        names += SIZE_FIELDS
    if given.isdisjoint({"attention", "layout"}) and is_unset("attention"):
        has_same_attention = True
        names.append("attention")
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


def _initial_checkpoint(config: DictConfig) -> str:
    """Return the checkpoint to take options from, or "" if the run starts from scratch.

    If the checkpoint no longer exists, that is the run's own last checkpoint, which the run resumes from. If there is
    none, UserError is raised.
    """
    path = OmegaConf.select(config, START)
    if not path:
        return ""
    if os.path.isfile(path):
        return str(path)
    last = os.path.join(find_save_dir(config), LAST)
    if os.path.isfile(last):
        return last
    raise UserError(f"{START}: {no_such_checkpoint(path)}")


def find_save_dir(config: DictConfig) -> str:
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
    options = plain_options(checked_config(state, path).model)
    name = options.get("_name") or options["arch"]  # of fairseq's own RoBERTa
    options.setdefault("attention", STOCK_ATTENTION)
    sizes = parameter_sizes(state["model"])
    completed = OmegaConf.create({**options, **sizes, "_name": name})
    ARCH_CONFIG_REGISTRY[name](completed)
    options = plain_options(complete_config(completed))
    options["max_positions"] = longest_sequence(state)
    return options
