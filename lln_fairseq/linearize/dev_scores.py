"""Score a classifier with different attentions on the dev rows of its task, the split "valid"."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn

from lln_fairseq.errors import UserError
from lln_fairseq.inference.evaluate import METRIC_FORMATS, compute_scores, require_short_rows, score_batches
from lln_fairseq.linearize.attention_transfer import swapped_attention
from lln_fairseq.linearize.students import TOKENS_PER_BATCH
from lln_fairseq.linearize.task_rows import TaskRows
from lln_fairseq.terminal import progress_bar


class DevScores:
    """Computes and prints scores of a classifier on the first rows of the split "valid".

    A score is the accuracy, or Spearman's correlation for a regression. Every score has a label that says what was
    scored, and is computed only once. `known` maps each label to its formatted score.
    """

    def __init__(self, model: Any, task: Any, rows: TaskRows, limit: int | None, known: dict[str, str]) -> None:
        """Prepare the scoring of the first `limit` rows, and print their number.

        `known` has formatted scores that were computed before; new ones are added in place. UserError is raised if a
        row is longer than the model allows.
        """
        self.model = model
        self.task = task
        self.rows = rows
        self.known = known
        self.metric = "spearman" if task.cfg.regression_target else "accuracy"
        self.numbers = np.arange(min(limit or len(rows), len(rows)))
        require_short_rows(rows.lengths[self.numbers], rows.longest, rows.split)
        which = f"all {len(rows)}"
        if len(self.numbers) < len(rows):
            which = f"the first {len(self.numbers)} of {len(rows)}"
        print(f"scores on {which} rows of split '{rows.split}' of {rows.directory}:", flush=True)

    def report(self, label: str, attentions: Sequence[nn.Module] | None = None) -> None:
        """Print the score of the model, and compute it first if `known` does not have it under this label.

        `attentions`, one for each layer, take the place of the model's own. UserError is raised if an output is not
        finite.
        """
        if label not in self.known:
            layers = list(self.model.encoder.sentence_encoder.layers)
            if attentions is None:
                attentions = [layer.self_attn.attention for layer in layers]
            with swapped_attention(layers, attentions):
                samples = self._batches(f"score: {label}")
                outputs = score_batches(self.model, self.task, self.rows.split, samples)
            if not outputs.logits.isfinite().all():
                raise UserError(
                    f"{label}: the classifier gives NaN or infinite outputs for split '{self.rows.split}': use another "
                    "teacher, or lower learning rates and another OUT"
                )
            scores = compute_scores(self.task, outputs)
            self.known[label] = METRIC_FORMATS[self.metric].format(scores[self.metric])
        print(format_score(label, self.known[label]), flush=True)

    def _batches(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows as batches in fairseq's form, with a progress bar of this name."""
        with progress_bar(name, len(self.numbers), "row") as bar:
            for numbers in self.rows.batches(self.numbers, TOKENS_PER_BATCH):
                yield self.rows.sample(numbers)
                bar.update(len(numbers))


def format_score(label: str, score: str) -> str:
    """Return a line of a report, with a label and a formatted score."""
    return f"  {label:48s} {score}"
