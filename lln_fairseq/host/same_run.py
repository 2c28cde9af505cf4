"""Whether a directory's run is the one that is asked for: what changes its result may not change when it goes on."""

import argparse
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq.utils import split_paths
from omegaconf import DictConfig, OmegaConf

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.host.checkpoint_config import LANGUAGE_MODELS, STOCK, STOCK_ATTENTION, is_plain
from lln_fairseq.host.checkpoints import our_state, peek
from lln_fairseq.host.errors import InputError

WHOLE = ("model", "task", "criterion", "optimizer", "lr_scheduler")  # groups that are compared but for these:
MAY_CHANGE = {
    "model": {"_name", "checkpoint_activations", "feed_forward_tokens", "offload_activations", "min_params_to_wrap",
              "load_checkpoint_heads"},
    # the data is compared by its content, the seed in `common`
    "task": {"data", "seed", "log_interval", "tensorboard_logdir", "no_save_optimizer_state", "probe_interval",
             "probe_sequences", "global_batch", "sequence_parallel_size", "finetune_from_model"},
    "criterion": {"tpu"},
    "optimizer": {"lr", "tpu"},  # lr is that of `optimization`
    "lr_scheduler": {"lr", "total_num_update", "max_update"},  # they follow from max_update
}  # fmt: skip
SINGLE = {"common": ("seed",), "optimization": ("lr", "clip_norm", "sentence_avg")}


def check_same_run(here: DictConfig) -> None:
    """Raises InputError where a training goes on with the run in its save_dir, and its settings or data are others."""
    cfg = here.checkpoint
    path = Path(cfg.save_dir, cfg.restore_file)  # which is absolute if it is elsewhere
    reset = cfg.reset_optimizer or cfg.reset_lr_scheduler or cfg.reset_dataloader or cfg.reset_meters
    if reset or path.parent != Path(cfg.save_dir) or not path.is_file():
        return
    state = peek(str(path))
    found = differences(state.get("cfg"), here)
    recorded = our_state(state).get("data")
    if recorded and recorded != data_hash(split_paths(here.task.data)):
        found.append("other training data")
    if found:
        raise InputError(
            f"{cfg.save_dir} holds another run: {'; '.join(found)}. Give what it had, or another --save-dir "
            "(checkpoint.save_dir)"
        )


def data_hash(directories: list[str]) -> str:
    """sha256 of the lengths of the training samples: the text is another if they differ; "" where there are none."""
    found = [path for folder in directories for pattern in ("train*.idx", "*/train*.idx", "*/train*.label")
             for path in sorted(Path(folder).glob(pattern))]  # fmt: skip
    parts = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in found)
    return hashlib.sha256(parts).hexdigest() if parts else ""


def differences(saved: Any, here: DictConfig) -> list[str]:
    """["common.seed = 1, here it is 2", ...] between the configuration in a checkpoint and a training's own.

    What one of them does not know, or leaves to a preset or default, does not count; an attention's options have
    no presets, so that α which was matched and is now fixed is another.
    """
    if not isinstance(saved, Mapping):
        return []
    before, now = (
        dict(result_settings(saved)),
        dict(result_settings(OmegaConf.to_container(here, resolve=True, enum_to_str=True))),
    )
    unlike = [key for key in before if key in now and before[key] != now[key]]
    owned = {f"model.{key}" for key in _attention_of()}
    told = [key for key in unlike if None not in (before[key], now[key]) or key in owned]
    return [f"{key} = {before[key]}, here it is {now[key]}" for key in told]


def result_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """("common.seed", 1), ... : of a configuration as plain dictionaries, what changes the result of its training."""
    for group in WHOLE:
        options = _as_dict(config.get(group))
        ignored = MAY_CHANGE[group] | (_of_other_attentions(options) if group == "model" else set())
        yield from ((f"{group}.{key}", value) for key, value in options.items() if key not in ignored)
    model = _as_dict(config.get("model"))
    name = model.get("_name")  # where it alone says which attention it is, and the parameters fit another as well:
    if name in LANGUAGE_MODELS:
        yield "model._name", name
    elif "attention" not in model and str(name).startswith(STOCK):
        yield "model.attention", STOCK_ATTENTION
    for group, keys in SINGLE.items():
        options = _as_dict(config.get(group))
        yield from ((f"{group}.{key}", options[key]) for key in keys if key in options)
    if sequences := _sequences_an_update(config):
        yield "sequences an update", sequences


def _as_dict(group: Any) -> dict[str, Any]:
    """The group's options that are plain values, and so can be compared."""
    options = vars(group) if isinstance(group, argparse.Namespace) else group
    return {key: value for key, value in options.items() if is_plain(value)} if isinstance(options, Mapping) else {}


def _attention_of() -> dict[str, str]:
    """The mechanism that each of their options belongs to: of those registered by now."""
    return {
        f"{name}_{field.name}": name for name, entry in MECHANISMS.items() for field in dataclasses.fields(entry.config)
    }


def _of_other_attentions(options: Mapping[str, Any]) -> set[str]:
    """Nothing of a language model's, which has no choice."""
    return {key for key, name in _attention_of().items() if name != options.get("attention", name)}


def _sequences_an_update(config: Mapping[str, Any]) -> list[int] | None:
    """By epoch; None where tokens are counted instead, or where the number is not known."""
    dataset, optimization, distributed = (
        _as_dict(config.get(group)) for group in ("dataset", "optimization", "distributed_training")
    )
    size, workers = dataset.get("batch_size"), distributed.get("distributed_world_size")
    frequencies = optimization.get("update_freq")
    if dataset.get("max_tokens") or not (frequencies and isinstance(frequencies, list)):
        return None
    if not all(isinstance(number, int) for number in (size, workers, *frequencies)):
        return None
    shared = _as_dict(config.get("task")).get("sequence_parallel_size") or 1
    return [size * workers // shared * frequency for frequency in frequencies]
