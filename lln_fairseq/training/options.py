"""Options that all of our tasks have besides those of fairseq's."""

from dataclasses import dataclass, field
from typing import Optional

from omegaconf import II


@dataclass
class TrainingOptions:
    """Options of the hooks, see hooked_task.py."""

    global_batch: Optional[int] = field(
        default=None,
        metadata={
            "help": "sequences an update on all devices together; batch size (what fits on a device) is kept or "
            "lowered and update freq set to match, and what cannot match is an error"
        },
    )
    sequence_parallel_size: int = field(
        default=1,
        metadata={
            "help": "neighbouring workers that share their sequences, each with a part of the tokens; for attentions "
            "that can: see docs/sequence_parallel.md"
        },
    )
    probe_interval: int = field(
        default=0,
        metadata={
            "help": "updates between two measurements of every layer's attention matrices on a fixed batch, written to "
            "TensorBoard: entropy, spectral gap, temperature, log-normal fit, residual; 0 = never"
        },
    )
    probe_sequences: int = field(default=4, metadata={"help": "sequences in the probe's batch"})
    log_interval: int = II("common.log_interval")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")
    no_save_optimizer_state: bool = II("checkpoint.no_save_optimizer_state")
