"""Resume a run exactly: what a checkpoint needs besides what fairseq saves, and where in its epoch a run continues."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from torch import Tensor

from lln_fairseq.checkpoints.config import plain_config, plain_options
from lln_fairseq.errors import InputError, first_line
from lln_fairseq.training.loss_scale import LossScaleMonitor

# Errors of the machine, which say nothing about the state of the optimizer.
MACHINE_ERRORS = (torch.AcceleratorError, torch.OutOfMemoryError, torch.distributed.DistError)
ADVICE = "until the epoch ends, or --reset-dataloader (checkpoint.reset_dataloader=true), which begins with epoch 1"


class ExactResume:
    """Save and restore the state of a training that fairseq forgets.

    overflows    the number of updates that fp16 has skipped so far
    patience     how many validations ago the best score was, for a training that stops early
    scaler       where the loss scaler is in its window; fairseq saves only the loss scale
    masters      the float32 parameters of --fp16 and --bf16; fairseq starts again from their 16-bit copies
    """

    def __init__(self, cfg: Any, loss_scale: LossScaleMonitor) -> None:
        self.cfg = cfg
        self.loss_scale = loss_scale
        self._optimizer: Any = None  # fairseq shows it to a task only in train_step
        self._pending: dict[str, Any] | None = None  # a checkpoint's state, until there is an optimizer to put it into
        self._first_update = True  # of this process

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state: dict[str, Any] = {"overflows": self.loss_scale.overflows, "patience": patience()}
        scaler = self.loss_scale.scaler_state()
        if scaler:
            state["scaler"] = scaler
        if not self.cfg.no_save_optimizer_state:
            state["masters"] = [master.detach().cpu() for master in float32_parameters(self._optimizer)]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned: the optimizer's part of it before the first step."""
        self._pending = state
        self.loss_scale.overflows = state.get("overflows", 0)
        restore_patience(state.get("patience", {}))

    def before_step(self, optimizer: Any) -> None:
        """Put the pending state into the optimizer."""
        self._optimizer = optimizer
        if self._pending is None:
            return
        self.loss_scale.restore_scaler(optimizer, self._pending.get("scaler", {}))
        masters = float32_parameters(optimizer)
        if masters:
            saved = self._pending.get("masters", [])
            # other shapes: flattened on another number of devices, where the 16-bit copies have to do
            if [master.shape for master in masters] == [value.shape for value in saved]:
                with torch.no_grad():
                    for master, value in zip(masters, saved, strict=True):
                        master.copy_(value)
        self._pending = None

    @contextmanager
    def checked_first_update(self, optimizer: Any) -> Iterator[None]:
        """Raise InputError if the first update of a resumed run shows that the optimizer's state cannot be used."""
        restored = self._first_update and bool(optimizer.optimizer.state)
        self._first_update = False
        try:
            yield
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
            if not restored or isinstance(error, (InputError, *MACHINE_ERRORS)) or "memory" in str(error):
                raise
            raise InputError(
                f"the checkpoint is damaged: its optimizer's state does not fit ({first_line(error)}); "
                "--reset-optimizer (checkpoint.reset_optimizer=true) goes on without it"
            ) from error


def float32_parameters(optimizer: Any) -> list[Tensor]:
    """Return the float32 parameters of --fp16 or --bf16: one tensor per device or one per parameter.

    The list is empty in float32 and with --memory-efficient-fp16 and --memory-efficient-bf16.
    """
    parameters = getattr(optimizer, "fp32_params", None)
    if parameters is None:
        return []
    return list(parameters.values()) if isinstance(parameters, dict) else list(parameters)


def restore_training_state(trainer: Trainer, filename: str, saved_config: Any, state: dict[str, Any]) -> None:
    """Check and adapt what fairseq restores from a checkpoint after this: the task's state, the position in the epoch.

    Args:
        trainer: fairseq's trainer, with the parameters of the checkpoint
        filename: the checkpoint
        saved_config: the configuration in it
        state: its extra_state, which is changed
    """
    if trainer.cfg.ema.store_ema:  # fairseq counts the updates since the last average from 0 again
        trainer.ema.update_freq_counter = trainer.get_num_updates() % max(trainer.cfg.ema.ema_update_freq, 1)
    cfg = trainer.cfg.checkpoint
    if cfg.reset_dataloader or filename == cfg.finetune_from_model:  # then fairseq restores neither
        return
    name = type(trainer.task).__name__
    task_state = state.get(name, {})
    if not isinstance(task_state, dict) or not all(
        isinstance(task_state.get(key, kind()), kind) for key, kind in (("overflows", int), ("patience", dict))
    ):
        raise InputError(f"the checkpoint is damaged: its {name} holds no state of a task")
    if cfg.reset_meters:
        task_state.pop("patience", None)
    position = state["train_iterator"]
    if reason_for_completion(trainer, state.get("previous_training_time", 0), position["epoch"]):
        position["iterations_in_epoch"] = 0
    else:
        done = position["iterations_in_epoch"]
        position["iterations_in_epoch"] = batch_offset(filename, saved_config, done, trainer.cfg)


def batch_offset(path: str, saved_config: Any, done: int, cfg: Any) -> int:
    """Return how many batches of the epoch each worker has behind it when it resumes a checkpoint.

    fairseq counts the batches that each worker has had: with batches of another size that number means other sequences,
    some of which would come twice or not at all. The same batches on another number of workers are as many together.

    Args:
        path: the checkpoint, for messages
        saved_config: the configuration in it
        done: the batches that each worker of the checkpoint's training had had
        cfg: the configuration of this training
    Raises: InputError in the middle of an epoch if the batches differ, or cannot be divided among the workers.
    """
    if not done or not isinstance(saved_config, Mapping):
        return done
    config = plain_config(cfg)
    saved_sizes = plain_options(saved_config.get("dataset"))
    sizes = plain_options(config["dataset"])
    for key in ("batch_size", "max_tokens"):
        if saved_sizes.get(key) != sizes[key]:
            raise InputError(
                f"{path} is of the middle of an epoch, with dataset.{key} = {saved_sizes.get(key)}, here it is "
                f"{sizes[key]}: keep it {ADVICE}"
            )
    shards = data_shards(config)
    saved_shards = data_shards(saved_config) or shards
    if saved_shards != shards and (done * saved_shards % shards or sizes["grouped_shuffling"]):
        raise InputError(
            f"{path} is of the middle of an epoch, and {shards} workers cannot share what {saved_shards} have left of "
            f"it: keep their number {ADVICE}"
        )
    return done * saved_shards // shards


def data_shards(config: Mapping[str, Any]) -> int:
    """Return the number of parts that an epoch is divided into: workers that share sequences get the same part.

    Returns: 0 if a configuration does not say it.
    """
    workers = plain_options(config.get("distributed_training")).get("distributed_world_size")
    sharing = plain_options(config.get("task")).get("sequence_parallel_size") or 1
    if not isinstance(workers, int) or not isinstance(sharing, int):
        return 0
    return workers // max(sharing, 1)


def reason_for_completion(trainer: Trainer, seconds: float, next_epoch: int) -> str:
    """Return why a restored run has nothing left to train, or "" if it has.

    Args:
        trainer: fairseq's trainer
        seconds: the time of the run so far
        next_epoch: the epoch that the run would continue with
    """
    cfg = trainer.cfg
    updates = trainer.get_num_updates()
    limits = cfg.optimization
    if 0 < limits.max_update <= updates:
        return f"{updates} updates"
    if 0 < limits.max_epoch < next_epoch:
        return f"{updates} updates in {limits.max_epoch} epochs"
    if updates and 0 < 3600 * limits.stop_time_hours < seconds:
        return f"{updates} updates in {limits.stop_time_hours:g} hours"
    if 0 < cfg.checkpoint.patience <= patience().get("num_runs", 0):
        return f"stopped early at update {updates}, without a better score in {cfg.checkpoint.patience} validations"
    return ""


# fairseq keeps some of a run's state in attributes of its functions. It belongs to the process: a second training in
# it, as in a sweep, would continue with the scores of the first. And it is gone with the process: a training that had
# stopped early would train on when it is started again.

PATIENCE = ("best", "num_runs")  # attributes of fairseq's should_stop_early: the best score, validations since

_should_stop_early: Any = None


def forget_previous_run(main: Callable) -> None:
    """Delete what fairseq's functions keep of the run before this one, and close its TensorBoard files.

    Args:
        main: fairseq's; its module, which may be `__main__`, has what stops early
    """
    global _should_stop_early
    _should_stop_early = main.__globals__.get("should_stop_early")
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    for name in PATIENCE:
        if hasattr(_should_stop_early, name):
            delattr(_should_stop_early, name)
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()


def patience() -> dict[str, float]:
    """Return the best score so far and the number of validations since; empty before the first one."""
    return {name: getattr(_should_stop_early, name) for name in PATIENCE if hasattr(_should_stop_early, name)}


def restore_patience(saved: dict[str, float]) -> None:
    """Restore what `patience` returned."""
    for name in PATIENCE:
        if _should_stop_early is not None and name in saved:
            setattr(_should_stop_early, name, saved[name])
