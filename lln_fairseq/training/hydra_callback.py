"""Prepare a training run before Hydra starts it, also if the command is fairseq-hydra-train.

configs/hydra/callbacks/user_dir.yaml installs the callback for every recipe in configs/.
"""

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any

from fairseq.utils import import_user_module
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from lln_fairseq import tasks  # noqa: F401  registers models and tasks, and patches fairseq, before the run starts
from lln_fairseq.errors import UserError, user_errors
from lln_fairseq.training.exit import exit_with_one_line
from lln_fairseq.training.initial_model import find_save_dir, missing_options
from lln_fairseq.training.recipes import PACKAGE


def end_on_error(method: Callable) -> Callable:
    """Make an exception in a callback's method end the program with exit code 1.

    A UserError is printed as one line, any other exception with its traceback. Hydra would turn both into a warning and
    start the run.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with exit_with_one_line():
                return method(*args, **kwargs)
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None

    return call


class PrepareRun(Callback):
    """A Hydra callback that imports the user directory, and completes the options of a run."""

    @end_on_error
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Import common.user_dir, by default this package, and take the model's options from the initial checkpoint.

        Both change the configuration in place. save_dir is created, because Hydra's directory is in it, and Hydra would
        end in a traceback.
        """
        if config.common.user_dir is None:
            config.common.user_dir = str(PACKAGE)
        with user_errors():
            import_user_module(config.common)
        options = missing_options(config)
        with open_dict(config):
            for key, value in options.items():
                config.model[key] = value
        os.makedirs(find_save_dir(config), exist_ok=True)  # the directory can have the attention in its name

    @end_on_error
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        raise UserError("--multirun is not supported: start a run for each combination, with a loop in the shell")
