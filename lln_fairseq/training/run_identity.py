"""Check that a run which is resumed is the run that was requested.

Whatever changes the result of a training must stay the same when it resumes. A checkpoint therefore contains the
configuration of its training and its origin: a hash of the training data, and a hash of the model that the run started
from.
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

# All options of these groups are compared, except for the options listed here: those may change when a run resumes.
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
        "data",  # its content is compared
        "finetune_from_model",
        "global_batch",
        "log_interval",
        "no_save_optimizer_state",
        "probe_interval",
        "probe_sequences",
        "seed",  # common.seed is compared
        "sequence_parallel_size",
        "tensorboard_logdir",
    },
    "criterion": {"tpu"},
    "optimizer": {"lr", "tpu"},  # optimization.lr is compared
    "lr_scheduler": {"lr", "total_num_update", "max_update"},  # they follow from optimization.max_update
}
# Of these groups, only the options listed here are compared.
COMPARED = {
    "common": ("seed",),
    "optimization": ("lr", "clip_norm", "sentence_avg"),
    "dataset": ("train_subset",),
    "checkpoint": ("best_checkpoint_metric", "maximize_best_checkpoint_metric"),
}
CLASSES = {"model": ARCH_MODEL_REGISTRY, "task": TASK_REGISTRY}  # the classes of the other groups are in REGISTRIES
NO_LIMIT = "unlimited"
# If batches are limited by sequences and by tokens, one of these two may change.
TOKEN_LIMITS = {"tokens an update", "dataset.max_tokens"}

WHOLE_FILE = 64 << 20  # bytes; larger .bin files are sampled
CHUNK = 1 << 18  # bytes per sample
CHUNKS = 64  # samples per file


def load_run_checkpoint(cfg: DictConfig) -> dict[str, Any] | None:
    """Return the checkpoint from which a training resumes the run in its save_dir, or None if it starts a new run.

    fairseq looks for the default file name in save_dir, and takes any other --restore-file as a path of its own. A file
    in another directory starts a new run, as does a missing file.

    Args:
        cfg: fairseq's checkpoint options
    Raises: InputError if the checkpoint is damaged.
    """
    path = Path(cfg.restore_file)
    if cfg.restore_file == LAST:
        path = Path(cfg.save_dir, LAST)
    if path.parent.resolve() != Path(cfg.save_dir).resolve() or not path.is_file():
        return None
    return load_checkpoint_lazily(str(path))


def check_same_run(cfg: DictConfig, state: Mapping[str, Any] | None) -> None:
    """Raise InputError if a training would resume a run with other settings, other data or another initial model.

    Nothing is checked if the training starts a new run (`state` is None) or resets the optimizer, the learning rate
    schedule or the data loader. With --reset-meters, the options of the checkpoint group may differ.

    Args:
        cfg: the whole configuration of the training
        state: the result of `load_run_checkpoint`
    """
    options = cfg.checkpoint
    if state is None or options.reset_optimizer or options.reset_lr_scheduler or options.reset_dataloader:
        return
    saved = state.get("cfg")
    origin: dict[str, Any] = plugin_state(state)
    changes = changed_settings(saved, cfg)
    if options.reset_meters:  # the old scores are discarded, so another metric does no harm
        changes = [change for change in changes if not change.startswith("checkpoint.")]
    if origin.get("content") and origin["content"] != _hash_training_data(cfg):
        changes.append("other training data")
    if "start" in origin and _has_other_start(options, origin["start"], saved):
        changes.append("another initial model (checkpoint.finetune_from_model)")
    if changes:
        raise InputError(
            f"{options.save_dir} holds another run: {'; '.join(changes)}. Restore the old settings, or choose another "
            "--save-dir (checkpoint.save_dir)"
        )


def run_origin(cfg: DictConfig, state: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the hashes that a training's checkpoints record.

    Args:
        cfg: the whole configuration of the training
        state: the checkpoint that it resumes, or None for a new run
    Returns: "content", the hash of the training data, and "start", the hash of the model that the run started from.
        A resumed run keeps the "start" of its checkpoint, because the file may have changed since, and has none if the
        checkpoint has none.
    """
    origin: dict[str, Any] = {"content": _hash_training_data(cfg)}
    start = _hash_initial_model(cfg.checkpoint) if state is None else plugin_state(state).get("start")
    if start is not None:
        origin["start"] = start
    return origin


def _hash_training_data(cfg: DictConfig) -> str:
    """Return the hash of the training data of a whole configuration."""
    return data_hash(split_paths(cfg.task.data), cfg.dataset.train_subset)


def _hash_initial_model(cfg: DictConfig) -> str | None:
    """Return the hash of the file that a new run starts from.

    It is "" for a run from scratch, and None if the path is no local file.
    """
    path = cfg.restore_file
    if cfg.restore_file == LAST:
        path = cfg.finetune_from_model
    if not path:
        return ""
    if not os.path.isfile(path):
        return None
    return file_hash(path)


def _has_other_start(cfg: DictConfig, recorded: str, saved: Any) -> bool:
    """Return True if the requested initial model is known to differ from the one that a run started from.

    Args:
        cfg: the checkpoint options of the training
        recorded: the hash of the initial model in the checkpoint, "" for a run from scratch
        saved: the configuration in the checkpoint
    Returns: False also if --finetune-from-model is a file that no longer exists.
    """
    path = cfg.finetune_from_model
    if not path or not recorded:
        # One of the two runs started from scratch or from a --restore-file, so only the presence of the option counts.
        options = {}
        if isinstance(saved, Mapping):
            options = plain_options(saved.get("checkpoint"))
        return bool(path) != bool(options.get("finetune_from_model"))
    return os.path.isfile(path) and recorded != file_hash(path)


def data_hash(directories: list[str], subset: str = "train") -> str:
    """Return a sha256 of the training data, or "" if there are no files.

    The content counts, not the path: the .idx and .bin files of the subset in each directory and its immediate
    subdirectories, and the .label files in those subdirectories, are hashed in the order of the directories and their
    sorted names. Files are read completely, except for a .bin of more than 64 MiB: there, its size and 64 evenly spaced
    chunks of 256 KiB are hashed, the first and the last bytes among them.
    """
    name = glob.escape(subset)
    patterns = (f"{name}*.idx", f"{name}*.bin", f"*/{name}*.idx", f"*/{name}*.bin", f"*/{name}*.label")
    hashes = []
    for directory in directories:
        for pattern in patterns:
            for path in sorted(Path(directory).glob(pattern)):
                if path.suffix == ".bin":
                    hashes.append(_hash_samples(path))
                else:
                    hashes.append(_hash_file(path))
    if not hashes:
        return ""
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def file_hash(path: str) -> str:
    """Return the sha256 of a file as a hexadecimal string."""
    return _hash_file(Path(path)).hex()


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _hash_samples(path: Path) -> bytes:
    """Return the sha256 of the size and the sampled chunks of a file; of all of it up to WHOLE_FILE bytes."""
    size = os.path.getsize(path)
    if size <= WHOLE_FILE:
        return _hash_file(path)
    sha256 = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(CHUNKS):
            file.seek(number * (size - CHUNK) // (CHUNKS - 1))
            sha256.update(file.read(CHUNK))
    return sha256.digest()


def changed_settings(saved: Any, cfg: DictConfig) -> list[str]:
    """List the settings that differ between a checkpoint's configuration and a training, and change its result.

    A setting that is missing on one side does not count. A setting that is None on one side, because a preset or a
    default decides it, does not count either, except for the options of an attention: these have no presets, so
    alpha=None (matched) and alpha=2.0 (fixed) differ.

    Args:
        saved: the configuration in the checkpoint
        cfg: the whole configuration of the training
    Returns: descriptions such as "common.seed = 1 in the checkpoint, now 2"; empty if `saved` is not a mapping.
    """
    if not isinstance(saved, Mapping):
        return []
    before = dict(result_settings(saved))
    now = dict(result_settings(plain_config(cfg)))
    changed = [key for key in before if key in now and before[key] != now[key]]
    if "dataset.max_tokens" in before and not TOKEN_LIMITS.issubset(changed):
        changed = [key for key in changed if key not in TOKEN_LIMITS]
    compared_if_none = {f"model.{option}" for option in _mechanism_by_option()}
    descriptions = []
    for key in changed:
        if key in compared_if_none or (before[key] is not None and now[key] is not None):
            descriptions.append(f"{key} = {before[key]} in the checkpoint, now {now[key]}")
    return descriptions


def result_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings that change the result of a training, as pairs such as ("common.seed", 1).

    Args:
        config: a whole configuration; each group is a dictionary, or a Namespace for a class without a dataclass. A
            missing group yields nothing.
    """
    for group, ignored in MAY_CHANGE.items():
        options = _declared_options(group, config.get(group))
        if group == "model":
            ignored = ignored | _options_of_other_attentions(options)
        for key, value in options.items():
            if key not in ignored:
                yield f"{group}.{key}", value
    name = plain_options(config.get("model")).get("_name")
    # The attention of these models follows from their name, and other parameters cannot tell them apart.
    if name in LANGUAGE_MODELS:
        yield "model._name", name
    elif str(name).startswith(STOCK):
        yield "model.attention", STOCK_ATTENTION
    for group, keys in COMPARED.items():
        options = plain_options(config.get(group))
        for key in keys:
            if key in options:
                yield f"{group}.{key}", options[key]
    yield from _update_size(config)


def _declared_options(group_name: str, group: Any) -> dict[str, Any]:
    """Return the options of a group that belong to it.

    The group of a class without a dataclass, such as the optimizer sgd or fairseq's own RoBERTa, is a Namespace of all
    command-line arguments, including those of other groups. Only the arguments that the class adds to a parser, and
    `_name`, are returned then.
    """
    options = plain_options(group)
    if not isinstance(group, argparse.Namespace):
        return options
    registry = CLASSES[group_name] if group_name in CLASSES else REGISTRIES[group_name]["registry"]
    cls = registry.get(str(options.get("_name")))
    parser = argparse.ArgumentParser()
    if cls is not None:
        cls.add_args(parser)
    declared = {"_name", *(action.dest for action in parser._actions)}
    return {key: value for key, value in options.items() if key in declared}


def _mechanism_by_option() -> dict[str, str]:
    """Return the name of the mechanism for each option of a registered mechanism, such as lln_diag_block_size."""
    mechanisms = {}
    for name, entry in MECHANISMS.items():
        for field in dataclasses.fields(entry.config):
            mechanisms[f"{name}_{field.name}"] = name
    return mechanisms


def _options_of_other_attentions(options: Mapping[str, Any]) -> set[str]:
    """Return the options of all mechanisms but the model's; empty without an option `attention` (language models)."""
    if "attention" not in options:
        return set()
    return {option for option, mechanism in _mechanism_by_option().items() if mechanism != options["attention"]}


def _update_size(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the maximum number of sequences and of tokens per update, as pairs like those of `result_settings`.

    Each maximum is a list with one entry per entry of update_freq (per epoch), over all batches and workers, or
    NO_LIMIT. If sequences are limited, the maximum number of tokens of a single batch follows. Nothing is yielded if
    update_freq, the number of workers or both limits are missing.
    """
    dataset = plain_options(config.get("dataset"))
    sequences = dataset.get("batch_size")
    tokens = dataset.get("max_tokens")
    frequencies = plain_options(config.get("optimization")).get("update_freq")
    workers: Any = plain_options(config.get("distributed_training")).get("distributed_world_size")
    group_size = plain_options(config.get("task")).get("sequence_parallel_size") or 1
    if not isinstance(frequencies, list) or not frequencies:
        return
    numbers = (sequences or tokens, workers, group_size, *frequencies)
    if not all(isinstance(number, int) for number in numbers):
        return
    batches = [workers // group_size * frequency for frequency in frequencies]
    # These names are columns of TensorBoard's HPARAMS tab.
    if sequences:
        yield "sequences an update", [sequences * count for count in batches]
    else:
        yield "sequences an update", NO_LIMIT
    if tokens:
        yield "tokens an update", [tokens * count for count in batches]
    else:
        yield "tokens an update", NO_LIMIT
    if sequences:
        yield "dataset.max_tokens", tokens or NO_LIMIT
