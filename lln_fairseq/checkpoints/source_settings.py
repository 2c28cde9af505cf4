"""What a converted model's own files say about its outputs, and its parameters do not show.

A checkpoint keeps these settings, and `lln-fairseq export` writes them back: for a classifier they are entries of
config.json, for an encoder of sentence vectors entries of config_sentence_transformers.json.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from lln_fairseq.errors import UserError

ENTRY = "source_settings"  # in a checkpoint's plugin state
REGRESSION = "regression"  # the problem_type of a model whose output is a score as it is
# The activations that CrossEncoder of sentence-transformers can apply to the only output of a model, by their classes.
SCORE_ACTIVATIONS: dict[str, type[nn.Module]] = {"Sigmoid": nn.Sigmoid, "Identity": nn.Identity}
IDENTITY = "torch.nn.modules.linear.Identity"


def settings_entries(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a checkpoint's plugin state that `stored_settings` reads; empty without settings."""
    if not settings:
        return {}
    return {ENTRY: json.dumps(settings)}


def stored_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `lln-fairseq convert` stored in a checkpoint; empty if it has none."""
    from lln_fairseq.checkpoints.reading import plugin_state  # imports fairseq, which lln_fairseq.engines does without

    text = plugin_state(state).get(ENTRY, "{}")
    try:
        settings = json.loads(str(text))
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise UserError(f"the checkpoint's {ENTRY} must be a JSON object, got {str(text)[:80]!r}")
    return settings


def activation_settings(name: str) -> dict[str, Any]:
    """Return the entries of config.json in which CrossEncoder looks for its activation, since version 4 and before."""
    return {"sentence_transformers": {"activation_fn": name}, "sbert_ce_default_activation_function": name}


def activation_name(config: Mapping[str, Any]) -> Any:
    """Return the activation that the entries of a config.json name for CrossEncoder, or None."""
    entries = config.get("sentence_transformers")
    if isinstance(entries, Mapping) and "activation_fn" in entries:
        return entries["activation_fn"]
    return config.get("sbert_ce_default_activation_function")


def score_activation(settings: Mapping[str, Any]) -> nn.Module:
    """Return what a model with one output applies to it, as CrossEncoder and transformers' pipeline do.

    This is the activation that its settings name. Without one, it is the sigmoid, but nothing for a regression, and
    nothing without settings, which a model that was trained here does not have. UserError is raised for an activation
    that is not in SCORE_ACTIVATIONS.
    """
    name = activation_name(settings)
    if name is not None:
        kind = str(name).rpartition(".")[2]
        if kind not in SCORE_ACTIVATIONS:
            choices = " or ".join(SCORE_ACTIVATIONS)
            raise UserError(f"the activation of the score must be {choices} of torch.nn, got {str(name)[:80]}")
        return SCORE_ACTIVATIONS[kind]()
    if not settings or settings.get("problem_type") == REGRESSION:
        return nn.Identity()
    return nn.Sigmoid()
