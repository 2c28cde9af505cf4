"""Resume a run exactly.

This module saves and restores the state that fairseq leaves out of its checkpoints, computes the batch at which a run
continues its epoch, and detects runs that are already complete.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from fairseq.trainer import Trainer
from torch import Tensor

from lln_fairseq.checkpoints.config import plain_config, plain_options
from lln_fairseq.errors import UserError
from lln_fairseq.training.loss_scale import LossScaleMonitor

ADVICE = (
    "until the epoch ends, or set --reset-dataloader (checkpoint.reset_dataloader=true), which starts again at epoch 1"
)


class ExactResume:
    """Saves and restores the state of a run that fairseq leaves out of its checkpoints.

    The entries in a checkpoint are:

    overflows    number of updates that fp16 has skipped so far
    patience     best score, and number of validations since that score, for early stopping (--patience)
    scaler       counters of the loss scaler (fp16 only); fairseq saves only the loss scale
    masters      float32 parameters of --fp16 and --bf16 (absent with --no-save-optimizer-state); fairseq would restore
                 them from their 16-bit copies

    `cfg` is the configuration of the task, and `loss_scale` counts the overflows.
    """

    def __init__(self, cfg: Any, loss_scale: LossScaleMonitor) -> None:
        self.cfg = cfg
        self.loss_scale = loss_scale
        self._optimizer: Any = None  # a task first sees it in train_step
        self._pending: dict[str, Any] | None = None  # restored state that waits for the optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Parameters on a GPU are copied to the CPU. Parameters on the CPU are not copied, so later updates change them.
        """
        state: dict[str, Any] = {"overflows": self.loss_scale.overflows, "patience": patience_state()}
        scaler = self.loss_scale.scaler_state()
        if scaler:
            state["scaler"] = scaler
        if not self.cfg.no_save_optimizer_state:
            state["masters"] = [master.detach().cpu() for master in float32_parameters(self._optimizer)]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`. The next `before_step` restores the scaler and the float32 parameters."""
        self._pending = state
        self.loss_scale.overflows = state.get("overflows", 0)
        restore_patience(state.get("patience", {}))

    def before_step(self, optimizer: Any) -> None:
        """Restore the optimizer's scaler and float32 parameters, if a state was loaded since the previous call.

        Saved parameters of other shapes are ignored, because they were flattened for another number of devices. The
        optimizer then keeps the parameters that fairseq restored from the 16-bit copies.
        """
        self._optimizer = optimizer
        if self._pending is None:
            return
        self.loss_scale.restore_scaler(optimizer, self._pending.get("scaler", {}))
        masters = float32_parameters(optimizer)
        saved = self._pending.get("masters", []) if masters else []
        if [master.shape for master in masters] == [value.shape for value in saved]:
            with torch.no_grad():
                for master, value in zip(masters, saved, strict=True):
                    master.copy_(value)
        self._pending = None


def float32_parameters(optimizer: Any) -> list[Tensor]:
    """Return the float32 parameters, not copied, that an optimizer keeps for --fp16 or --bf16.

    There is one flat tensor per device, or one tensor per parameter. The list is empty in float32, with
    --memory-efficient-fp16 or --memory-efficient-bf16, and if `optimizer` is None.
    """
    parameters = getattr(optimizer, "fp32_params", None)
    if parameters is None:
        return []
    if isinstance(parameters, dict):
        return list(parameters.values())
    return list(parameters)


def restore_training_state(trainer: Trainer, filename: str, saved_config: Any, state: dict[str, Any]) -> None:
    """Adapt the parts of a checkpoint's extra_state that fairseq restores after this call, in place.

    These are the state of the task and the position in the epoch. With --reset-dataloader, fairseq restores neither of
    them and this function leaves them unchanged. With --reset-meters the state of early stopping is removed. If the run
    is already complete, the position becomes the start of an epoch. With --store-ema, the number of updates since the
    last average is restored in the trainer, too.

    `saved_config` is the configuration in the checkpoint, or None. UserError is raised if the position cannot be kept,
    or if Adam's state is for parameters of other shapes.
    """
    _check_adam_state(trainer, filename)
    if trainer.cfg.ema.store_ema:  # fairseq would start at 0 again
        trainer.ema.update_freq_counter = trainer.get_num_updates() % max(trainer.cfg.ema.ema_update_freq, 1)
    cfg = trainer.cfg.checkpoint
    if cfg.reset_dataloader:
        return
    if cfg.reset_meters:
        state.get(type(trainer.task).__name__, {}).pop("patience", None)
    position = state["train_iterator"]
    if reason_for_completion(trainer, state.get("previous_training_time", 0), position["epoch"]):
        position["iterations_in_epoch"] = 0
    else:
        done = position["iterations_in_epoch"]
        position["iterations_in_epoch"] = batch_offset(filename, saved_config, done, trainer.cfg)


def _check_adam_state(trainer: Trainer, filename: str) -> None:
    """Raise UserError if Adam's restored state is for parameters of other shapes, as after a new --max-positions."""
    for parameter, state in trainer.optimizer.optimizer.state.items():
        if "exp_avg" in state and state["exp_avg"].shape != parameter.shape:
            raise UserError(
                f"the optimizer's state in {filename} is for parameters of other shapes: start without it, with "
                "--reset-optimizer (checkpoint.reset_optimizer=true)"
            )


def batch_offset(path: str, saved_config: Any, done: int, cfg: Any) -> int:
    """Return the number of batches of the current epoch that each worker skips when it resumes a checkpoint.

    fairseq saves only how many batches each worker has processed in the epoch, `done`. After a change of the batch
    size, the same number of batches would contain other sequences, so some sequences would be repeated or left out:
    this raises UserError. If only the number of workers changes, the total number of processed batches is divided among
    the new workers. UserError is raised if they cannot be divided, or if dataset.grouped_shuffling is set. Without a
    saved configuration, `done` is returned unchanged.
    """
    if not done or not isinstance(saved_config, Mapping):
        return done
    saved_dataset = plain_options(saved_config.get("dataset"))
    dataset = plain_options(plain_config(cfg)["dataset"])
    for key in ("batch_size", "max_tokens"):
        if saved_dataset.get(key) != dataset[key]:
            raise UserError(
                f"{path} was saved in the middle of an epoch with dataset.{key} = {saved_dataset.get(key)}, but this "
                f"run has {dataset[key]}: keep the old value {ADVICE}"
            )
    workers = cfg.distributed_training.distributed_world_size
    saved_workers = plain_options(saved_config.get("distributed_training")).get("distributed_world_size", workers)
    if saved_workers != workers and (done * saved_workers % workers or dataset["grouped_shuffling"]):
        raise UserError(
            f"{path} was saved in the middle of an epoch with {saved_workers} workers, and the rest of the epoch "
            f"cannot be divided among {workers} workers: keep their number {ADVICE}"
        )
    return done * saved_workers // workers


def reason_for_completion(trainer: Trainer, seconds: float, next_epoch: int) -> str:
    """Return why a restored run is complete, such as "500 updates", or "" if it has updates left to do.

    A run is complete if it has reached --max-update, --max-epoch or --stop-time-hours, or has stopped early. That it
    has stopped early is known only after `restore_patience`. `seconds` is the training time so far, and `next_epoch`
    the epoch, from 1, in which the run would continue.
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
    if 0 < cfg.checkpoint.patience <= patience_state().get("num_runs", 0):
        return f"stopped early at update {updates}, without a better score in {cfg.checkpoint.patience} validations"
    return ""


# fairseq keeps the state of early stopping in attributes of its function should_stop_early, and does not save it.
PATIENCE_ATTRIBUTES = ("best", "num_runs")  # the best score, and the number of validations since that score

_should_stop_early: Any = None  # fairseq's function, after find_early_stopping


def find_early_stopping(main: Callable) -> None:
    """Let `patience_state` and `restore_patience` use the should_stop_early in the module of fairseq's `main`.

    That module is __main__ if the command is `python -m fairseq_cli.train`.
    """
    global _should_stop_early
    _should_stop_early = main.__globals__.get("should_stop_early")


def patience_state() -> dict[str, float]:
    """Return the values of PATIENCE_ATTRIBUTES; empty without --patience and before the first validation."""
    state = {}
    for name in PATIENCE_ATTRIBUTES:
        if hasattr(_should_stop_early, name):
            state[name] = getattr(_should_stop_early, name)
    return state


def restore_patience(saved: dict[str, float]) -> None:
    """Restore a result of `patience_state`. A key that is missing leaves its value unchanged."""
    for name in PATIENCE_ATTRIBUTES:
        if _should_stop_early is not None and name in saved:
            setattr(_should_stop_early, name, saved[name])
