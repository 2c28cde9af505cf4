"""Gives each job of a Hydra sweep (--multirun) a directory of its own: see configs/hydra/callbacks/user_dir.yaml."""

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

SAVE_DIR = "checkpoint.save_dir"


class OwnDirectories(Callback):
    """runs/pretrain_lln_diag becomes runs/pretrain_lln_diag/common.seed=1 and .../common.seed=2 for common.seed=1,2."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Adds to save_dir whatever is swept and not yet a part of it, unless the command line gives a save_dir."""
        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [given.key_or_group for given in overrides if given.is_sweep_override()]
        save_dir = OmegaConf.to_container(config, resolve=False)["checkpoint"]["save_dir"]
        parts = [f"{key}={_value(key, config)}" for key in swept if f".{key.rpartition('.')[2]}}}" not in save_dir]
        if parts and SAVE_DIR not in (given.key_or_group for given in overrides):
            config.hydra.overrides.task.append(f"{SAVE_DIR}='{save_dir}/{','.join(parts)}'")


def _value(key: str, config: DictConfig) -> str:
    """The interpolation that gives the value in each job: of a group (model=tiny) the choice, else the option's."""
    return f"${{hydra:runtime.choices.{key}}}" if key in config.hydra.runtime.choices else f"${{{key}}}"
