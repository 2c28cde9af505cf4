"""A training run from its first line to its last, in the order in which everything happens.

The first column has functions of Hydra and fairseq, indented below their callers. fairseq_compat/patches.py puts the
functions of this module in the place of fairseq's, which they get as the argument `original`.

    hydra.main                          hydra_callback.PrepareRun takes the model's options from a checkpoint
    call_main                           start_run checks the options, locks save_dir and starts the workers
      main, in every worker             run_worker prepares the process
        setup_task                      HookedTask.__init__ creates the hooks
        load_dataset                    HookedTask.load_dataset loads the validation data
        load_checkpoint                 prepare_training makes the batches of an update fit task.global_batch
          Trainer.load_checkpoint       restore_checkpoint checks that a checkpoint is of this run or fits, and loads it
          get_train_iterator            HookedTask.get_batch_iterator checks the training data, and reports padding
                                        prepare_training, continued: plans the schedule, and logs the summary
        Trainer.train_step              train_step lets the task mask a token if none is masked, and explains a failure
          train_step, of each batch     HookedTask.train_step restores the float32 parameters once, and measures layers
          optimizer_step                HookedTask.optimizer_step runs the probe
          reduce_metrics                HookedTask.reduce_metrics logs the loss scale and the layers
        save_checkpoint                 HookedTask.get_checkpoint_dict adds what fairseq forgets; saving.py writes files
                                        run_worker, continued: waits for the other workers, and ends the loader threads
                                        start_run, continued: ends with one line and a fixed exit code
"""

import copy
import functools
import importlib.util
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.trainer import Trainer
from torch.multiprocessing import ProcessExitedException

from lln_fairseq import command
from lln_fairseq.checkpoints.compatibility import check_compatibility
from lln_fairseq.checkpoints.config import KNOWN, config_yaml
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily, plugin_state
from lln_fairseq.checkpoints.run_tokenizer import save_tokenizer
from lln_fairseq.checkpoints.saving import LAST
from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.training import settings, worker
from lln_fairseq.training.exit import exit_with_one_line
from lln_fairseq.training.hooked_task import HookedTask
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.training.nan_report import explain_nan
from lln_fairseq.training.options import both_names
from lln_fairseq.training.resume import find_early_stopping, reason_for_completion, restore_training_state
from lln_fairseq.training.run_identity import check_same_run, run_origin
from lln_fairseq.training.schedule import plan_schedule
from lln_fairseq.training.summary import CONFIGURATION, log_summary
from lln_fairseq.training.tensorboard import continue_curves, write_configuration

logger = logging.getLogger(__name__)


@exit_with_one_line()
def start_run(run_in_worker: Callable, original: Callable, cfg: Any, main: Callable, *args: Any, **kwargs: Any) -> Any:
    """Check the options, lock save_dir, and call run_in_worker(main, cfg, ...) in every worker. Replaces call_main.

    Other programs of fairseq call this, too; for them, cfg.model is None. If the run saves, save_dir is created.
    """
    settings.check_known_options(cfg)
    settings.check_ranges(cfg)
    settings.check_workers(cfg)
    if cfg.model is not None:
        settings.check_precision(cfg)
        settings.check_attention(cfg)
        settings.check_options_of_other_mechanisms(cfg)
        settings.number_softmax_layers(cfg)
        settings.check_criterion(cfg)
        settings.check_best_metric(cfg)
        settings.check_patience(cfg)
        settings.complete_schedule(cfg)
    if cfg.common.bf16 and cfg.common.tpu and importlib.util.find_spec("torch_xla") is None:
        cfg.common.tpu = False
        cfg.distributed_training.tpu = False  # with --bf16, fairseq-train would start a single worker
    worker.find_workers(cfg)
    try:
        with worker.lock_save_dir(cfg):
            return original(cfg, functools.partial(run_in_worker, main), *args, **kwargs)
    except ProcessExitedException as error:  # the worker has printed its error
        raise SystemExit(error.exit_code) from None


def run_worker(main: Callable, cfg: Any, **kwargs: Any) -> Any:
    """Prepare this process, and return the result of fairseq's main(cfg, ...).

    A spawned worker ends when its parent process ends. It prints a UserError, or the TrainingError for the loss of
    another worker, as one line and exits with code 1.
    """
    parent: Any = multiprocessing.parent_process()
    if parent:
        command.exit_with_parent(parent.pid)
    disable_malloc_trim()
    find_early_stopping(main)
    try:
        with worker.report_lost_workers():
            result = main(cfg, **kwargs)
            worker.leave_process_group_at_exit()
            return result
    except UserError as error:
        if not parent:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        worker.end_prefetching()


def prepare_training(original: Callable, cfg: Any, trainer: Trainer, **kwargs: Any) -> Any:
    """Check the settings, load the checkpoint and the training data, and plan the run. Replaces load_checkpoint.

    The result is the checkpoint's extra_state, or None for a new run, and the iterator over the batches. `cfg` are the
    checkpoint options.

    trainer.cfg is changed in place: batch_size and update_freq are set to match task.global_batch, and max_epoch is set
    to -1 if the run is complete, so that fairseq's loop does nothing. With --warmup-fraction, the schedule is changed,
    too.

    Unless --no-save is set, the first worker writes SAVE_DIR/tokenizer/, from which it removes the files of an earlier
    task, and, unless the run is complete, SAVE_DIR/config.yaml. It also writes the settings to --tensorboard-logdir,
    and logs the summary.
    """
    settings.check_restore_file(trainer.cfg)
    settings.split_global_batch(trainer.cfg)  # not earlier: now, the number of workers is known
    task = trainer.task
    if isinstance(task, HookedTask) and not trainer.cfg.dataset.disable_validation:
        task.check_validation_splits(trainer.cfg.dataset.valid_subset.split(","))

    checkpoint_cfg = _hide_initial_model(cfg, trainer)
    extra_state, iterator = original(checkpoint_cfg, trainer, **kwargs)  # calls restore_checkpoint

    is_first = worker.is_first_worker()
    saves = is_first and not cfg.no_save
    plan_schedule(trainer, len(iterator))
    if saves and getattr(trainer.cfg.task, "_name", None) in KNOWN["task"]:
        save_tokenizer(task, cfg.save_dir, cfg.finetune_from_model)
    seconds = (extra_state or {}).get("previous_training_time", 0)
    reason = reason_for_completion(trainer, seconds, iterator.next_epoch_idx)
    if reason:
        logger.info(f"{cfg.save_dir} is complete: {reason}")
        trainer.cfg.optimization.max_epoch = -1
        return extra_state, iterator
    if is_first and trainer.cfg.common.tensorboard_logdir:
        write_configuration(trainer.cfg)
        continue_curves(trainer.cfg, trainer.get_num_updates())
    if saves:
        write_bytes(Path(cfg.save_dir, CONFIGURATION), config_yaml(trainer.cfg).encode())
    if is_first:
        log_summary(trainer, iterator)
    return extra_state, iterator


def _hide_initial_model(cfg: Any, trainer: Trainer) -> Any:
    """Return the checkpoint options, in a copy without finetune_from_model if the run resumes.

    fairseq does not use that option then, but still refuses to combine it with --reset-optimizer and the like.
    """
    last = Path(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
    if cfg.restore_file == LAST and last.is_file():
        cfg = copy.deepcopy(cfg)
        cfg.finetune_from_model = None
    return cfg


def restore_checkpoint(
    original: Callable, trainer: Trainer, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Check that a checkpoint belongs to this run or fits it, and load it. Replaces Trainer.load_checkpoint.

    fairseq calls this for a new run, too: then there is no such file, and the result is None instead of the
    checkpoint's extra_state. In the worker that saves, task.run_origin is set in both cases, which hashes the training
    data.
    """
    cfg = trainer.cfg
    task = trainer.task
    # fairseq resets the optimizer without this option for --finetune-from-model, in a new run.
    finetunes = reset_optimizer and not cfg.checkpoint.reset_optimizer
    saved: dict[str, Any] = {}
    resumes = False
    if os.path.isfile(filename):
        saved = load_checkpoint_lazily(filename)
        is_in_save_dir = Path(filename).parent.resolve() == Path(cfg.checkpoint.save_dir).resolve()
        resumes = is_in_save_dir and not finetunes
    origin: dict[str, str] = {}
    records = isinstance(task, HookedTask) and worker.is_first_worker() and not cfg.checkpoint.no_save
    if records or (resumes and plugin_state(saved)):
        origin = run_origin(cfg, saved if resumes else None)
    if resumes:
        check_same_run(cfg, saved, origin, getattr(task, "labels", []))
    if records:
        task.run_origin = origin
    if saved:
        check_compatibility(saved, trainer.get_model(), task, filename)
    try:
        extra_state = original(trainer, filename, reset_optimizer, *args, **kwargs)
    except Exception as error:
        cause: BaseException | None = error
        if type(error) is Exception:  # fairseq's "Cannot load model parameters ...", which hides the error before it
            cause = error.__context__
        if isinstance(cause, UserError | OSError):
            raise cause from None
        raise UserError(
            f"{filename} does not fit this run: {_load_error_reason(cause)}. Use the options that it was trained with, "
            "or another --save-dir (checkpoint.save_dir) if it belongs to another run"
        ) from error
    if extra_state and not finetunes:
        restore_training_state(trainer, filename, saved.get("cfg"), extra_state)
    return extra_state


def _load_error_reason(cause: BaseException | None) -> str:
    """Return the second line of an error's message, or its only line, or the name of its class if that line is empty.

    torch puts a heading in the first line and the first reason in the second one.
    """
    lines = str(cause).splitlines()[:2]
    reason = ""
    if lines:
        reason = lines[-1].strip(" \t.")
    return reason or type(cause).__name__


def train_step(original: Callable, trainer: Trainer, samples: list[Any], raise_oom: bool = True) -> Any:
    """Let the task prepare this worker's batches of an update, and make the update. Replaces Trainer.train_step.

    UserError is raised if the memory does not suffice. Without raise_oom, fairseq would drop the batch, so this
    argument, which fairseq passes when it repeats an update, is ignored.
    """
    if isinstance(trainer.task, HookedTask):
        trainer.task.before_update(samples, trainer.get_num_updates(), trainer.device)
    try:
        with explain_nan(trainer):
            return original(trainer, samples, raise_oom=True)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        size = ""
        shapes = [sample["net_input"]["src_tokens"].shape for sample in samples if sample]
        if shapes:
            rows, tokens = max(shapes, key=math.prod)
            size = f": its largest batch has {rows} rows of {tokens} tokens"
        raise UserError(
            f"update {trainer.get_num_updates() + 1} does not fit into memory{size}. Use a smaller "
            f"{both_names('dataset.batch_size')} with a larger {both_names('optimization.update_freq')}, or "
            f"{both_names('model.checkpoint_activations')}"
        ) from error
