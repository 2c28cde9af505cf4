"""Check a run's settings: each function raises a UserError for what is wrong or what the machine does not support."""

import copy
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.file_io import PathManager
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.attention.registry import did_you_mean
from lln_fairseq.checkpoints.config import OURS, STOCK_ATTENTION
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.errors import UserError
from lln_fairseq.files import no_such_checkpoint
from lln_fairseq.models.lln_roberta import complete_config
from lln_fairseq.models.options import (
    attention_fields,
    format_softmax_layers,
    mechanism_by_option,
    parse_softmax_layers,
)
from lln_fairseq.training.options import both_names

HYDRA_LOGGING = "job_logging_cfg"  # fairseq copies Hydra's settings there
SEEDS = (0, 2**31 - 1)  # numpy allows twice as much, and fairseq adds numbers of epochs and updates
# The lowest and the highest value of options. With other values, fairseq would not train at all, train something else
# without a message, or fail after hours.
RANGES = {
    "common.log_interval": (1, math.inf),
    "common.seed": SEEDS,
    "dataset.batch_size": (1, math.inf),
    "dataset.validate_interval": (1, math.inf),
    "optimization.clip_norm": (0, math.inf),
    "optimization.lr": (0, math.inf),
    "optimization.max_epoch": (0, math.inf),
    "optimization.max_update": (0, math.inf),
    "checkpoint.save_interval": (1, math.inf),
    "checkpoint.save_interval_updates": (0, math.inf),
    "model.encoder_layerdrop": (0, 1),
    "task.global_batch": (1, math.inf),
}
DEFAULT_CRITERION = "cross_entropy"  # fairseq's
# Metrics that select the best checkpoint, of fairseq's criterions and of this package's.
LOWER_IS_BETTER = ("loss", "nll_loss", "ppl")
HIGHER_IS_BETTER = (
    "accuracy",
    "f1",
    "mcc",
    "pearson",
    "spearman",
    "pearson_spearman",
    "acc_and_f1",
    "pearson_and_spearman",
)
# The metrics that the criterion lln_sentence_prediction logs in validation. It logs f1 only if there are two classes.
CLASSIFICATION_METRICS = ["loss", "accuracy", "mcc", "f1"]
REGRESSION_METRICS = ["loss", "pearson", "spearman", "pearson_spearman"]
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")  # fairseq recognizes torchrun by these variables
SRUN_TASKS = "SLURM_STEP_NUM_TASKS"  # srun sets it; a batch script that runs a program without srun does not have it


def check_known_options(cfg: Any) -> None:
    """Raise UserError for a group or an option that fairseq does not have, such as +common.sede=3.

    Hydra accepts any name after a +. The options of models, tasks and other groups that have a `_name` are not checked:
    fairseq rejects unknown ones, unless their class has no dataclass.
    """
    groups = FairseqConfig.__dataclass_fields__
    for group in cfg:
        if group == HYDRA_LOGGING or OmegaConf.is_missing(cfg, group):
            continue
        if group not in groups:
            raise UserError(f"unknown group of options '{group}'{did_you_mean(group, groups)}")
        options = cfg[group]
        if not isinstance(options, Mapping):
            continue
        if dataclasses.is_dataclass(groups[group].default):
            known = groups[group].default.__dataclass_fields__
        elif options.get("_name") is None:
            known = ["_name"]
        else:
            continue
        for option in options:
            if option not in known:
                raise UserError(f"unknown option '{group}.{option}'{did_you_mean(option, known)}")


def check_ranges(cfg: Any) -> None:
    """Raise UserError if a number is outside its range in RANGES. None and missing options are not checked."""
    for option, (lowest, highest) in RANGES.items():
        group, key = option.split(".")
        options = cfg.get(group)
        if OmegaConf.is_config(options) and OmegaConf.is_missing(options, key):
            continue
        value = getattr(options, key, None)
        for number in value if isinstance(value, Sequence) else [value]:
            if number is None or lowest <= number <= highest:
                continue
            if highest == math.inf:
                raise UserError(f"{both_names(option)} must be at least {lowest}, got {number}")
            raise UserError(f"{both_names(option)} must be in [{lowest}, {highest}], got {number}")


def number_softmax_layers(cfg: Any) -> None:
    """Set model.softmax_layers in place to the numbers of its layers: "every:4" becomes "3,7,11".

    So checkpoints have numbers, and runs are compared by them.
    """
    name = getattr(cfg.model, "_name", None)
    if ARCH_MODEL_NAME_REGISTRY.get(name) != OURS or not cfg.model.softmax_layers:
        return
    sizes = copy.deepcopy(cfg.model)
    ARCH_CONFIG_REGISTRY[name](sizes)  # fairseq does this later, when it builds the model
    try:
        numbers = parse_softmax_layers(cfg.model.softmax_layers, complete_config(sizes).encoder_layers)
    except UserError as error:
        layout = HydraConfig.initialized() and HydraConfig.get().runtime.choices.get("layout")
        if not layout or "model.softmax_layers" in _overridden_options():
            raise
        raise UserError(f"layout={layout} needs a model with more layers: {error}") from None
    cfg.model.softmax_layers = format_softmax_layers(numbers)


def _overridden_options() -> list[str]:
    """Return the options and groups that Hydra's command line sets, such as "attention" and "model.dropout"."""
    overrides = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
    return [override.key_or_group for override in overrides]


def check_criterion(cfg: Any) -> None:
    """Raise UserError if the masked language model would be trained with fairseq's default criterion."""
    is_masked_lm = getattr(cfg.get("task"), "_name", None) == "lln_masked_lm"
    if is_masked_lm and getattr(cfg.get("criterion"), "_name", None) == DEFAULT_CRITERION:
        raise UserError(
            f"{DEFAULT_CRITERION}, fairseq's default criterion, would also average over tokens that are not masked: "
            "add --criterion masked_lm (criterion._name)"
        )


def complete_schedule(cfg: Any) -> None:
    """Give the scheduler polynomial_decay a last update, in place, if `plan_schedule` will replace it.

    fairseq asserts that there is one.
    """
    scheduler = cfg.get("lr_scheduler")
    is_planned = getattr(cfg.task, "warmup_fraction", None) is not None
    if is_planned and getattr(scheduler, "_name", None) == "polynomial_decay" and scheduler.total_num_update <= 0:
        scheduler.total_num_update = 1


def check_best_metric(cfg: Any) -> None:
    """Raise UserError if best_checkpoint_metric does not exist, or `maximize` has the wrong value for it.

    Whether it exists is checked only for the criterion lln_sentence_prediction. With other criterions, a metric that is
    in neither LOWER_IS_BETTER nor HIGHER_IS_BETTER is accepted. Without validation, nothing is checked.
    """
    metric = cfg.checkpoint.best_checkpoint_metric
    maximize = cfg.checkpoint.maximize_best_checkpoint_metric
    if cfg.dataset.disable_validation:
        return
    if getattr(cfg.criterion, "_name", None) == "lln_sentence_prediction":
        if cfg.criterion.regression_target:
            names = REGRESSION_METRICS
            kind = "a regression"
        else:
            names = CLASSIFICATION_METRICS.copy()
            kind = f"{cfg.task.num_classes} classes"
            if cfg.task.num_classes != 2:
                names.remove("f1")
        if metric not in names:
            raise UserError(
                f"--best-checkpoint-metric (checkpoint.best_checkpoint_metric) must be one of {', '.join(names)} for "
                f"{kind}, got {metric}"
            )
    option = "--maximize-best-checkpoint-metric (checkpoint.maximize_best_checkpoint_metric)"
    if metric in LOWER_IS_BETTER and maximize:
        raise UserError(f"{option} must be false for {metric} (checkpoint.best_checkpoint_metric), got true")
    if metric in HIGHER_IS_BETTER and not maximize:
        raise UserError(f"{option} must be true for {metric} (checkpoint.best_checkpoint_metric), got false")


def check_patience(cfg: Any) -> None:
    """Raise UserError if patience is set and some validations are not followed by a save.

    The best model could be at such a validation and be lost. Intervals are checked both in updates and in epochs.
    """
    if cfg.checkpoint.patience <= 0 or cfg.dataset.disable_validation:
        return
    for unit in ("_updates", ""):
        validate_interval = cfg.dataset[f"validate_interval{unit}"]
        save_interval = cfg.checkpoint[f"save_interval{unit}"]
        if validate_interval <= 0:
            continue
        if save_interval == 0 or validate_interval % save_interval:
            raise UserError(
                "--patience (checkpoint.patience) needs a checkpoint of every validation: set "
                f"checkpoint.save_interval{unit} to {validate_interval}, as dataset.validate_interval{unit}, got "
                f"{save_interval}"
            )


def check_attention(cfg: Any) -> None:
    """Raise UserError if the configuration selects an attention for a model of fairseq, which would ignore it.

    Softmax, which fairseq's models use, and unknown names of attentions and models are accepted.
    """
    name = getattr(cfg.model, "_name", None)
    attention = getattr(cfg.model, "attention", STOCK_ATTENTION)
    model_class = MODEL_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name))
    is_stock = getattr(model_class, "__module__", "").startswith("fairseq.")
    if not is_stock or attention not in MECHANISMS or attention == STOCK_ATTENTION:
        return
    alternative = f"lln_{name}"
    if alternative not in ARCH_MODEL_NAME_REGISTRY:
        alternative = "lln_roberta_base"
    raise UserError(
        f"model._name={name} is fairseq's own model and supports only attention {STOCK_ATTENTION}, got {attention}: "
        f"use model._name={alternative}, whose attention is set by --attention (model.attention)"
    )


def check_options_of_other_mechanisms(cfg: Any) -> None:
    """Raise UserError if the command line sets an option of a mechanism that the model does not use.

    With Hydra, these are overrides. Its files in configs/ may have such options, because they list all options of a
    default. fairseq-train does not record which options were given, so one that is given its default is not found.
    """
    model = cfg.model
    mechanisms = mechanism_by_option()
    if HydraConfig.initialized():
        given = [option.removeprefix("model.") for option in _overridden_options()]
    else:
        defaults = {name: field.default for name, _, field in attention_fields()}
        given = [name for name in mechanisms if str(getattr(model, name, defaults[name])) != str(defaults[name])]
    attention = str(getattr(model, "attention", STOCK_ATTENTION))
    for option in given:
        mechanism = mechanisms.get(option, attention)
        if mechanism != attention:
            raise UserError(
                f"--{option.replace('_', '-')} (model.{option}) is an option of {mechanism}, but this run trains "
                f"{attention}: leave it out, or set --attention {mechanism} (model.attention)"
            )


def check_workers(cfg: Any) -> None:
    """Raise UserError for workers of torchrun or srun that would each train on their own.

    With a world size of 1, fairseq does not read the variables of torchrun and Slurm.
    """
    distributed = cfg.distributed_training
    if distributed.distributed_init_method or distributed.distributed_world_size > 1:
        return
    launcher = "srun"
    started = os.environ.get(SRUN_TASKS, "1")
    if all(name in os.environ for name in TORCHRUN):
        launcher = "torchrun"
        started = os.environ["WORLD_SIZE"]
    if int(started) > 1:
        raise UserError(
            f"{launcher} started {started} workers, but each would train independently: set --distributed-world-size "
            f"(distributed_training.distributed_world_size) to {started}"
        )


def check_restore_file(cfg: Any) -> None:
    """Raise UserError for a --finetune-from-model or --restore-file that is missing or would not do what is expected.

    fairseq trains from scratch if the --restore-file is missing. If it is in another directory than save_dir, fairseq
    loads it again whenever the run is restarted, and overwrites its progress: this is rejected once save_dir has a last
    checkpoint. A run that can resume from save_dir no longer needs its --finetune-from-model. If save_dir has lost only
    its last checkpoint, fairseq starts from scratch and overwrites the others, which is rejected.
    """
    restore_file = cfg.checkpoint.restore_file
    save_dir = cfg.checkpoint.save_dir
    pretrained = cfg.checkpoint.finetune_from_model
    last = os.path.join(save_dir, LAST)
    if pretrained and not os.path.isfile(last) and not PathManager.isfile(pretrained):
        raise UserError(f"--finetune-from-model (checkpoint.finetune_from_model): {no_such_checkpoint(pretrained)}")
    if restore_file == LAST:
        others = list(Path(save_dir).glob("checkpoint*.pt"))
        if others and not os.path.isfile(last) and not cfg.checkpoint.no_save:
            newest = max(others, key=os.path.getmtime)
            raise UserError(
                f"{save_dir} has checkpoints but no {LAST}, and a new run would overwrite them: copy {newest.name} to "
                f"{LAST} to resume from it, or use another --save-dir (checkpoint.save_dir)"
            )
        return
    if not PathManager.isfile(restore_file):
        raise UserError(
            f"--restore-file (checkpoint.restore_file) {restore_file}: no such file; to resume a run, give only its "
            "--save-dir (checkpoint.save_dir)"
        )
    in_other_directory = os.path.dirname(os.path.abspath(restore_file)) != os.path.abspath(save_dir)
    if in_other_directory and os.path.isfile(last):
        raise UserError(
            f"{last} exists, and a run from --restore-file {restore_file} would overwrite it: use "
            "--finetune-from-model (checkpoint.finetune_from_model) instead, which resumes from it, or another "
            "--save-dir (checkpoint.save_dir)"
        )


def check_precision(cfg: Any) -> None:
    """Raise UserError for settings of half precision that exclude each other, that fairseq ignores, or that need a GPU.

    fairseq ignores memory_efficient_fp16 without fp16, and memory_efficient_bf16 without bf16. Without a GPU or with
    --cpu, bf16 works, and so does fp16 with memory_efficient_fp16 or fp16_no_flatten_grads; amp and plain fp16 do not.
    What a GPU itself supports is not checked.
    """
    common = cfg.common
    kinds = [kind for kind in ("fp16", "bf16", "amp") if common[kind]]
    if kinds and getattr(cfg.task, "autocast", False):
        raise UserError(f"task.autocast cannot be combined with {kinds[0]}: set common.{kinds[0]}=false")
    if common.fp16 and common.bf16:
        raise UserError("fp16 and bf16 cannot be combined: set only one of them (common.fp16=false)")
    for kind in ("fp16", "bf16"):
        if common[f"memory_efficient_{kind}"] and not common[kind]:
            raise UserError(f"memory_efficient_{kind} without {kind} trains in float32: set common.{kind}=true too")
    if not common.cpu and torch.cuda.is_available():
        return
    # With flat gradients, fairseq allocates the float32 parameters of fp16 on the current GPU.
    is_flat_fp16 = common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
    if not (common.amp or is_flat_fp16):
        return
    kind = "amp" if common.amp else "fp16"
    if common.cpu:
        raise UserError(
            f"{kind} needs a GPU, but --cpu (common.cpu, run=cpu) is set: leave {kind} out (common.{kind}=false)"
        )
    raise UserError(f"{kind} needs a GPU, but there is none: choose run=cpu (fairseq-train: --cpu, and no --{kind})")


def split_global_batch(cfg: Any) -> None:
    """Set dataset.batch_size and optimization.update_freq in place, so that an update has task.global_batch sequences.

    Nothing changes if global_batch is not set. dataset.batch_size is the number of sequences that fit on a device: it
    is lowered if a device's share of the global batch is smaller. If update_freq is [1] and the global batch is
    divisible by the number of workers, update_freq is computed; any other update_freq is kept and checked.
    """
    global_batch = getattr(cfg.task, "global_batch", None)
    if not global_batch:
        return
    batch_size = cfg.dataset.batch_size
    update_freq = list(cfg.optimization.update_freq)
    workers = cfg.distributed_training.distributed_world_size
    if batch_size is not None and update_freq == [1] and global_batch % workers == 0:
        share = global_batch // workers
        batch_size = min(batch_size, share)
        update_freq = [max(share // batch_size, 1)]
    for frequency in update_freq:
        product = "unknown"
        if batch_size is not None:
            product = batch_size * frequency * workers
        if product != global_batch:
            raise UserError(
                f"task.global_batch is {global_batch} sequences per update, but dataset.batch_size {batch_size} x "
                f"optimization.update_freq {frequency} x {workers} workers is {product}: change one of them, or the "
                "recipe"
            )
    cfg.dataset.batch_size = batch_size
    cfg.optimization.update_freq = update_freq
