"""Compute the learning rate schedule of a run from its number of updates, for the option --warmup-fraction."""

import logging
import math
from typing import Any

from fairseq.optim.lr_scheduler.polynomial_decay_schedule import PolynomialDecayLRSchedule
from fairseq.trainer import Trainer

from lln_fairseq.errors import UserError

logger = logging.getLogger(__name__)


def plan_schedule(trainer: Trainer, batches: int) -> None:
    """Set the warm-up and the last update of the trainer's schedule, in place, if --warmup-fraction is set.

    The warm-up takes this fraction of all updates, and the decay takes the remaining ones. The learning rate is then
    that of the trainer's current update. `batches` is the number of batches of one worker in an epoch. UserError is
    raised unless the scheduler is polynomial_decay and --max-epoch or --max-update limits the run.
    """
    fraction = getattr(trainer.cfg.task, "warmup_fraction", None)
    if fraction is None:
        return
    if not 0 <= fraction < 1:
        raise UserError(f"--warmup-fraction (task.warmup_fraction) must be at least 0 and less than 1, got {fraction}")
    scheduler = trainer.lr_scheduler
    if not isinstance(scheduler, PolynomialDecayLRSchedule):
        raise UserError("--warmup-fraction (task.warmup_fraction) needs --lr-scheduler polynomial_decay")
    updates = total_updates(trainer.cfg, batches)
    if math.isinf(updates):
        raise UserError("--warmup-fraction (task.warmup_fraction) needs --max-epoch or --max-update")
    scheduler.total_num_update = updates
    scheduler.cfg.warmup_updates = round(fraction * updates)
    trainer.lr_step_update()


def warn_of_unfit_schedule(trainer: Trainer, batches: int) -> None:
    """Log a warning if the learning rate ends before 95 % of the run's updates, or the run ends in the warm-up.

    `batches` is as for `plan_schedule`.
    """
    scheduler = trainer.lr_scheduler
    updates = total_updates(trainer.cfg, batches)
    if math.isinf(updates) or not isinstance(scheduler, PolynomialDecayLRSchedule):
        return
    end = scheduler.total_num_update
    warmup = scheduler.cfg.warmup_updates
    advice = "task.warmup_fraction=0.1 fits the schedule to the run"
    if end < 0.95 * updates:  # fairseq's own recipes for SST-2 and QQP end up to 0.5 % early
        logger.warning(
            f"the learning rate is {scheduler.cfg.end_learning_rate:g} after update {end:g} of {updates} "
            f"(lr_scheduler.total_num_update): {advice}"
        )
    elif warmup >= updates:
        logger.warning(f"the run ends after {updates} updates, in its warm-up of {warmup}: {advice}")


def total_updates(cfg: Any, batches: int) -> float:
    """Return the number of updates after which a run ends: --max-update, or those of --max-epoch epochs if fewer.

    The result is infinity if neither option limits the run. `batches` is as for `plan_schedule`.
    """
    limits = cfg.optimization
    updates = math.inf
    if limits.max_update > 0:
        updates = limits.max_update
    if limits.max_epoch <= 0:
        return updates
    frequencies = list(limits.update_freq)
    of_epochs = 0
    for epoch in range(limits.max_epoch):
        frequency = frequencies[min(epoch, len(frequencies) - 1)]
        if limits.skip_remainder_batch:
            of_epochs += batches // frequency
        else:
            of_epochs += math.ceil(batches / frequency)
    return min(updates, of_epochs)
