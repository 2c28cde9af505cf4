"""A run's configuration for TensorBoard: the whole as text, what changes its result for the HPARAMS tab.

The tab finds the metrics by itself: the last value of each scalar below the run's directory.
"""

import argparse
from typing import Any

from omegaconf import OmegaConf
from torch import distributed

from lln_fairseq.host.same_run import result_settings


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
    settings = {key: value if type(value) in (int, float) else str(value) for key, value in result_settings(plain)}
    # torch's own definition of the experiment would show the settings and metrics of this run alone
    _, start, _ = hparams(settings, {})
    with SummaryWriter(directory) as writer:
        writer.add_text("configuration", "    " + OmegaConf.to_yaml(plain).replace("\n", "\n    "))
        writer.file_writer.add_summary(start)
