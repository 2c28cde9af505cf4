"""The model that is made faster, and its rows: what all others are compared with."""

import argparse
import shutil
import statistics
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lln_fairseq.checkpoints.config import STOCK_ATTENTION
from lln_fairseq.conversion.convert import CHECKPOINT, convert
from lln_fairseq.conversion.directory import CONFIG, read_json
from lln_fairseq.conversion.export import export
from lln_fairseq.conversion.sentence_transformers_files import locate_model, read_max_length
from lln_fairseq.errors import UserError
from lln_fairseq.inference.text_model import load_text_model
from lln_fairseq.speedup.journal import Journal
from lln_fairseq.speedup.quality import Accuracy, Agreement, Correlation, Cosine, Metric, Ndcg
from lln_fairseq.speedup.rows import MOST, MOST_ROWS, Rows, number_labels, split_rows
from lln_fairseq.speedup.runtimes import (
    REPEATS,
    TRANSFORMERS,
    Outputs,
    load_served,
    memory_of,
    outputs_for_rows,
    time_each,
)
from lln_fairseq.terminal import print_status, progress_bar
from lln_fairseq.text.pairs import first_segment_lengths
from lln_fairseq.text.samples import cut_sample
from lln_fairseq.text.special_symbols import EOS

UNCHANGED = "unchanged"
SCORING_SHARE = 0.08  # of the minutes, for the original on the validation rows, or on the test rows
TIMING_SHARE = 0.02  # for the times of a model
TIMED_BATCHES = (5, 15)  # fewest and most
SCORED_ROWS = 8  # rows that are computed at once to score them
SCORED_TOKENS = 8192  # of them, at most
FEWEST_GROUPS = 5  # of rows that are scored
FREE_COPIES = 12  # of the original, which the disk must have room for


class Original:
    """The original with softmax, loaded and measured in transformers, and its rows.

    Attributes:
        rows: at most MOST_ROWS of those that were given.
        notes: sentences for the report.
        checkpoint: the converted original.
        teacher: the checkpoint, loaded.
        is_encoder: True for sentence vectors.
        longest: the number of tokens at which texts are cut.
        directory, model: the original as it is served, and its outputs.
        samples: the ids of each row, int64 (N,).
        lengths, first_lengths: the tokens of each row and of its first text, (rows,).
        splits, scored: the numbers of the rows of each split, and of those of "valid" and "test" that are scored.
        timed: batches of texts.
        milliseconds, memory: per text, and of a call with the longest text in MB.
    """

    def __init__(self, args: argparse.Namespace, journal: Journal, rows: Rows) -> None:
        """Load the original, check and split the rows, and measure the original on them."""
        self.args = args
        self.journal = journal
        self.rows = rows.first(MOST_ROWS)
        self.notes: list[str] = []
        if len(rows) > MOST_ROWS:
            self.notes.append(f"Only the first {MOST_ROWS:,} of {len(rows):,} rows were used.")
        self.checkpoint = journal.folder / "softmax" / CHECKPOINT
        self._require_disk_space()
        self.directory = self._convert()
        self.teacher = load_text_model(self.checkpoint, precision="float32")  # it is trained further
        if not self.teacher.finetuned and not self.teacher.is_sentence_encoder:
            raise UserError(f"{args.model} is a masked language model: fine-tune it first")
        self.is_encoder = not self.teacher.finetuned
        if self.is_encoder != (args.texts is not None):
            if self.is_encoder:
                raise UserError(f"{args.model} is an encoder: give --texts")
            raise UserError(f"{args.model} is a classifier: give --rows and --text")
        self.numbers: np.ndarray | None = None
        if self.rows.labels is not None:
            self.numbers = number_labels(self.rows.labels, self.teacher.labels, args.label)
        self.longest = min(self.teacher.longest, _tokenizer_limit(self.directory))
        self.model = load_served(self.directory, TRANSFORMERS, self.longest, self.is_encoder)
        self.samples = self._encode_rows()
        self.lengths = np.array([len(sample) for sample in self.samples])
        pair_form = self.teacher.model.args.pair_form
        firsts = [first_segment_lengths(sample[None], EOS, pair_form) for sample in self.samples]
        self.first_lengths = torch.cat(firsts).numpy()
        self.splits = split_rows(self.rows, args.seed)
        self.timed = self._choose_timed_batches()
        measured: tuple[float, float | None] = journal.once("original", self._measure)
        self.milliseconds, self.memory = measured
        most = int(SCORING_SHARE * 60 * args.minutes / (self.milliseconds / 1000))
        counts = {split: min(MOST[split], max(most, 100)) for split in MOST}
        self.scored = {split: self.first_rows(split, counts[split]) for split in MOST}
        self.qualities: dict[str, Metric] = {}
        print_status(
            f"{args.model}: {self.milliseconds:.1f} ms per text of {np.median(self.lengths):.0f} tokens in "
            f"{TRANSFORMERS}; of {len(self.rows):,} rows, {len(self.splits['train']):,} train, "
            f"{len(self.scored['valid']):,} validate and {len(self.scored['test']):,} test"
        )

    def _require_disk_space(self) -> None:
        """Raise UserError if the disk of OUT cannot hold FREE_COPIES of the original."""
        model = self.args.model
        files = [model] if model.is_file() else [path for path in model.rglob("*") if path.is_file()]
        needed = FREE_COPIES * max((path.stat().st_size for path in files), default=0)
        free = shutil.disk_usage(self.journal.folder).free
        if free < needed and not self.checkpoint.exists():
            raise UserError(f"{self.args.out}: the search needs {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} are free")

    def _convert(self) -> Path:
        """Write `checkpoint`, and return the directory of the original as it is served."""
        directory: Path = self.args.model
        if directory.is_file():
            directory = self.journal.folder / "stock"  # `convert` drops the head of a checkpoint
            if not directory.exists():
                export(self.args.model, directory)
        attention = read_json(locate_model(directory)[1] / CONFIG).get("attention", STOCK_ATTENTION)
        if attention != STOCK_ATTENTION:
            raise UserError(f"{self.args.model} has {attention} attention: give the model with softmax that it is from")
        if not self.checkpoint.exists():
            convert(directory, self.checkpoint.parent, attention=STOCK_ATTENTION)
        return directory

    def _encode_rows(self) -> list[Tensor]:
        """Return the ids of each row, cut where the original cuts. Raises UserError if most rows are longer."""
        samples = self.teacher.ids.encode_rows(self.rows.texts)
        too_long = sum(len(sample) > self.longest for sample in samples)
        if 2 * too_long > len(samples):
            raise UserError(
                f"{too_long:,} of {len(samples):,} rows have more than the {self.longest} tokens that "
                f"{self.args.model} reads: `lln-fairseq convert --positions N` makes a longer one, to be fine-tuned"
            )
        if too_long:
            self.notes.append(f"{too_long:,} of {len(samples):,} rows are cut to the model's {self.longest} tokens.")
        return [cut_sample(sample, self.longest) for sample in samples]

    def first_rows(self, split: str, count: int) -> np.ndarray:
        """Return the numbers of the first rows of a split, at least FEWEST_GROUPS whole groups if there are any."""
        numbers = self.splits[split]
        if self.rows.groups is None:
            return numbers[:count]
        groups = np.asarray(self.rows.groups)[numbers]
        stops = [*np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(numbers)]
        enough = [stop for stop in stops[FEWEST_GROUPS - 1 :] if stop >= count]
        return numbers[: enough[0] if enough else len(numbers)]

    def _choose_timed_batches(self) -> list[list[tuple[str, ...]]]:
        """Return batches of the validation rows whose lengths are spread evenly over those of all of them."""
        numbers = self.splits["valid"]
        ordered = numbers[self.lengths[numbers].argsort(kind="stable")]
        middle = [self.rows.texts[ordered[len(ordered) // 2]]]
        trial = self.journal.once("trial", lambda: time_each({TRANSFORMERS: self.model}, [middle])[TRANSFORMERS])
        few, most = TIMED_BATCHES
        batch = min(self.args.batch, len(ordered))
        seconds = 4 * REPEATS * batch * trial[0] / 1000  # for a batch, beside the original
        count = int(np.clip(TIMING_SHARE * 60 * self.args.minutes / seconds, few, most))
        places = np.linspace(0, len(ordered) - batch, count).round().astype(int)
        return [[self.rows.texts[number] for number in ordered[place : place + batch]] for place in places]

    @cached_property
    def longest_text(self) -> list[tuple[str, ...]]:
        """A batch of the row with the most tokens, on which memory is measured."""
        return [self.rows.texts[int(self.lengths.argmax())]]

    def _measure(self) -> tuple[float, float | None]:
        """Return the milliseconds per text, and the memory of the longest text in MB, None if unknown."""
        memory = memory_of(self.model, self.longest_text)
        return statistics.median(time_each({TRANSFORMERS: self.model}, self.timed)[TRANSFORMERS]), memory

    def time_interleaved(self, model: Outputs) -> dict[str, list[float]]:
        """Return the milliseconds per text of "original" and "model" for each timed batch."""
        return time_each({"original": self.model, "model": model}, self.timed)

    def time_beside(self, model: Outputs) -> float:
        """Return the milliseconds per text of a model: the original's, times the median quotient of calls in turn."""
        times = self.time_interleaved(model)
        shares = [own / original for own, original in zip(times["model"], times["original"], strict=True)]
        return self.milliseconds * statistics.median(shares)

    def outputs_of(self, name: str, model: Outputs, split: str) -> Tensor:
        """Return the outputs of a model for the rows of a split that are scored; the journal keeps them by `name`."""
        texts = [self.rows.texts[number] for number in self.scored[split]]
        rows_at_once = int(np.clip(SCORED_TOKENS // self.lengths.max(), 1, SCORED_ROWS))

        def compute() -> Tensor:
            with progress_bar(f"{name}: {split} rows", len(texts), "row") as bar:
                return outputs_for_rows(model, texts, rows_at_once, bar.update)

        return self.journal.tensor_once(f"{split} {name}".replace("/", " "), compute)

    def quality(self, split: str) -> Metric:
        """Return the metric for the scored rows of a split, always the same object."""
        if split not in self.qualities:
            self.qualities[split] = self._make_quality(split)
        return self.qualities[split]

    def _make_quality(self, split: str) -> Metric:
        """Return the metric that suits the kind of the model, and labels or groups if the rows have them."""
        original = self.outputs_of(UNCHANGED, self.model, split)
        rows = self.scored[split]
        against_original = 100 - self.args.min_agreement
        if self.is_encoder:
            return Cosine(original, against_original)
        if self.numbers is None:
            if self.teacher.labels:
                return Agreement(original, against_original)
            return Correlation(original, against_original, original.view(-1).numpy())
        targets = self.numbers[rows]
        if self.teacher.labels:
            return Accuracy(original, self.args.max_drop, targets)
        if self.rows.groups is not None:
            return Ndcg(original, self.args.max_drop, targets, [self.rows.groups[row] for row in rows])
        return Correlation(original, self.args.max_drop, targets)


def _tokenizer_limit(directory: Path) -> int:
    """Return the number of tokens at which the tokenizer cuts texts, which may be more than the model's positions."""
    from transformers import AutoTokenizer

    longest = read_max_length(locate_model(directory)[1])
    return longest or int(AutoTokenizer.from_pretrained(directory).model_max_length)
