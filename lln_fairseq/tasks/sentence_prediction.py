"""Classification and regression of sentences and pairs: fairseq's task without its silent failures."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from fairseq.data import SortDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from omegaconf import II, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError

from lln_fairseq.checkpoints.compatibility import label_names, longest_sequence
from lln_fairseq.data.checks import check_labels, check_lines, check_targets, read_symbols, require_same_symbols
from lln_fairseq.data.sentence_inputs import make_samples, read_inputs, read_labels
from lln_fairseq.errors import InputError, input_errors
from lln_fairseq.models import LLNRobertaModel
from lln_fairseq.training.hooked_task import HookedTask, require_files
from lln_fairseq.training.options import TrainingOptions

INPUTS = ("input0", "input1")
POSITIONS = 512  # RoBERTa's


@dataclass
class LLNSentencePredictionConfig(TrainingOptions, SentencePredictionConfig):
    """fairseq's options and ours."""

    max_positions: Optional[int] = field(
        default=None, metadata={"help": f"max tokens per example; default: those of the checkpoint, or {POSITIONS}"}
    )
    group_by_length: bool = field(
        default=False,
        metadata={
            "help": "batches of sentences of like lengths: less padding to compute; default: fairseq's, by chance"
        },
    )
    two_towers: bool = field(
        default=False,
        metadata={
            "help": "both inputs go through the encoder by themselves, and the head sees [a, b, a∘b, a-b] of their "
            "vectors; default: one sequence of both"
        },
    )
    strip_eos: bool = field(default=False, metadata={"help": "leave out the </s> that ends each input"})
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")


@register_task("lln_sentence_prediction", dataclass=LLNSentencePredictionConfig)
class LLNSentencePredictionTask(HookedTask, SentencePredictionTask):
    @classmethod
    def setup_task(cls, cfg: LLNSentencePredictionConfig, **kwargs: Any) -> "LLNSentencePredictionTask":
        """Raises InputError for data without dictionaries, or with another number of labels than num_classes."""
        require_files(cfg.data, "input0/dict.txt")
        dictionaries = [Path(cfg.data, folder, "dict.txt") for folder in INPUTS]
        require_same_symbols(*(path for path in dictionaries if path.is_file()))
        if cfg.num_classes < 1:
            raise InputError("the number of classes is missing: --num-classes (task.num_classes)")
        if not cfg.regression_target:
            require_files(cfg.data, "label/dict.txt")
            read_symbols(Path(cfg.data, "label/dict.txt"))
        if cfg.max_positions is None:
            cfg.max_positions = _positions_of_checkpoint(cfg) or POSITIONS
        with input_errors():
            task = super().setup_task(cfg, **kwargs)
        for option in ("init_token", "separator_token"):
            token = getattr(cfg, option)
            largest = len(task.source_dictionary) - 1
            if token is not None and not 0 <= token <= largest:
                raise InputError(f"task.{option} is {token}, and must be in [0, {largest}]: the ids of {cfg.data}")
        if not cfg.regression_target and len(task.labels) != cfg.num_classes:
            raise InputError(
                f"num_classes is {cfg.num_classes}, but {cfg.data}/label/dict.txt has {len(task.labels)} labels: "
                f"{', '.join(task.labels[:8])}"
            )
        return task

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> Any:
        """Raises InputError where the files of the split are damaged, or do not fit the dictionaries or each other."""
        self._check(split, combine)
        if self.cfg.two_towers or self.cfg.strip_eos:
            dataset = self._load_inputs(split, combine)
        else:
            dataset = super().load_dataset(split, combine=combine, **kwargs)
        if self.cfg.group_by_length and isinstance(dataset, SortDataset):
            dataset.sort_order += dataset.sizes  # the last key counts first; which batch comes when stays chance
        return dataset

    def _load_inputs(self, split: str, combine: bool) -> Any:
        """Load what fairseq cannot, see data/sentence_inputs.py; shuffled as fairseq does."""
        inputs = read_inputs(self, split, INPUTS, combine)
        if not inputs:
            raise InputError(f"cannot load split '{split}' of {self.cfg.data}: could not find dataset: input0")
        if self.cfg.two_towers and len(inputs) < 2:
            raise InputError(f"two_towers needs pairs, and split '{split}' of {self.cfg.data} has no input1")
        if len(inputs) == 2 and not self.cfg.two_towers:
            raise InputError(f"{self.cfg.data} has pairs, and strip_eos takes them with two_towers alone")
        dataset = make_samples(self, inputs, read_labels(self, split, combine))
        if not self.cfg.no_shuffle:
            with data_utils.numpy_seed(self.cfg.seed):
                shuffle = np.random.permutation(len(dataset))
            dataset = SortDataset(dataset, sort_order=[shuffle])
        self.datasets[split] = dataset
        return dataset

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """The model is told that the task has two towers. Raises: InputError for one of fairseq's, which cannot."""
        if self.cfg.two_towers or "two_towers" in cfg:
            with open_dict(cfg) if OmegaConf.is_config(cfg) else nullcontext():
                cfg.two_towers = self.cfg.two_towers
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.two_towers and not isinstance(model, LLNRobertaModel):
            raise InputError("two_towers needs a model of ours: --arch lln_roberta_base (model._name)")
        return model

    def padding_advice(self) -> str:
        return "" if self.cfg.group_by_length else "batches of like lengths: task.group_by_length=true"

    def _check(self, split: str, combine: bool) -> None:
        data, dictionary = Path(self.cfg.data), Path(self.cfg.data, "input0/dict.txt")
        rows = {folder: check_lines(f"{data / folder / split}", dictionary, combine) for folder in INPUTS}
        if not rows["input0"]:
            return  # fairseq says that it is missing
        if (data / "input1").is_dir() and rows["input1"] != rows["input0"]:
            numbers = f"{rows['input0']} first and {rows['input1']} second sentences"
            raise InputError(f"split '{split}' of {data} has {numbers}; prepare the data again")
        if self.cfg.regression_target:
            labelled = check_targets(data / f"label/{split}.label", rows["input0"], self.cfg.num_classes)
        else:
            labelled = check_labels(f"{data / 'label' / split}", self.cfg.num_classes, rows["input0"], combine)
        if not labelled and split.startswith("train"):
            raise InputError(f"split '{split}' of {data} has no labels; prepare the data again")

    @property
    def labels(self) -> list[str]:
        """See `label_names`."""
        return label_names(self)


def _positions_of_checkpoint(cfg: Any) -> int | None:
    try:
        path = cfg.finetune_from_model
    except InterpolationKeyError:  # a task that somebody builds by hand, without the other groups
        return None
    return longest_sequence(path) if path else None
