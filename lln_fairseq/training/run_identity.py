"""Check that a resumed run has the settings, the data and the initial model of its checkpoint.

A checkpoint contains the configuration of its run and its origin: a hash of the training data, and a hash of the model
that the run started from.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.utils import split_paths
from omegaconf import DictConfig

from lln_fairseq.checkpoints.config import (
    STOCK,
    STOCK_ATTENTION,
    plain_config,
    plain_options,
    softmax_layers,
)
from lln_fairseq.checkpoints.reading import plugin_state
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.errors import UserError
from lln_fairseq.files import data_hash, sha256_of
from lln_fairseq.models.options import mechanism_by_option
from lln_fairseq.training.options import both_names

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
        "autocast",
        "data",  # its content is compared
        "finetune_from_model",
        "global_batch",
        "log_interval",
        "no_save_optimizer_state",
        "probe_interval",
        "probe_sequences",
        "seed",  # common.seed is compared
        "tensorboard_logdir",
    },
    "criterion": {"tpu"},
    "optimizer": {"lr", "tpu"},  # optimization.lr is compared
    "lr_scheduler": {"lr", "total_num_update", "max_update"},  # computed from optimization.max_update
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
UPDATE_SIZES = ("sequences an update", "tokens an update")  # also columns of TensorBoard's HPARAMS tab
# If batches are limited by sequences and by tokens, one of these two settings may change.
TOKEN_LIMITS = {"tokens an update", "dataset.max_tokens"}


def check_same_run(
    cfg: DictConfig, state: Mapping[str, Any], current: Mapping[str, str], labels: Sequence[str]
) -> None:
    """Raise UserError if a run would be resumed with other settings, data or labels, or another initial model.

    Nothing is checked if the optimizer, the learning rate schedule or the data loader is reset. A hash that the
    checkpoint lacks is not checked. With --reset-meters, the metric and the validation data that choose the best
    checkpoint may differ, and with --disable-validation the latter.
    `current` is the result of `run_origin`, and `labels` are the names of the task's classes in the order of their
    numbers.
    """
    options = cfg.checkpoint
    if options.reset_optimizer or options.reset_lr_scheduler or options.reset_dataloader:
        return
    saved: Mapping[str, Any] = state["cfg"] if isinstance(state.get("cfg"), Mapping) else {}
    changes = []
    before = result_settings(saved)
    now = result_settings(plain_config(cfg))
    for setting in changed_settings(before, now):
        if options.reset_meters and setting.startswith("checkpoint."):  # the old scores are discarded
            continue
        name = setting if setting in UPDATE_SIZES else both_names(setting)
        changes.append(f"{name} = {before[setting]} in the checkpoint, now {now[setting]}")
    origin: dict[str, Any] = plugin_state(state)
    if _differs("content", origin, current):
        changes.append("other training data")
    chooses_best = not (options.reset_meters or cfg.dataset.disable_validation)
    if chooses_best and _differs("validation", origin, current):
        reset = both_names("checkpoint.reset_meters")
        changes.append(f"other validation data: {reset} forgets the scores on the old ones")
    saved_labels = origin.get("labels")
    if saved_labels and saved_labels != labels:  # the binarized data have only the numbers of the classes
        changes.append(f"the labels {saved_labels} in the checkpoint, now {labels}")
    if "start" in origin and _has_other_start(options, origin["start"], saved):
        changes.append(f"another initial model, {both_names('checkpoint.finetune_from_model')}")
    if changes:
        raise UserError(
            f"{options.save_dir} holds another run: {'; '.join(changes)}. Restore the old settings, or choose another "
            "--save-dir (checkpoint.save_dir)"
        )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ between two results of `result_settings`.

    A setting that one of them lacks is not a difference, nor is the number 16 from the text "16": Hydra reads
    model.lln_diag_global_tokens=16 as a number, and fairseq-train as text. If the batches of `before` are limited by
    sequences, "tokens an update" and "dataset.max_tokens" are named only if both differ.
    """
    changed = []
    for name, value in before.items():
        if name in now and value != now[name] and str(value) != str(now[name]):
            changed.append(name)
    if "dataset.max_tokens" in before and not TOKEN_LIMITS.issubset(changed):
        changed = [name for name in changed if name not in TOKEN_LIMITS]
    return changed


def _differs(name: str, recorded: Mapping[str, Any], current: Mapping[str, str]) -> bool:
    """Return True if a hash is recorded in the checkpoint and differs from that of the current data."""
    return bool(recorded.get(name)) and recorded[name] != current.get(name)


def run_origin(cfg: DictConfig, state: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the hashes that a run records in its checkpoints. `state` is the one that it resumes, None for a new run.

    "content" is the hash of the training data as it is now, and "validation" that of the first validation split, which
    chooses the best checkpoint; they are "" if there are no files. "start" is the hash of the model that the run
    started from, "" for a run from scratch, and absent if it is unknown. A resumed run copies "start" from its
    checkpoint, because the file of the model can have changed since.
    """
    directories = split_paths(cfg.task.data)
    first = cfg.dataset.valid_subset.split(",")[0]
    origin: dict[str, Any] = {
        "content": data_hash(directories, cfg.dataset.train_subset),
        "validation": data_hash(directories, first, exact=not cfg.dataset.combine_valid_subsets),
    }
    start = _hash_initial_model(cfg.checkpoint) if state is None else plugin_state(state).get("start")
    if start is not None:
        origin["start"] = start
    return origin


def _hash_initial_model(cfg: DictConfig) -> str | None:
    """Return the hash of --restore-file, or of --finetune-from-model if --restore-file is the default.

    The result is "" if neither is given, and None if the file is not an existing local file.
    """
    path = cfg.restore_file
    if cfg.restore_file == LAST:
        path = cfg.finetune_from_model
    if not path:
        return ""
    if not os.path.isfile(path):
        return None
    return sha256_of(Path(path))


def _has_other_start(cfg: DictConfig, recorded: str, saved: Mapping[str, Any]) -> bool:
    """Return True if the requested initial model is known to differ from the one that a run started from.

    `recorded` is the hash of that model, or "" for a run from scratch. `saved` is the configuration in the checkpoint.
    A file that no longer exists cannot be compared.
    """
    path = cfg.finetune_from_model
    if not path or not recorded:
        # One of the two runs started from scratch or from a --restore-file, so only the presence of the option counts.
        return bool(path) != bool(plain_options(saved.get("checkpoint")).get("finetune_from_model"))
    return os.path.isfile(path) and recorded != sha256_of(Path(path))


def result_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that change the result of a run by their names, such as "common.seed".

    The settings are, in this order:

    - the options of each group in MAY_CHANGE, without the options listed there and without the options of mechanisms
      that the model does not use
    - "model.attention" of fairseq's own RoBERTa, which has no such option
    - the options in COMPARED
    - the size of an update, see `_update_size`

    An option that is None is left out, because a preset decides its value. There are no presets for the options of an
    attention and softmax_layers: alpha=None (matched) and alpha=2.0 (fixed) differ. Each group of the configuration is
    a dictionary, or a Namespace if its class has no dataclass. It can be missing.
    """
    settings = {}
    mechanisms = mechanism_by_option()
    for group, may_change in MAY_CHANGE.items():
        options = _declared_options(group, config.get(group))
        attention = options.get("attention")
        if attention is not None:
            options["softmax_layers"] = softmax_layers(options)
        for key, value in options.items():
            if key in may_change or mechanisms.get(key, attention) != attention:
                continue
            if value is not None or key in (*mechanisms, "softmax_layers"):
                settings[f"{group}.{key}"] = value
    name = plain_options(config.get("model")).get("_name")
    if str(name).startswith(STOCK):
        settings["model.attention"] = STOCK_ATTENTION
    for group, keys in COMPARED.items():
        options = plain_options(config.get(group))
        for key in keys:
            if options.get(key) is not None:
                settings[f"{group}.{key}"] = options[key]
    return settings | _update_size(config)


def _declared_options(group_name: str, group: Any) -> dict[str, Any]:
    """Return the options that belong to a group of the configuration.

    The optimizer sgd, fairseq's own RoBERTa and other classes without a dataclass have a Namespace for a group. It
    contains all command-line arguments, including those of other groups. Of a Namespace, the result has only `_name`
    and the arguments that the class itself adds to a parser. For anything but a Namespace or a mapping it is empty.
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


def _update_size(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the maximum number of sequences and the maximum number of tokens in an update.

    The maximum for an update is the limit of a batch, times update_freq, times the number of workers. update_freq has
    one entry per epoch, so each maximum is a list with one number for each entry.

    A maximum is NO_LIMIT if a batch has no such limit. If batches are limited by sequences, the result also has
    dataset.max_tokens. It is empty if batches have neither limit, or if a number is missing or not an integer.
    """
    dataset = plain_options(config.get("dataset"))
    sequences = dataset.get("batch_size")
    tokens = dataset.get("max_tokens")
    frequencies = plain_options(config.get("optimization")).get("update_freq")
    workers: Any = plain_options(config.get("distributed_training")).get("distributed_world_size")
    if not isinstance(frequencies, list) or not frequencies:
        return {}
    numbers = (sequences or tokens, workers, *frequencies)
    if not all(isinstance(number, int) for number in numbers):
        return {}
    batches = [workers * frequency for frequency in frequencies]
    size: dict[str, Any] = dict.fromkeys(UPDATE_SIZES, NO_LIMIT)
    if tokens:
        size["tokens an update"] = [tokens * count for count in batches]
    if sequences:
        size["sequences an update"] = [sequences * count for count in batches]
        size["dataset.max_tokens"] = tokens or NO_LIMIT
    return size
