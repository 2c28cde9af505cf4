"""The base class of this package's tasks: a fairseq task that calls hooks around fairseq's training loop.

The hooks make runs resume exactly, write layer scalars and probe measurements to TensorBoard, and report padding.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.tasks import FairseqTask
from fairseq.utils import split_paths

from lln_fairseq.checkpoints.compatibility import dictionary_hash
from lln_fairseq.checkpoints.reading import PLUGIN_STATE
from lln_fairseq.errors import UserError
from lln_fairseq.text.vocabulary import recorded_identity
from lln_fairseq.training.attention_probe import AttentionProbe
from lln_fairseq.training.loss_scale import LossScaleMonitor
from lln_fairseq.training.padding_report import PaddingReport
from lln_fairseq.training.resume import ExactResume
from lln_fairseq.training.tensorboard import LayerScalars


class HookedTask(FairseqTask):
    """A mixin that calls the hooks before or after the methods of a fairseq task.

    List it as the first base class of a task and fairseq's own task as the second. `cfg` is the task's configuration,
    which includes TrainingOptions. The code of each method shows which hooks run, and in which order.
    """

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.cfg = cfg  # fairseq's older tasks only set `args`
        self.run_origin: dict[str, str] = {}  # hashes, see run_identity.py; stays empty in workers that do not save
        self.loss_scale = LossScaleMonitor()
        self.resume = ExactResume(cfg, self.loss_scale)
        self.layer_scalars = LayerScalars(cfg)
        self.probe = AttentionProbe(cfg)
        self.padding_report = PaddingReport()
        self._is_training = False  # during a training step, not during a validation

    def load_dataset(self, split: str, *args: Any, **kwargs: Any) -> Any:
        """Load a split as fairseq's task does. Raise UserError if its files are missing or damaged."""
        try:
            return super().load_dataset(split, *args, **kwargs)
        except UserError:
            raise
        except (FileNotFoundError, AssertionError, ValueError) as error:
            if not str(error):  # an assertion without a message is a bug, not a damaged file
                raise
            raise UserError(f"cannot load split '{split}' of {self.cfg.data}: {error}") from error

    def check_validation_splits(self, splits: Sequence[str]) -> None:
        """Raise UserError if a split that is loaded cannot be used for validation. By default, every split can."""

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return an iterator over the batches of each epoch.

        Unlike in fairseq, no rows at the end of a data set are dropped, and every epoch gets new masks. The first call
        with training data logs the padding report. A sample of more than max_positions or max_tokens tokens raises
        UserError; fairseq would drop it in training and fail in validation.
        """
        self._require_short_samples(dataset, max_positions, max_tokens)
        # By default, fairseq rounds batch sizes down to a multiple of 8 and drops the remaining rows at the end of a
        # data set, in training and in validation.
        kwargs["required_batch_size_multiple"] = 1
        iterator = super().get_batch_iterator(dataset, max_tokens, max_sentences, max_positions, **kwargs)
        # Persistent loader processes keep a copy of the data set in its first epoch, so they would mask the same tokens
        # in every epoch.
        iterator.persistent_workers = False
        if dataset is self.datasets.get("train"):
            self.padding_report.log(dataset, iterator.frozen_batches, self.padding_advice())
        return iterator

    def _require_short_samples(self, dataset: Any, *limits: int | None) -> None:
        """Raise UserError if a sample has more tokens than the lowest of the limits. None means no limit."""
        longest = int(np.max(dataset.sizes, initial=0))  # most data sets have their sizes in a list of one array
        limit = min((limit for limit in limits if limit is not None), default=longest)
        if longest > limit:
            raise UserError(
                f"a sample has {longest} tokens, but the model and --max-tokens allow at most {limit}: "
                f"{self.too_long_advice(limit)}"
            )

    def too_long_advice(self, limit: int) -> str:
        """Return the options with which no sample has more than `limit` tokens, for an error message."""
        return f"shorten the samples to {limit} tokens, or raise --max-tokens (dataset.max_tokens)"

    def padding_advice(self) -> str:
        """Return the options that would reduce padding, for the padding report; "" if there are none."""
        return ""

    def before_update(self, samples: Sequence[Any], updates: int, device: torch.device) -> None:
        """Prepare this worker's batches of an update, in place. By default, nothing happens.

        `updates` is the number of completed updates, and `device` the one of the model.
        """

    def train_step(
        self, sample: Any, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> tuple:
        """Compute the loss of one batch, and add its gradients to those of earlier batches of the update.

        fairseq calls this once per batch, so with gradient accumulation several times per update. `update_num` is the
        number of completed updates. In updates that are logged, the logging output has the layer scalars.
        """
        self._is_training = True
        self.probe.before_step(model, update_num, self.datasets)
        self.resume.before_step(optimizer)
        self.loss_scale.before_step(optimizer)
        criterion = self._with_autocast(criterion)
        with self.layer_scalars.observe(model, update_num) as layers:
            loss, sample_size, log = super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
        return loss, sample_size, self.layer_scalars.add_to(log, layers)

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Update the parameters, then run the probe if it is due.

        `update_num` is the number of updates before this one. fairseq does not call this after an fp16 overflow.
        """
        super().optimizer_step(optimizer, model, update_num)
        self.probe.after_update(model, update_num + 1, self.datasets)

    def valid_step(self, sample: Any, model: Any, criterion: Any) -> tuple:
        """Compute the loss of one batch without gradients."""
        self._is_training = False
        return super().valid_step(sample, model, self._with_autocast(criterion))

    def _with_autocast(self, criterion: Any) -> Callable[[Any, Any], Any]:
        """Return the criterion as a function of model and sample; the backward pass has to stay outside of autocast."""
        if not getattr(self.cfg, "autocast", False):  # checkpoints of older versions lack the option
            return criterion

        def compute_loss(model: Any, sample: Any) -> Any:
            with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
                return criterion(model, sample)

        return compute_loss

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log the metrics of an update or a validation, from the logging outputs of all batches and workers."""
        super().reduce_metrics(logging_outputs, criterion)
        if self._is_training:
            self.loss_scale.log()
            self.layer_scalars.log(logging_outputs)

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return the entries that fairseq adds to `extra_state` when it saves a checkpoint.

        These are the state of `ExactResume`, and the strings that `plugin_state` reads: the hash of the dictionary, the
        tokenizer of the data ("" if it is unknown), the labels of a classifier, and `run_origin`.
        """
        identity = {
            "dictionary": dictionary_hash(self.source_dictionary),
            "tokenizer": recorded_identity(Path(split_paths(self.cfg.data)[0])),
            "labels": getattr(self, "labels", []),
            **self.run_origin,
        }
        # fairseq looks up a task's state under the name of its class, checkpoints/reading.py under PLUGIN_STATE.
        return {type(self).__name__: self.resume.state_dict(), PLUGIN_STATE: identity}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the task. fairseq calls this if a run resumes, but not with --finetune-from-model."""
        self.resume.load_state_dict(state)
