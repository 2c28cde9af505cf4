"""The options that this package adds to every task."""

from dataclasses import dataclass, field
from typing import Optional

from omegaconf import II


@dataclass
class TrainingOptions:
    """Options of the hooks in hooked_task.py. The last three are copies of fairseq's, which a task cannot see."""

    global_batch: Optional[int] = field(
        default=None,
        metadata={
            "help": "sequences per update, over all devices: --update-freq is computed from it and --batch-size, which "
            "is lowered if it exceeds a device's share; combinations that do not multiply to it are rejected. "
            "--max-tokens can make updates smaller"
        },
    )
    warmup_fraction: Optional[float] = field(
        default=None,
        metadata={
            "help": "with the scheduler polynomial_decay: fraction of all updates in which the learning rate rises; it "
            "falls in the others. Replaces --warmup-updates and --total-num-update, of which fairseq-train still needs "
            "the latter, with any value"
        },
    )
    autocast: bool = field(
        default=False,
        metadata={"help": "compute in bfloat16 by autocast, with float32 weights; not together with fp16, bf16 or amp"},
    )
    probe_interval: int = field(
        default=0,
        metadata={
            "help": "measure every layer's attention matrices on a fixed batch every so many updates, and write to "
            "TensorBoard: entropy, spectral gap, temperature, log-normal fit, residual; 0 = never"
        },
    )
    probe_sequences: int = field(default=4, metadata={"help": "number of sequences in the probe's batch"})
    log_interval: int = II("common.log_interval")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")
    no_save_optimizer_state: bool = II("checkpoint.no_save_optimizer_state")


def both_names(option: str) -> str:
    """Return an option as a flag of fairseq-train and as a Hydra key, such as "--seed (common.seed)"."""
    group, key = option.split(".")
    if key == "_name":
        key = group
    return f"--{key.replace('_', '-')} ({option})"
