"""Score a classifier with different attentions on the dev rows of its task, the split "valid"."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq import utils
from torch import Tensor, nn
from tqdm import tqdm

from lln_fairseq.errors import InputError
from lln_fairseq.inference.evaluate import METRIC_FORMATS, SplitOutputs, compute_scores
from lln_fairseq.linearize.attention_transfer import swapped_attention
from lln_fairseq.linearize.layerwise import TOKENS_PER_BATCH
from lln_fairseq.linearize.task_rows import TaskRows


class DevScores:
    """Computes and prints scores of a classifier on the first rows of the split "valid".

    A score is the accuracy, or Spearman's correlation for a regression. Every score has a label that says what was
    scored, and is computed only once. `known` maps each label to its formatted score.
    """

    def __init__(self, model: Any, task: Any, rows: TaskRows, limit: int | None, known: dict[str, str]) -> None:
        """Prepare the scoring, and print the number of rows.

        Args:
            model: the teacher, in evaluation mode
            task: its task
            rows: the split "valid"
            limit: the maximum number of rows to use; None for all
            known: formatted scores that were computed before, by their labels; new scores are added to it in place

        Raises: InputError if a row is longer than the model allows.
        """
        self.model = model
        self.task = task
        self.rows = rows
        self.known = known
        self.metric = "spearman" if task.cfg.regression_target else "accuracy"
        self.numbers = np.arange(min(limit or len(rows), len(rows)))
        longest_row = int(rows.lengths[self.numbers].argmax())
        if rows.lengths[longest_row] > rows.longest:
            where = f"row {longest_row} of split '{rows.split}' of {rows.directory}"
            raise InputError(
                f"{where} has {rows.lengths[longest_row]} tokens, but the teacher takes {rows.longest}: fine-tune it "
                "with task.shorten_method=truncate"
            )
        which = f"all {len(rows)}"
        if len(self.numbers) < len(rows):
            which = f"the first {len(self.numbers)} of {len(rows)}"
        print(f"scores on {which} rows of split '{rows.split}' of {rows.directory}:", flush=True)

    def report(self, label: str, attentions: Sequence[nn.Module] | None = None) -> None:
        """Print the score of the model, and compute it first if `known` does not have it.

        Args:
            label: what is scored; the key in `known`
            attentions: attentions to use instead of the model's own, one per layer; None to use the model's own

        Raises: InputError if an output of the model is not finite.
        """
        if label not in self.known:
            layers = list(self.model.encoder.sentence_encoder.layers)
            if attentions is None:
                attentions = [layer.self_attn.attention for layer in layers]
            with swapped_attention(layers, attentions):
                logits, targets = class_logits(self.model, self.task, self.rows, self.numbers, label)
            if not logits.isfinite().all():
                raise InputError(
                    f"{label}: the classifier gives NaN or infinite outputs for split '{self.rows.split}': use another "
                    "teacher, or lower learning rates and another OUT"
                )
            scores = compute_scores(self.task, SplitOutputs(self.rows.split, logits, targets))
            self.known[label] = METRIC_FORMATS[self.metric].format(scores[self.metric])
        print(format_score(label, self.known[label]), flush=True)


def format_score(label: str, score: str) -> str:
    """Return a line of a report, with a label and a formatted score."""
    return f"  {label:44s} {score}"


@torch.no_grad()
def class_logits(model: Any, task: Any, rows: TaskRows, numbers: np.ndarray, what: str = "") -> tuple[Tensor, Tensor]:
    """Compute a classifier's outputs for some rows of a split.

    Args:
        model: the classifier in evaluation mode
        task: its task
        rows: the split
        numbers: the numbers of the rows (rows,), without duplicates
        what: the text of the progress bar; empty for no progress bar

    Returns: the logits (rows, classes) float32, and the targets (rows,), both on the CPU and in the order of `numbers`
    """
    head = task.cfg.classification_head_name
    device = next(model.parameters()).device
    position_of = {number: position for position, number in enumerate(numbers.tolist())}
    positions: list[int] = []
    logits = []
    targets = []
    disable = None if what else True
    with tqdm(total=len(numbers), desc=f"score: {what}", unit=" rows", leave=False, disable=disable) as bar:
        for batch in rows.batches(numbers, TOKENS_PER_BATCH):
            sample = utils.apply_to_sample(lambda value: value.to(device), rows.sample(batch))
            outputs, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
            logits.append(outputs.float().cpu())
            targets.append(sample["target"].view(-1).cpu())
            positions += [position_of[number] for number in batch.tolist()]
            bar.update(len(batch))
    order = torch.tensor(positions).argsort()
    return torch.cat(logits)[order], torch.cat(targets)[order]
