"""Settings that contradict each other or the machine, found before the first update."""

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.checkpoints.config import STOCK_ATTENTION
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.errors import InputError

logger = logging.getLogger(__name__)

PROBABILITY = (0, 1)
SEEDS = (0, 2**32 - 1)  # of numpy
RANGES = {  # of what fairseq takes as it is: it would train nothing, or end in a traceback hours later
    "common.log_interval": (1, math.inf),
    "common.seed": SEEDS,
    "dataset.batch_size": (1, math.inf),
    "dataset.max_tokens": (1, math.inf),
    "dataset.num_workers": (0, math.inf),
    "dataset.validate_interval": (1, math.inf),
    "optimization.clip_norm": (0, math.inf),
    "optimization.lr": (0, math.inf),
    "optimization.max_epoch": (0, math.inf),
    "optimization.max_update": (0, math.inf),
    "optimization.update_freq": (1, math.inf),
    "checkpoint.save_interval": (1, math.inf),
    "checkpoint.save_interval_updates": (0, math.inf),
    "model.dropout": PROBABILITY,
    "model.attention_dropout": PROBABILITY,
    "model.activation_dropout": PROBABILITY,
    "model.pooler_dropout": PROBABILITY,
    "model.encoder_layerdrop": PROBABILITY,
    "model.quant_noise_pq_block_size": (1, math.inf),
    "task.leave_unmasked_prob": PROBABILITY,
    "task.random_token_prob": PROBABILITY,
}

NOT_TRAINABLE = {  # options with which fairseq ends in a traceback, or saves checkpoints that cannot be loaded
    "model.spectral_norm_classification_head": "its checkpoints cannot be loaded. Leave it out",
    "model.encoder_layers_to_keep": "its checkpoints would state all layers. Set model.encoder_layers instead",
    "model.decoder_layers_to_keep": "its checkpoints would state all layers. Set model.decoder_layers instead",
}
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")  # by these fairseq sees that torchrun started it


def check_command(cfg: Any) -> None:
    """Raises: InputError for the first contradiction that a fairseq configuration of any program shows by itself."""
    for part in (check_ranges, check_sequence_parallel, check_devices):
        part(cfg)
    if cfg.model is not None:  # fairseq-validate and others do not train
        check_precision(cfg)
        check_trainable(cfg)


def check(cfg: Any) -> None:
    """Raises: InputError for the first contradiction between a training's configuration and its files."""
    for part in (check_attention, check_restore_file, check_probe):
        part(cfg)


def check_ranges(cfg: Any) -> None:
    """Numbers that cannot be meant, 0 for no limit aside."""
    for option, (lowest, highest) in RANGES.items():
        group, key = option.split(".")
        given = getattr(cfg.get(group), key, None)
        for number in given if isinstance(given, Sequence) else [given]:
            if number is not None and not lowest <= number <= highest:
                limit = f"at least {lowest}" if highest == math.inf else f"in [{lowest}, {highest}]"
                raise InputError(f"{option} is {number}, and must be {limit}")


def check_trainable(cfg: Any) -> None:
    """Raise InputError for an option of fairseq's that cannot be used in a training."""
    for option, reason in NOT_TRAINABLE.items():
        group, key = option.split(".")
        if getattr(cfg.get(group), key, None):
            raise InputError(f"{option} does not work in a training: {reason}")
    mask_prob = getattr(cfg.task, "mask_prob", None)
    if mask_prob is not None and not 0 < mask_prob < 1:
        raise InputError(f"task.mask_prob is {mask_prob}, and must be more than 0 and less than 1")


def check_attention(cfg: Any) -> None:
    """A recipe gives its attention to every model, and fairseq's own do not look at it."""
    name, attention = getattr(cfg.model, "_name", None), getattr(cfg.model, "attention", STOCK_ATTENTION)
    own = getattr(MODEL_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name)), "__module__", "")
    if own.startswith("fairseq.") and attention in MECHANISMS and attention != STOCK_ATTENTION:
        ours = f"lln_{name}" if f"lln_{name}" in ARCH_MODEL_NAME_REGISTRY else "lln_roberta_base"
        raise InputError(
            f"model._name={name} is fairseq's own and has {STOCK_ATTENTION}, not {attention}: {ours} has --attention "
            "(model.attention)"
        )


def check_devices(cfg: Any) -> None:
    """Refuses more workers than devices, and workers of torchrun that would each train alone.

    Workers that slurm or somebody by hand starts are not ours to count.
    """
    distributed, devices = cfg.distributed_training, torch.cuda.device_count()
    if distributed.distributed_init_method or "SLURM_JOB_ID" in os.environ:
        return
    workers = here = distributed.distributed_world_size
    option = "--distributed-world-size (distributed_training.distributed_world_size)"
    limit = f"set {option} to at most {max(devices, 1)}"
    if all(name in os.environ for name in TORCHRUN):
        started = int(os.environ["WORLD_SIZE"])
        if started > workers == 1:
            raise InputError(
                f"torchrun started {started} workers, and each would train alone: set {option} to {started}"
            )
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        limit = f"set torchrun's --nproc-per-node to at most {devices}" if devices else "start one without torchrun"
    if workers > 1 and here > devices:
        raise InputError(f"{here} workers here, but this machine has {devices} GPUs: {limit}")


def check_sequence_parallel(cfg: Any) -> None:
    """Workers that share sequences come in whole groups."""
    size = getattr(cfg.get("task"), "sequence_parallel_size", 1)
    workers = cfg.distributed_training.distributed_world_size
    if size < 1 or workers % size:
        raise InputError(
            f"--sequence-parallel-size (task.sequence_parallel_size) is {size}, and must be a divisor of the number of "
            f"workers, {workers} (--distributed-world-size)"
        )


def check_restore_file(cfg: Any) -> None:
    """fairseq trains from scratch if the file is missing, and again from it after every interruption."""
    restore, save_dir = cfg.checkpoint.restore_file, cfg.checkpoint.save_dir
    last, pretrained = os.path.join(save_dir, LAST), cfg.checkpoint.finetune_from_model
    if pretrained and not os.path.isfile(last) and not PathManager.isfile(pretrained):
        raise InputError(f"--finetune-from-model {pretrained}: no such checkpoint")
    if restore == LAST:
        return
    if not PathManager.isfile(restore):
        raise InputError(f"--restore-file {restore}: no such file; to continue a run give its --save-dir alone")
    elsewhere = os.path.dirname(os.path.abspath(restore)) != os.path.abspath(save_dir)
    if elsewhere and os.path.isfile(last):
        raise InputError(
            f"{last} exists, and --restore-file {restore} would start again and replace it: give "
            "--finetune-from-model instead, which continues from it, or another --save-dir"
        )


def check_precision(cfg: Any) -> None:
    """Half precision of two kinds, that fairseq would ignore, or that the device cannot do."""
    common = cfg.common
    if len(kinds := [kind for kind in ("fp16", "bf16", "amp") if common[kind]]) > 1:
        raise InputError(f"{' and '.join(kinds)} exclude each other: set one of them alone (common.{kinds[0]}=false)")
    for kind in ("fp16", "bf16"):
        if common[f"memory_efficient_{kind}"] and not common[kind]:
            raise InputError(f"memory_efficient_{kind} without {kind} trains in float32: set common.{kind}=true too")
    on_cpu = common.cpu or not torch.cuda.is_available()
    flat = not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
    wanted = "amp" if common.amp else "fp16" if common.fp16 and flat else ""
    if wanted and on_cpu:
        raise InputError(
            f"{wanted} needs a GPU, and there is none or --cpu is set: leave {wanted} out (common.{wanted}=false, or "
            "run=cpu for fp16)"
        )


def check_probe(cfg: Any) -> None:
    """A probe with nowhere to write, or of a model of which no worker has all parameters."""
    if not getattr(cfg.task, "probe_interval", 0):
        return
    if cfg.task.probe_interval < 0 or cfg.task.probe_sequences < 1:
        raise InputError("task.probe_interval must be 0 (never) or more, and task.probe_sequences at least 1")
    if not cfg.common.tensorboard_logdir:
        raise InputError("--probe-interval writes to TensorBoard: give --tensorboard-logdir DIRECTORY too")
    if cfg.distributed_training.ddp_backend == "fully_sharded":
        raise InputError("--probe-interval does not work with --ddp-backend fully_sharded, which splits the parameters")


def split_global_batch(cfg: Any) -> None:
    """Sets dataset.batch_size and optimization.update_freq such that one update sees task.global_batch sequences.

    batch_size is then the number of sequences that fit on a device: it is kept, or lowered where the share of a device
    is smaller, and update_freq follows. An update_freq that is given, other than 1, must give that product as it is.

    Raises: InputError where the global batch cannot be split in this way.
    """
    wanted = getattr(cfg.task, "global_batch", None)
    if not wanted:
        return
    size = cfg.dataset.batch_size
    sharing = getattr(cfg.task, "sequence_parallel_size", 1)
    workers = cfg.distributed_training.distributed_world_size // sharing
    kind = "workers" if sharing == 1 else f"groups of {sharing} workers"
    given = list(cfg.optimization.update_freq)
    if size is not None and given == [1] and wanted % workers == 0:
        share = wanted // workers
        size = min(size, share)
        given = [max(share // size, 1)]
    for frequency in given:
        if size is None or size * frequency * workers != wanted:
            raise InputError(
                f"task.global_batch is {wanted} sequences an update, but dataset.batch_size {size} x "
                f"optimization.update_freq {frequency} x {workers} {kind} is "
                f"{'unknown' if size is None else size * frequency * workers}: change the split, or the recipe"
            )
    cfg.dataset.batch_size, cfg.optimization.update_freq = size, given
    logger.info(f"{wanted} sequences an update = {size} a device x update_freq {given} x {workers} {kind}")
