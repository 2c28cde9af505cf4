"""The base of our tasks: fairseq's task with hooks that make its training loop resume, log and report correctly."""

from pathlib import Path
from typing import Any

from fairseq.tasks import FairseqTask

from lln_fairseq.checkpoints.compatibility import dictionary_hash
from lln_fairseq.checkpoints.reading import PLUGIN_STATE
from lln_fairseq.errors import InputError
from lln_fairseq.training.loss_scale import LossScaleMonitor
from lln_fairseq.training.padding_report import PaddingReport
from lln_fairseq.training.probe import AttentionProbe
from lln_fairseq.training.resume import ExactResume
from lln_fairseq.training.sequence_parallel import SequenceSharing
from lln_fairseq.training.tensorboard import LayerScalars


class HookedTask(FairseqTask):
    """The first base of a task, in front of one of fairseq's: it calls the hooks around fairseq's own methods.

    Every method below shows the hooks that take part in it, in the order in which they run.
    """

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.cfg = cfg  # fairseq's older tasks have `args` instead
        self.run_origin: dict[str, str] = {}  # see run_identity.py; set when a training begins
        self.loss_scale = LossScaleMonitor()
        self.resume = ExactResume(cfg, self.loss_scale)
        self.sequence_sharing = SequenceSharing(cfg)
        self.layer_scalars = LayerScalars(cfg, self.loss_scale)
        self.probe = AttentionProbe(cfg)
        self.padding_report = PaddingReport()

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model. Raise InputError if it cannot share its sequences but has to."""
        model = super().build_model(cfg, from_checkpoint)
        if not from_checkpoint:
            self.sequence_sharing.join_group(model)
        return model

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> Any:
        """Load a split. Raise InputError if its files are missing or damaged."""
        try:
            return super().load_dataset(split, *args, **kwargs)
        except (FileNotFoundError, AssertionError, ValueError) as error:
            if isinstance(error, InputError) or not str(error):  # another assertion of fairseq's
                raise
            raise InputError(f"cannot load split '{split}' of {self.cfg.data}: {error}") from error

    def get_batch_iterator(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of an epoch: every row of the data set, with other masks in every epoch."""
        # fairseq rounds the size of a batch down to a multiple of 8 and drops the rows that are left at the end of a
        # data set, in training and in validation.
        kwargs["required_batch_size_multiple"] = 1
        self.sequence_sharing.merge_data_shards(kwargs)
        batches = super().get_batch_iterator(dataset, *args, **kwargs)
        # Loader processes that outlive an epoch would mask the tokens of every epoch like those of the first.
        batches.persistent_workers = False
        if dataset is self.datasets.get("train"):
            self.padding_report.log(dataset, batches.frozen_batches, self.padding_advice())
        return batches

    def padding_advice(self) -> str:
        """Return the options with which less padding is computed; "" if the task has them already."""
        return ""

    def train_step(
        self, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> tuple:
        """Compute loss and gradients of one batch."""
        self.probe.before_step(model, update_num, self.datasets)
        self.resume.before_step(optimizer)
        self.loss_scale.before_step(optimizer)
        self.sequence_sharing.seed_dropout()
        part = self.sequence_sharing.own_part(sample, self.source_dictionary.pad())
        with self.layer_scalars.observe(model, update_num) as layers:
            loss, sample_size, log = super().train_step(part, model, criterion, optimizer, update_num, ignore_grad)
        return loss, sample_size, self.layer_scalars.add_to(log, layers)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Update the parameters. fairseq does not call it for an update that fp16 skips."""
        with self.resume.checked_first_update(optimizer):
            super().optimizer_step(optimizer, model, update_num)
        self.probe.after_update(model, update_num + 1, self.datasets)

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> tuple:
        """Compute the loss of one batch without gradients."""
        self.layer_scalars.is_training = False
        part = self.sequence_sharing.own_part(sample, self.source_dictionary.pad())
        return super().valid_step(part, model, criterion)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log the sums over the batches and workers of an update."""
        super().reduce_metrics(logging_outputs, criterion)
        self.layer_scalars.log(logging_outputs)

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return what fairseq adds to the extra_state of a checkpoint when it saves one."""
        identity = {
            "dictionary": dictionary_hash(self.source_dictionary),
            "labels": getattr(self, "labels", []),
            **self.run_origin,
        }
        # fairseq looks up a task's state by the name of its class, checkpoints/reading.py looks up PLUGIN_STATE.
        return {type(self).__name__: self.resume.state(), PLUGIN_STATE: identity}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the task; fairseq calls it when a run resumes, but not for a fine-tuning."""
        self.resume.restore(state)


def require_files(directory: str, *names: str) -> None:
    """Raise InputError that names the first missing file."""
    for name in names:
        path = Path(directory, name)
        if not path.is_file():
            raise InputError(f"{directory} is not a binarised data directory: {path} is missing")
