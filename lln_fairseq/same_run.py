"""Whether a directory's run is the one that is asked for: what changes its result may not change when it goes on."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lln_fairseq.attention import ATTENTION_REGISTRY

WHOLE = ("model", "task", "criterion", "optimizer", "lr_scheduler")  # groups that are compared but for these:
MAY_CHANGE = {
    "model": {"_name", "checkpoint_activations", "offload_activations", "min_params_to_wrap", "load_checkpoint_heads"},
    # the data is compared by its content, the seed in `common`
    "task": {"data", "seed", "log_interval", "tensorboard_logdir", "no_save_optimizer_state", "probe_interval",
             "probe_sequences", "global_batch"},
    "criterion": {"tpu"},
    "optimizer": {"lr", "tpu"},  # lr is that of `optimization`
    "lr_scheduler": {"lr", "total_num_update", "max_update"},  # they follow from max_update
}  # fmt: skip
SINGLE = {"common": ("seed",), "optimization": ("lr", "clip_norm", "sentence_avg")}


def differences(saved: Any, here: DictConfig) -> list[str]:
    """["common.seed = 1, here it is 2", ...] between the configuration in a checkpoint and a training's own.

    What one of them does not know, or leaves to a preset or default, does not count.
    """
    if not isinstance(saved, Mapping):
        return []
    before, now = dict(_settings(saved)), dict(_settings(OmegaConf.to_container(here, resolve=True, enum_to_str=True)))
    unlike = [key for key in before if key in now and before[key] != now[key] and None not in (before[key], now[key])]
    return [f"{key} = {before[key]}, here it is {now[key]}" for key in unlike]


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for group in WHOLE:
        options = _as_dict(config.get(group))
        ignored = MAY_CHANGE[group] | (_of_other_attentions(options) if group == "model" else set())
        yield from ((f"{group}.{key}", value) for key, value in options.items() if key not in ignored)
    for group, keys in SINGLE.items():
        options = _as_dict(config.get(group))
        yield from ((f"{group}.{key}", options[key]) for key in keys if key in options)
    if sequences := _sequences_an_update(config):
        yield "sequences an update", sequences


def _as_dict(group: Any) -> dict[str, Any]:
    options = vars(group) if isinstance(group, argparse.Namespace) else group
    return dict(options) if isinstance(options, Mapping) else {}


def _of_other_attentions(options: Mapping[str, Any]) -> set[str]:
    return {
        f"{name}_{field.name}"
        for name, entry in ATTENTION_REGISTRY.items()
        if name != options.get("attention")
        for field in dataclasses.fields(entry.config)
    }


def _sequences_an_update(config: Mapping[str, Any]) -> list[int] | None:
    """By epoch; None where tokens are counted instead, or where the number is not known."""
    dataset, optimization, distributed = (
        _as_dict(config.get(group)) for group in ("dataset", "optimization", "distributed_training")
    )
    size, workers = dataset.get("batch_size"), distributed.get("distributed_world_size")
    frequencies = optimization.get("update_freq")
    if dataset.get("max_tokens") or not (isinstance(size, int) and isinstance(workers, int) and frequencies):
        return None
    return [size * workers * frequency for frequency in frequencies]
