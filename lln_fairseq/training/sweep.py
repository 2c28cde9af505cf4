"""Give each job of a Hydra sweep (--multirun) its own directory, and run the others if one fails.

See configs/hydra/callbacks/user_dir.yaml. Hydra itself would end with the first error's traceback.
"""

import math
import os
import sys
import traceback
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lln_fairseq.errors import InputError, full_errors

SAVE_DIR = "checkpoint.save_dir"


class Sweep(Callback):
    """runs/pretrain_lln_diag becomes runs/pretrain_lln_diag/common.seed=1 and .../common.seed=2 for common.seed=1,2."""

    def __init__(self) -> None:
        self.jobs = 0  # that have ended
        self.failed: list[str] = []  # the directories of those that failed
        self.process = os.getpid()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Add to save_dir whatever is swept and not yet a part of it, unless the command line gives a save_dir."""
        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [given.key_or_group for given in overrides if given.is_sweep_override()]
        unresolved: Any = OmegaConf.to_container(config, resolve=False)
        save_dir = unresolved["checkpoint"]["save_dir"]
        parts = [f"{key}={_value(key, config)}" for key in swept if f".{key.rpartition('.')[2]}}}" not in save_dir]
        if parts and SAVE_DIR not in (given.key_or_group for given in overrides):
            config.hydra.overrides.task.append(f"{SAVE_DIR}='{save_dir}/{','.join(parts)}'")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Report at once what went wrong in a job, and let Hydra continue.

        To a sweeper that optimises, such a job is worth infinity, as in fairseq. The jobs of another launcher are in
        other processes, which have a copy of this object: Hydra then reports their errors.
        """
        if config.hydra.mode != RunMode.MULTIRUN or os.getpid() != self.process:
            return
        self.jobs += 1
        if job_return.status != JobStatus.FAILED:
            return
        directory = OmegaConf.select(config, SAVE_DIR)
        error = job_return._return_value
        if not isinstance(error, InputError) or full_errors():
            traceback.print_exception(error)
        print(f"error: {directory}: {error}", file=sys.stderr)
        self.failed.append(directory)
        job_return.status = JobStatus.COMPLETED
        job_return.return_value = math.inf  # which frees what the error refers to

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if self.failed:
            print(f"error: {len(self.failed)} of {self.jobs} jobs failed: {', '.join(self.failed)}", file=sys.stderr)
            raise SystemExit(1)


def _value(key: str, config: DictConfig) -> str:
    """Return the interpolation for the value in each job: the choice of a group (model=tiny), else the option's."""
    return f"${{hydra:runtime.choices.{key}}}" if key in config.hydra.runtime.choices else f"${{{key}}}"
