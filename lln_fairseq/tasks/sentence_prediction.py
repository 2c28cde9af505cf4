"""Classification and regression of sentences and pairs: fairseq's task, with errors where it would fail silently.

The task can also encode the inputs of a pair separately (two_towers), leave out </s> and group sentences by length.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from fairseq import models
from fairseq.data import SortDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from omegaconf import II, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError

from lln_fairseq.checkpoints.compatibility import label_names, longest_sequence
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import UserError, user_errors
from lln_fairseq.models import LLNRobertaModel
from lln_fairseq.text.checks import (
    check_labels,
    check_lines,
    check_targets,
    read_symbols,
    require_binarized,
    require_same_symbols,
)
from lln_fairseq.text.pairs import ROBERTA_PAIRS
from lln_fairseq.text.sentence_datasets import (
    count_cut_rows,
    has_targets,
    keep_ends_of_cut_samples,
    make_samples,
    read_inputs,
    read_labels,
)
from lln_fairseq.training.hooked_task import HookedTask
from lln_fairseq.training.options import TrainingOptions
from lln_fairseq.training.worker import is_first_worker

INPUTS = ("input0", "input1")
DEFAULT_POSITIONS = 512  # RoBERTa's

logger = logging.getLogger(__name__)


@dataclass
class LLNSentencePredictionConfig(TrainingOptions, SentencePredictionConfig):
    """Options of the task lln_sentence_prediction: the options of fairseq's task, of the hooks, and of this task."""

    max_positions: Optional[int] = field(
        default=None,
        metadata={"help": f"max tokens per example; default: the checkpoint's limit, or {DEFAULT_POSITIONS}"},
    )
    group_by_length: bool = field(
        default=False,
        metadata={
            "help": "make batches of sentences of similar lengths, which reduces padding; default: random batches, as "
            "in fairseq"
        },
    )
    two_towers: bool = field(
        default=False,
        metadata={
            "help": "encode both inputs separately, as vectors a and b, and classify [a, b, a∘b, a-b]; default: encode "
            "them as one sequence"
        },
    )
    strip_eos: bool = field(default=False, metadata={"help": "leave out the </s> at the end of each input"})
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")


@register_task("lln_sentence_prediction", dataclass=LLNSentencePredictionConfig)
class LLNSentencePredictionTask(HookedTask, SentencePredictionTask):
    """The task lln_sentence_prediction. Its data has the directories input0, label and, for pairs, input1."""

    @classmethod
    def setup_task(cls, cfg: LLNSentencePredictionConfig, **kwargs: Any) -> "LLNSentencePredictionTask":
        """Set up the task.

        If cfg.max_positions is None, it is set in place: to the limit of the checkpoint that --finetune-from-model
        names, or to DEFAULT_POSITIONS without that option.

        UserError is raised if a dictionary is missing or damaged, if the dictionaries of both inputs differ, if
        num_classes is not set or not the number of labels, or if init_token or separator_token is not a token id.
        """
        require_binarized(cfg.data, "input0/dict.txt")
        dictionaries = [Path(cfg.data, folder, "dict.txt") for folder in INPUTS]
        require_same_symbols(*(path for path in dictionaries if path.is_file()))
        if cfg.num_classes < 1:
            raise UserError("the number of classes is missing: set --num-classes (task.num_classes)")
        if cfg.regression_target and cfg.num_classes > 1:
            raise UserError(f"a regression has one target: set task.num_classes=1, got {cfg.num_classes}")
        if not cfg.regression_target:
            require_binarized(cfg.data, "label/dict.txt")
            read_symbols(Path(cfg.data, "label/dict.txt"))
        if cfg.max_positions is None:
            cfg.max_positions = _positions_of_checkpoint(cfg) or DEFAULT_POSITIONS
        with user_errors():
            task = super().setup_task(cfg, **kwargs)
        largest_id = len(task.source_dictionary) - 1
        for option in ("init_token", "separator_token"):
            token = getattr(cfg, option)
            if token is not None and not 0 <= token <= largest_id:
                raise UserError(f"task.{option} must be a token id of {cfg.data}, in [0, {largest_id}], got {token}")
        if not cfg.regression_target and len(task.labels) != cfg.num_classes:
            raise UserError(
                f"task.num_classes must be the number of labels in {cfg.data}/label/dict.txt, {len(task.labels)} "
                f"({', '.join(task.labels[:8])}), got {cfg.num_classes}"
            )
        return task

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the model with its head, after setting two_towers and max_positions in `cfg`, its options, in place.

        The model gets at least as many positions as the task. fairseq's task gives it exactly as many, which cuts the
        positions of a checkpoint of longer texts. With two_towers, a model that is not one of this package raises
        UserError. If the model's pairs have one </s> between the texts, separator_token is removed from the task's
        options, in place.
        """
        with open_dict(cfg) if OmegaConf.is_config(cfg) else nullcontext():
            cfg.max_positions = max(self.cfg.max_positions, getattr(cfg, "max_positions", None) or 0)
            if self.cfg.two_towers or "two_towers" in cfg:
                cfg.two_towers = self.cfg.two_towers
        if getattr(cfg, "pair_form", ROBERTA_PAIRS) != ROBERTA_PAIRS:
            self.cfg.separator_token = None
        model = models.build_model(cfg, self, from_checkpoint)
        model.register_classification_head(self.cfg.classification_head_name, num_classes=self.cfg.num_classes)
        if self.cfg.two_towers and not isinstance(model, LLNRobertaModel):
            raise UserError("two_towers needs a model of this package: --arch lln_roberta_base (model._name)")
        return model

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> Any:
        """Load a split into self.datasets, and return the data set. It is shuffled unless --no-shuffle is set.

        With `group_by_length`, a shuffled split whose name begins with "train" is sorted by length, and rows of the
        same length stay shuffled. A warning says how many rows are cut to max_positions, if any are. Cut rows keep
        </s>, see `cut_sample`. With `combine`, the data of split1, split2, ... are appended.

        UserError is raised if files of the split are damaged, do not fit the dictionaries or have different numbers of
        rows, if a training split has no labels, or if two_towers or strip_eos does not fit the inputs.
        """
        self._check_files(split, combine)
        if self.cfg.two_towers or self.cfg.strip_eos:
            dataset = self._load_inputs(split, combine)
        else:
            dataset = super().load_dataset(split, combine=combine, **kwargs)
            keep_ends_of_cut_samples(dataset)
        cut_rows = count_cut_rows(dataset)
        if cut_rows > 0 and is_first_worker():
            share = cut_rows / len(dataset)
            logger.warning(
                f"split '{split}' of {self.cfg.data}: {cut_rows} of {len(dataset)} rows ({share:.1%}) are cut to "
                f"{self.cfg.max_positions} tokens (task.max_positions)"
            )
        # Validations stay in random order, because dataset.max_valid_steps takes their first batches.
        if self.cfg.group_by_length and split.startswith("train") and isinstance(dataset, SortDataset):
            # The last key is the primary one. The random key before it orders rows of the same length; fairseq shuffles
            # the batches afterwards.
            dataset.sort_order += dataset.sizes
        return dataset

    def _load_inputs(self, split: str, combine: bool) -> Any:
        """Load a split for the options two_towers and strip_eos, which fairseq's task does not have.

        The data set is stored in self.datasets and returned. It is shuffled unless --no-shuffle is set.
        """
        inputs = read_inputs(self, split, INPUTS, combine)
        if not inputs:
            raise UserError(f"cannot load split '{split}' of {self.cfg.data}: could not find dataset: input0")
        if self.cfg.two_towers and len(inputs) < 2:
            raise UserError(f"two_towers needs pairs, but split '{split}' of {self.cfg.data} has no input1")
        if len(inputs) == 2 and not self.cfg.two_towers:
            raise UserError(f"strip_eos needs two_towers for the pairs of {self.cfg.data}")
        dataset = make_samples(self, inputs, read_labels(self, split, combine))
        if not self.cfg.no_shuffle:
            with data_utils.numpy_seed(self.cfg.seed):
                random_order = np.random.permutation(len(dataset))
            dataset = SortDataset(dataset, sort_order=[random_order])
        self.datasets[split] = dataset
        return dataset

    def check_validation_splits(self, splits: Sequence[str]) -> None:
        """Raise UserError if a split has no labels, and warn if the first one is a single row of a regression.

        The splits must be loaded. The first one chooses the best checkpoint.
        """
        for split in splits:
            if not has_targets(self.dataset(split)):
                raise UserError(
                    f"{self._no_labels(split)}; --valid-subset (dataset.valid_subset) must name splits with labels"
                )
        if self.cfg.regression_target and len(self.dataset(splits[0])) == 1:
            logger.warning(
                f"split '{splits[0]}' of {self.cfg.data} has one row: its correlations are 0 in every epoch, so they "
                "cannot choose the best checkpoint. Use more rows, or checkpoint.best_checkpoint_metric=loss"
            )

    def too_long_advice(self, limit: int) -> str:
        return (
            f"set task.shorten_method=truncate and task.max_positions to at most {limit}, or use a larger "
            "dataset.max_tokens"
        )

    def padding_advice(self) -> str:
        if self.cfg.group_by_length:
            return ""
        return "batches of similar lengths: task.group_by_length=true"

    def _check_files(self, split: str, combine: bool) -> None:
        """Raise UserError if the inputs or labels of a split are damaged, or if their numbers of rows differ.

        A split whose name begins with "train" must have labels. If input0 does not exist, nothing is raised, since the
        loading code reports that.
        """
        data = Path(self.cfg.data)
        dictionary = data / "input0/dict.txt"
        rows = check_lines(f"{data / 'input0' / split}", dictionary, combine)
        second_rows = check_lines(f"{data / 'input1' / split}", dictionary, combine)
        if not rows:
            return
        if (data / "input1").is_dir() and second_rows != rows:
            raise UserError(
                f"split '{split}' of {data} has {rows} first and {second_rows} second sentences; prepare the data again"
            )
        if self.cfg.regression_target:
            labels = check_targets(data / f"label/{split}.label", rows, self.cfg.num_classes)
        else:
            labels = check_labels(f"{data / 'label' / split}", self.cfg.num_classes, rows, combine)
        if not labels and split.startswith("train"):
            raise UserError(self._no_labels(split))

    def _no_labels(self, split: str) -> str:
        """Return the message that a split has no labels, which says where they are read from."""
        label = Path(self.cfg.data, "label", split)
        message = f"split '{split}' of {self.cfg.data} has no labels:"
        if self.cfg.regression_target:
            return f"{message} a regression reads {label}.label, one number per line, which does not exist"
        return f"{message} {label}.idx does not exist"

    @property
    def labels(self) -> list[str]:
        """The names of the classes, in the order of their numbers. The list is empty for a regression."""
        return label_names(self)


def _positions_of_checkpoint(cfg: Any) -> int | None:
    """Return the `longest_sequence` of the checkpoint that --finetune-from-model names, or None without that option."""
    try:
        path = cfg.finetune_from_model
    except InterpolationKeyError:  # a task built by a program, without the checkpoint options that this refers to
        return None
    if not path:
        return None
    return longest_sequence(load_checkpoint_lazily(path))
