"""A run's configuration for TensorBoard: the whole as text, what changes its result for the HPARAMS tab.

The tab finds the metrics by itself: the last value of each scalar below the run's directory.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from torch import distributed

from lln_fairseq.training.run_identity import result_settings

BUDGET = (  # what a run may change when it goes on, but tells jobs apart
    "optimization.max_update", "optimization.max_epoch", "task.global_batch", "dataset.batch_size",
    "dataset.max_tokens", "checkpoint.finetune_from_model",
)  # fmt: skip
HALF = ("amp", "bf16", "fp16")


def write_configuration(cfg: Any) -> None:
    """Of a training that begins: in its first worker, and where it logs to TensorBoard at all."""
    directory = cfg.common.tensorboard_logdir
    if not directory or (distributed.is_initialized() and distributed.get_rank()):
        return
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    # an argument parser made the options of a model without dataclass
    plain = {key: vars(group) if isinstance(group, argparse.Namespace) else group for key, group in plain.items()}
    # torch's own definition of the experiment would show the settings and metrics of this run alone
    _, start, _ = hparams(columns(plain), {})
    with SummaryWriter(directory) as writer:
        writer.add_text("configuration", "    " + OmegaConf.to_yaml(plain).replace("\n", "\n    "))
        writer.file_writer.add_summary(start)


def columns(config: Mapping[str, Any]) -> dict[str, float | str]:
    """A number or text by setting. What is off or not given is left out, which the tab shows as an empty cell, and as
    no column where no run has it."""
    settings = dict(result_settings(config))
    for key in BUDGET:
        group, name = key.split(".")
        settings[key] = config[group].get(name)
    settings["precision"] = next((kind for kind in HALF if config["common"][kind]), "fp32")
    alone = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in settings.items()}
    given = {key: value for key, value in alone.items() if value is not None and value is not False and value != ""}
    return {key: value if type(value) in (int, float) else str(value) for key, value in given.items()}
