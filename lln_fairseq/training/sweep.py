"""Give each job of a Hydra sweep (--multirun) its own directory, and continue with the next job if one fails.

configs/hydra/callbacks/user_dir.yaml installs the callback. Hydra on its own would end the sweep with the traceback of
the first error.
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

from lln_fairseq.errors import UserError
from lln_fairseq.training.exit import full_errors

SAVE_DIR = "checkpoint.save_dir"


class Sweep(Callback):
    """A Hydra callback that separates the jobs of a sweep.

    For the sweep common.seed=1,2 the save_dir runs/pretrain_lln_diag becomes runs/pretrain_lln_diag/common.seed=1 in
    the first job and runs/pretrain_lln_diag/common.seed=2 in the second.
    """

    def __init__(self) -> None:
        self.jobs = 0  # number of jobs that have ended
        self.failed: list[str] = []  # directories of the jobs that have failed
        self.process = os.getpid()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Append the swept options to save_dir, by an override that is added to `config` in place.

        An option is not appended if save_dir already contains its value, as in runs/pretrain_${model.attention}. If the
        command line sets save_dir, nothing is changed.
        """
        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        if any(override.key_or_group == SAVE_DIR for override in overrides):
            return
        unresolved: Any = OmegaConf.to_container(config, resolve=False)
        save_dir = unresolved["checkpoint"]["save_dir"]
        parts = []
        for override in overrides:
            if not override.is_sweep_override():
                continue
            key = override.key_or_group
            option = key.rpartition(".")[2]
            if f".{option}}}" not in save_dir:  # an interpolation such as ${model.attention}
                parts.append(f"{key}={_interpolation(key, config)}")
        if parts:
            config.hydra.overrides.task.append(f"{SAVE_DIR}='{save_dir}/{','.join(parts)}'")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Print the error of a failed job, and let Hydra start the next job.

        A traceback is printed if the error is not a UserError. The status and the result of the job are changed in
        place: as in fairseq, a failed job returns infinity, so that a sweeper that minimizes the result avoids it.
        Outside a sweep, or if the launcher runs the job in a process of its own, nothing happens: Hydra then reports
        the error.
        """
        if config.hydra.mode != RunMode.MULTIRUN or os.getpid() != self.process:
            return
        self.jobs += 1
        if job_return.status != JobStatus.FAILED:
            return
        directory = OmegaConf.select(config, SAVE_DIR)
        error = job_return._return_value
        if not isinstance(error, UserError) or full_errors():
            traceback.print_exception(error)
        print(f"error: {directory}: {error}", file=sys.stderr)
        self.failed.append(directory)
        job_return.status = JobStatus.COMPLETED
        job_return.return_value = math.inf  # releases the error, and with it the model that its frames refer to

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """End the program with exit code 1 and a list of the failed jobs, if there are any."""
        if self.failed:
            print(f"error: {len(self.failed)} of {self.jobs} jobs failed: {', '.join(self.failed)}", file=sys.stderr)
            raise SystemExit(1)


def _interpolation(key: str, config: DictConfig) -> str:
    """Return the Hydra interpolation that gives the value of a swept key in each job.

    For a group of configurations, such as `model` in model=tiny, the value is the name of the chosen configuration.
    """
    if key in config.hydra.runtime.choices:
        return f"${{hydra:runtime.choices.{key}}}"
    return f"${{{key}}}"
