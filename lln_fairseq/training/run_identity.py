"""Whether a directory's run is the one that is asked for: what changes its result may not change when it goes on."""

import argparse
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.utils import split_paths
from omegaconf import DictConfig, OmegaConf

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.checkpoints.config import LANGUAGE_MODELS, STOCK, STOCK_ATTENTION, is_plain
from lln_fairseq.checkpoints.reading import our_state, peek
from lln_fairseq.errors import InputError
from lln_fairseq.training.fingerprints import data_hash, file_hash
from lln_fairseq.training.settings import LAST

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
SINGLE = {
    "common": ("seed",),
    "optimization": ("lr", "clip_norm", "sentence_avg"),
    "dataset": ("train_subset",),
    "checkpoint": ("best_checkpoint_metric", "maximize_best_checkpoint_metric"),
}
CLASSES = {"model": ARCH_MODEL_REGISTRY, "task": TASK_REGISTRY}  # by name; those of the other groups: REGISTRIES
NO_LIMIT = "as many as there are"
TOKENS = {"tokens an update", "dataset.max_tokens"}  # where sequences are counted too one of them may change


def check_same_run(here: DictConfig) -> None:
    """Raises InputError where a training goes on with the run in its save_dir, and its settings, its data or the model
    it starts from are others."""
    cfg = here.checkpoint
    path = own_checkpoint(cfg)
    if path is None or cfg.reset_optimizer or cfg.reset_lr_scheduler or cfg.reset_dataloader:
        return
    state = peek(str(path))
    saved, recorded = state.get("cfg"), our_state(state)
    found = differences(saved, here)
    if cfg.reset_meters:  # there are no scores that another metric would be compared with
        found = [text for text in found if not text.startswith("checkpoint.")]
    if recorded.get("content") and recorded["content"] != _data_hash(here):
        found.append("other training data")
    if "start" in recorded and _starts_elsewhere(cfg, recorded["start"], saved):
        found.append("another model to start from (checkpoint.finetune_from_model)")
    if found:
        raise InputError(
            f"{cfg.save_dir} holds another run: {'; '.join(found)}. Give what it had, or another --save-dir "
            "(checkpoint.save_dir)"
        )


def origin(here: DictConfig) -> dict[str, str]:
    """The hashes that the checkpoints of a training record: "content" of its data, "start" of the model it began from,
    "" from none. A run that goes on keeps its start: the file may have changed meanwhile, and an old run has none."""
    path = own_checkpoint(here.checkpoint)
    start = our_state(peek(str(path))).get("start") if path else _start_hash(here.checkpoint)
    return {"content": _data_hash(here)} | ({} if start is None else {"start": start})


def own_checkpoint(cfg: DictConfig) -> Path | None:
    """The file in its own save_dir that a training goes on with, if it does. fairseq takes the default's name from the
    save_dir and every other path as it is."""
    path = Path(cfg.save_dir, LAST) if cfg.restore_file == LAST else Path(cfg.restore_file)
    inside = path.parent.resolve() == Path(cfg.save_dir).resolve()
    return path if inside and path.is_file() else None


def _data_hash(here: DictConfig) -> str:
    return data_hash(split_paths(here.task.data), here.dataset.train_subset)


def _start_hash(cfg: DictConfig) -> str | None:
    """Of a run that begins; None where the file is not on this machine's disks."""
    path = cfg.finetune_from_model if cfg.restore_file == LAST else cfg.restore_file
    return "" if not path else file_hash(path) if os.path.isfile(path) else None


def _starts_elsewhere(cfg: DictConfig, recorded: str, saved: Any) -> bool:
    """A file that is gone by now says nothing."""
    path = cfg.finetune_from_model
    if not path or not recorded:  # a run from scratch, or by --restore-file, names none
        before = as_dict(saved.get("checkpoint")) if isinstance(saved, Mapping) else {}
        return bool(path) != bool(before.get("finetune_from_model"))
    return os.path.isfile(path) and recorded != file_hash(path)


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
    if "dataset.max_tokens" in before and not set(unlike) >= TOKENS:
        unlike = [key for key in unlike if key not in TOKENS]
    owned = {f"model.{key}" for key in _attention_of()}
    told = [key for key in unlike if None not in (before[key], now[key]) or key in owned]
    return [f"{key} = {before[key]}, here it is {now[key]}" for key in told]


def result_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """("common.seed", 1), ... : of a configuration as plain dictionaries, what changes the result of its training."""
    for group in WHOLE:
        options = _own_options(group, config.get(group))
        ignored = MAY_CHANGE[group] | (_of_other_attentions(options) if group == "model" else set())
        yield from ((f"{group}.{key}", value) for key, value in options.items() if key not in ignored)
    model = as_dict(config.get("model"))
    name = model.get("_name")  # where it alone says which attention it is, and the parameters fit another as well:
    if name in LANGUAGE_MODELS:
        yield "model._name", name
    elif str(name).startswith(STOCK):  # whatever its options say
        yield "model.attention", STOCK_ATTENTION
    for group, keys in SINGLE.items():
        options = as_dict(config.get(group))
        yield from ((f"{group}.{key}", options[key]) for key in keys if key in options)
    yield from _size_of_an_update(config)


def _own_options(name: str, group: Any) -> dict[str, Any]:
    """Return the options of a group that its class declares.

    The group of a class without a dataclass, such as the optimizer sgd or fairseq's own RoBERTa, is a Namespace of all
    arguments of the command line, those of other groups included.
    """
    options = as_dict(group)
    if not isinstance(group, argparse.Namespace):
        return options
    registry = CLASSES[name] if name in CLASSES else REGISTRIES[name]["registry"]
    chosen = registry.get(str(options.get("_name")))
    parser = argparse.ArgumentParser()
    if chosen is not None:
        chosen.add_args(parser)
    declared = {"_name", *(action.dest for action in parser._actions)}
    return {key: value for key, value in options.items() if key in declared}


def as_dict(group: Any) -> dict[str, Any]:
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


def _size_of_an_update(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The most sequences and tokens of an update by epoch, over all its batches and workers, and the most tokens of a
    batch where sequences are counted too. Nothing where they are not known."""
    dataset, optimization, distributed = (
        as_dict(config.get(group)) for group in ("dataset", "optimization", "distributed_training")
    )
    size, tokens = dataset.get("batch_size"), dataset.get("max_tokens")
    frequencies, workers = optimization.get("update_freq"), distributed.get("distributed_world_size")
    if not (frequencies and isinstance(frequencies, list)):
        return
    if not all(isinstance(number, int) for number in (size or tokens, workers, *frequencies)):
        return
    shared = as_dict(config.get("task")).get("sequence_parallel_size") or 1
    if not isinstance(shared, int):
        return
    batches = [workers // shared * frequency for frequency in frequencies]
    yield "sequences an update", [size * number for number in batches] if size else NO_LIMIT
    yield "tokens an update", [tokens * number for number in batches] if tokens else NO_LIMIT
    if size:
        yield "dataset.max_tokens", tokens or NO_LIMIT
