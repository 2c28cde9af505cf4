"""Options that all of our tasks have beside those of fairseq's."""

from dataclasses import dataclass, field
from typing import Optional

from omegaconf import II


@dataclass
class HostOptions:
    global_batch: Optional[int] = field(
        default=None,
        metadata={
            "help": "sequences an update on all devices together; an error unless batch size x update freq x devices "
            "is this number"
        },
    )
    log_interval: int = II("common.log_interval")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")
