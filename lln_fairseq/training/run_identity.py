"""Check that the run in a directory is the requested one: what changes its result must not change when it resumes.

A checkpoint records the configuration of its training, and its origin: hashes of the training data and of the model
that the run started from.
"""

import argparse
import dataclasses
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.utils import split_paths
from omegaconf import DictConfig

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.checkpoints.config import LANGUAGE_MODELS, STOCK, STOCK_ATTENTION, plain_config, plain_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily, plugin_state
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.errors import InputError

# Groups of options that are compared, except for the options that may change.
MAY_CHANGE = {
    "model": {
        "_name",
        "checkpoint_activations",
        "feed_forward_tokens",
        "load_checkpoint_heads",
        "min_params_to_wrap",
        "offload_activations",
    },
    "task": {
        "data",  # compared by its content
        "finetune_from_model",
        "global_batch",
        "log_interval",
        "no_save_optimizer_state",
        "probe_interval",
        "probe_sequences",
        "seed",  # that of `common` is compared
        "sequence_parallel_size",
        "tensorboard_logdir",
    },
    "criterion": {"tpu"},
    "optimizer": {"lr", "tpu"},  # the lr of `optimization` is compared
    "lr_scheduler": {"lr", "total_num_update", "max_update"},  # they follow from max_update
}
# Options of other groups that are compared.
SINGLE = {
    "common": ("seed",),
    "optimization": ("lr", "clip_norm", "sentence_avg"),
    "dataset": ("train_subset",),
    "checkpoint": ("best_checkpoint_metric", "maximize_best_checkpoint_metric"),
}
CLASSES = {"model": ARCH_MODEL_REGISTRY, "task": TASK_REGISTRY}  # by name; those of the other groups: REGISTRIES
NO_LIMIT = "as many as there are"
TOKENS = {"tokens an update", "dataset.max_tokens"}  # one of them may change if sequences are counted too

WHOLE_FILE = 64 << 20  # bytes: of larger token files samples are hashed
CHUNK = 1 << 18  # bytes of a sample
CHUNKS = 64  # samples


def load_own_checkpoint(cfg: DictConfig) -> dict[str, Any] | None:
    """Return the checkpoint in its own save_dir that a training resumes, or None if it does not resume one.

    fairseq takes the default's name from the save_dir and every other path as it is.
    """
    path = Path(cfg.save_dir, LAST) if cfg.restore_file == LAST else Path(cfg.restore_file)
    if path.parent.resolve() != Path(cfg.save_dir).resolve() or not path.is_file():
        return None
    return load_checkpoint_lazily(str(path))


def check_same_run(cfg: DictConfig, state: Mapping[str, Any] | None) -> None:
    """Raise InputError if a training resumes a run with other settings, other data or another model to start from.

    Args:
        cfg: the whole configuration of the training
        state: what `load_own_checkpoint` returned
    """
    options = cfg.checkpoint
    if state is None or options.reset_optimizer or options.reset_lr_scheduler or options.reset_dataloader:
        return
    saved = state.get("cfg")
    origin: dict[str, Any] = plugin_state(state)
    found = differences(saved, cfg)
    if options.reset_meters:  # there are no scores that another metric would be compared with
        found = [difference for difference in found if not difference.startswith("checkpoint.")]
    if origin.get("content") and origin["content"] != _data_hash(cfg):
        found.append("other training data")
    if "start" in origin and _starts_elsewhere(options, origin["start"], saved):
        found.append("another model to start from (checkpoint.finetune_from_model)")
    if found:
        raise InputError(
            f"{options.save_dir} holds another run: {'; '.join(found)}. Give what it had, or another --save-dir "
            "(checkpoint.save_dir)"
        )


def run_origin(cfg: DictConfig, state: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what the checkpoints of a training record: hashes of its data and of the model it started from.

    A run that resumes keeps its start: the file may have changed meanwhile, and an old checkpoint records none.
    """
    origin: dict[str, Any] = {"content": _data_hash(cfg)}
    start = _start_hash(cfg.checkpoint) if state is None else plugin_state(state).get("start")
    if start is not None:
        origin["start"] = start
    return origin


def _data_hash(cfg: DictConfig) -> str:
    return data_hash(split_paths(cfg.task.data), cfg.dataset.train_subset)


def _start_hash(cfg: DictConfig) -> str | None:
    """Return the hash of the file that a new run starts from, "" for none, None if it is not on this machine."""
    path = cfg.finetune_from_model if cfg.restore_file == LAST else cfg.restore_file
    if not path:
        return ""
    return file_hash(path) if os.path.isfile(path) else None


def _starts_elsewhere(cfg: DictConfig, recorded: str, saved: Any) -> bool:
    """Return True if the model to start from is known to be another one; a file that is gone is not."""
    path = cfg.finetune_from_model
    if not path or not recorded:  # a run from scratch, or by --restore-file, names none
        options = plain_options(saved.get("checkpoint")) if isinstance(saved, Mapping) else {}
        return bool(path) != bool(options.get("finetune_from_model"))
    return os.path.isfile(path) and recorded != file_hash(path)


def data_hash(directories: list[str], subset: str = "train") -> str:
    """Return the sha256 of the training data, "" if there is none.

    The index and the targets are read whole, the token ids (.bin) too up to 64 MiB; of a larger .bin its size and 64
    evenly spread chunks of 256 KiB, the first and the last bytes among them.
    """
    name = glob.escape(subset)
    patterns = (f"{name}*.idx", f"{name}*.bin", f"*/{name}*.idx", f"*/{name}*.bin", f"*/{name}*.label")
    hashes = []
    for folder in directories:
        for pattern in patterns:
            for path in sorted(Path(folder).glob(pattern)):
                hashes.append(_sampled_hash(path) if path.suffix == ".bin" else _whole_hash(path))
    return hashlib.sha256(b"".join(hashes)).hexdigest() if hashes else ""


def file_hash(path: str) -> str:
    """Return the sha256 of a file."""
    return _whole_hash(Path(path)).hex()


def _whole_hash(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sampled_hash(path: Path) -> bytes:
    size = os.path.getsize(path)
    if size <= WHOLE_FILE:
        return _whole_hash(path)
    sha256 = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(CHUNKS):
            file.seek(number * (size - CHUNK) // (CHUNKS - 1))
            sha256.update(file.read(CHUNK))
    return sha256.digest()


def differences(saved: Any, cfg: DictConfig) -> list[str]:
    """Return ["common.seed = 1, here it is 2", ...] between a checkpoint's configuration and a training's own.

    What one of them does not know, or leaves to a preset or default, does not count. An attention's options have
    no presets: α that was matched and is now fixed is a difference.
    """
    if not isinstance(saved, Mapping):
        return []
    before = dict(result_settings(saved))
    now = dict(result_settings(plain_config(cfg)))
    changed = [key for key in before if key in now and before[key] != now[key]]
    if "dataset.max_tokens" in before and not set(changed) >= TOKENS:
        changed = [key for key in changed if key not in TOKENS]
    without_preset = {f"model.{option}" for option in _attention_options()}
    return [
        f"{key} = {before[key]}, here it is {now[key]}"
        for key in changed
        if key in without_preset or (before[key] is not None and now[key] is not None)
    ]


def result_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield ("common.seed", 1), ...: what changes the result of a training, from a configuration of dictionaries."""
    for group, may_change in MAY_CHANGE.items():
        options = _own_options(group, config.get(group))
        ignored = may_change | _options_of_other_attentions(options) if group == "model" else may_change
        for key, value in options.items():
            if key not in ignored:
                yield f"{group}.{key}", value
    name = plain_options(config.get("model")).get("_name")
    # models whose name alone says which attention they have, and whose parameters fit another one as well
    if name in LANGUAGE_MODELS:
        yield "model._name", name
    elif str(name).startswith(STOCK):
        yield "model.attention", STOCK_ATTENTION
    for group, keys in SINGLE.items():
        options = plain_options(config.get(group))
        for key in keys:
            if key in options:
                yield f"{group}.{key}", options[key]
    yield from _update_size(config)


def _own_options(name: str, group: Any) -> dict[str, Any]:
    """Return the options of a group that its class declares.

    The group of a class without a dataclass, such as the optimizer sgd or fairseq's own RoBERTa, is a Namespace of all
    arguments of the command line, those of other groups included.
    """
    options = plain_options(group)
    if not isinstance(group, argparse.Namespace):
        return options
    registry = CLASSES[name] if name in CLASSES else REGISTRIES[name]["registry"]
    chosen = registry.get(str(options.get("_name")))
    parser = argparse.ArgumentParser()
    if chosen is not None:
        chosen.add_args(parser)
    declared = {"_name", *(action.dest for action in parser._actions)}
    return {key: value for key, value in options.items() if key in declared}


def _attention_options() -> dict[str, str]:
    """Return the mechanism that each option of a registered mechanism belongs to."""
    return {
        f"{name}_{field.name}": name for name, entry in MECHANISMS.items() for field in dataclasses.fields(entry.config)
    }


def _options_of_other_attentions(options: Mapping[str, Any]) -> set[str]:
    """Return the options of mechanisms that a model does not use; none for a language model, which has no choice."""
    return {key for key, name in _attention_options().items() if name != options.get("attention", name)}


def _update_size(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the most sequences and tokens of an update, by epoch, and the most tokens of a batch of counted sequences.

    All batches and workers are counted. Nothing is yielded if a configuration does not say them.
    """
    dataset = plain_options(config.get("dataset"))
    sequences = dataset.get("batch_size")
    tokens = dataset.get("max_tokens")
    frequencies = plain_options(config.get("optimization")).get("update_freq")
    workers: Any = plain_options(config.get("distributed_training")).get("distributed_world_size")
    sharing = plain_options(config.get("task")).get("sequence_parallel_size") or 1
    if not isinstance(frequencies, list) or not frequencies:
        return
    if not all(isinstance(number, int) for number in (sequences or tokens, workers, sharing, *frequencies)):
        return
    batches = [workers // sharing * frequency for frequency in frequencies]
    yield "sequences an update", [sequences * number for number in batches] if sequences else NO_LIMIT
    yield "tokens an update", [tokens * number for number in batches] if tokens else NO_LIMIT
    if sequences:
        yield "dataset.max_tokens", tokens or NO_LIMIT
