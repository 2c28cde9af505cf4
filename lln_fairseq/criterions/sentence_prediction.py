"""The loss of sentence classification and regression, with metrics that are correct for any number of workers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.sentence_prediction import SentencePredictionConfig
from fairseq.logging import metrics
from torch import Tensor

from lln_fairseq.scores import ClassCounts, pearson, spearman

COUNTS = ("hits", "predicted", "actual")  # the fields of ClassCounts
PREDICTIONS = ("scores", "targets")  # the predicted and the actual value of every row of a regression


@register_criterion("lln_sentence_prediction", dataclass=SentencePredictionConfig)
class LLNSentencePredictionCriterion(FairseqCriterion):
    """The loss of fairseq's sentence_prediction: cross-entropy or, with `regression_target`, the squared error.

    Metrics are logged in percent. For a classification, training logs the accuracy. Validation logs the accuracy, the
    Matthews correlation and, if there are two classes, F1 of class 1. For a regression, training logs no metric, and
    validation logs Pearson's and Spearman's correlations and their mean.

    fairseq's own criterion collects these metrics in lists, which cannot be summed over workers, and it parses the
    names of labels as numbers. Its options report_* have no effect here.
    """

    def __init__(self, cfg: SentencePredictionConfig, task: Any) -> None:
        super().__init__(task)
        self.head = cfg.classification_head_name
        self.regression = cfg.regression_target

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the loss summed over the rows of a batch, (), the number of rows, and the logging output.

        The sample must have targets. `reduce` is ignored: the loss is always summed.
        """
        logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=self.head)
        targets = model.get_targets(sample, [logits]).view(-1)
        rows = targets.numel()
        extra: dict[str, Any] = {}
        if self.regression:
            scores = logits.view(-1).float()
            targets = targets.float()
            loss = F.mse_loss(scores, targets, reduction="sum")
            if not model.training:
                extra["scores"] = scores.tolist()
                extra["targets"] = targets.tolist()
        else:
            loss = F.cross_entropy(logits.float(), targets, reduction="sum")
            counts = ClassCounts.from_predictions(logits.argmax(dim=-1), targets, logits.shape[-1])
            for name in COUNTS:
                extra[name] = getattr(counts, name)
            extra["evaluated"] = 0 if model.training else rows
        log = {"loss": loss.detach(), "ntokens": sample["ntokens"], "nsentences": rows, "sample_size": rows, **extra}
        return loss, rows, log

    @staticmethod
    def reduce_metrics(logging_outputs: Sequence[dict[str, Any]]) -> None:
        """Log the loss and the metrics of all batches and workers.

        The loss of a classification is the cross-entropy per row in bits. The loss of a regression is the squared error
        per row, which is also divided by ln 2, as in fairseq.
        """
        rows = _total(logging_outputs, "sample_size")
        metrics.log_scalar("loss", _total(logging_outputs, "loss") / rows / math.log(2), rows, round=3)
        if any("scores" in log for log in logging_outputs):
            _log_correlations(logging_outputs)
        if any("actual" in log for log in logging_outputs):
            accuracy = 100.0 * _total(logging_outputs, "hits").sum() / rows
            metrics.log_scalar("accuracy", accuracy, rows, round=2)
            if _total(logging_outputs, "evaluated") > 0:
                _log_metrics_of_counts(logging_outputs)

    def logging_outputs_can_be_summed(self) -> bool:
        """Return True for a classification, and False for a regression, whose correlations need every prediction.

        If the result is True, fairseq sums the logging outputs over the workers. Otherwise it gathers them.
        """
        return not self.regression


def _total(logging_outputs: Sequence[dict[str, Any]], key: str) -> Any:
    return sum(log.get(key, 0) for log in logging_outputs)


def _log_metrics_of_counts(logging_outputs: Sequence[dict[str, Any]]) -> None:
    """Log the Matthews correlation and, if there are two classes, F1 of class 1, both in percent.

    Both are computed over all batches of a validation. To this end, the counts are logged under names that begin with
    "_", which fairseq does not print. fairseq's meters sum the counts over the batches, and the metrics are computed
    from the sums.
    """
    for name in COUNTS:
        metrics.log_scalar_sum(f"_{name}", _total(logging_outputs, name).double(), round=None)

    def counts(meters: Any) -> ClassCounts:
        return ClassCounts(*(meters[f"_{name}"].sum for name in COUNTS))

    metrics.log_derived("mcc", lambda meters: round(100 * counts(meters).mcc, 2))
    if _total(logging_outputs, "actual").numel() == 2:
        metrics.log_derived("f1", lambda meters: round(100 * counts(meters).f1, 2))


def _log_correlations(logging_outputs: Sequence[dict[str, Any]]) -> None:
    """Log Pearson's and Spearman's correlations and their mean, in percent.

    They are computed over all batches of a validation. To this end, the predictions and targets are logged under names
    that begin with "_", which fairseq does not print. fairseq's meters concatenate the batches, and the correlations
    are computed from all values.
    """
    for name in PREDICTIONS:
        values: list[float] = []
        for log in logging_outputs:
            values.extend(log.get(name, ()))
        metrics.log_concat_tensor(f"_{name}", torch.tensor(values, dtype=torch.float64), dim=0)

    def percent(correlation: Any, meters: Any) -> float:
        scores, targets = (meters[f"_{name}"].tensor.numpy() for name in PREDICTIONS)
        return 100 * correlation(scores, targets)

    metrics.log_derived("pearson", lambda meters: round(percent(pearson, meters), 2))
    metrics.log_derived("spearman", lambda meters: round(percent(spearman, meters), 2))
    metrics.log_derived(
        "pearson_spearman",
        lambda meters: round((percent(pearson, meters) + percent(spearman, meters)) / 2, 2),
    )
