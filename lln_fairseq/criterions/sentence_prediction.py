"""Loss of sentence classification and regression, with metrics that are right for any number of workers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.sentence_prediction import SentencePredictionConfig
from fairseq.logging import metrics
from torch import Tensor, nn

from lln_fairseq.criterions.scores import Counts, pearson, spearman

COUNTS = ("hits", "predicted", "actual")


@register_criterion("lln_sentence_prediction", dataclass=SentencePredictionConfig)
class LLNSentencePredictionCriterion(FairseqCriterion):
    """Cross-entropy, or squared error with `regression_target`; the loss is that of fairseq's sentence_prediction.

    In validation it logs, in per cent, accuracy, F1 of class 1 (two classes) and the Matthews correlation, or Pearson's
    and Spearman's correlation and their mean; in training the accuracy. fairseq's own criterion computes these from
    lists that several workers cannot add up, and reads the labels as numbers. The report_* options change nothing here.
    """

    def __init__(self, cfg: SentencePredictionConfig, task: Any) -> None:
        super().__init__(task)
        self.head, self.regression = cfg.classification_head_name, cfg.regression_target

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Returns the summed loss, the number of rows, and what `reduce_metrics` needs."""
        logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=self.head)
        targets = model.get_targets(sample, [logits]).view(-1)
        rows = targets.numel()
        if self.regression:
            scores, targets = logits.view(-1).float(), targets.float()
            loss = F.mse_loss(scores, targets, reduction="sum")
            extra = {} if model.training else {"scores": scores.tolist(), "targets": targets.tolist()}
        else:
            loss = F.cross_entropy(logits.float(), targets, reduction="sum")
            counts = Counts.of(logits.argmax(dim=-1), targets, logits.shape[-1])
            extra = {name: getattr(counts, name) for name in COUNTS} | {"evaluated": 0 if model.training else rows}
        log = {"loss": loss.detach(), "ntokens": sample["ntokens"], "nsentences": rows, "sample_size": rows}
        return loss, rows, log | extra

    @staticmethod
    def reduce_metrics(logging_outputs: Sequence[dict[str, Any]]) -> None:
        """Logs the loss in bits a row (squared error a row for a regression, which fairseq divides by ln 2 as well)."""

        def total(key: str) -> Any:
            return sum(log.get(key, 0) for log in logging_outputs)

        rows = total("sample_size")
        metrics.log_scalar("loss", total("loss") / rows / math.log(2), rows, round=3)
        if any("scores" in log for log in logging_outputs):
            _log_correlations(logging_outputs)
        if any("actual" in log for log in logging_outputs):
            metrics.log_scalar("accuracy", 100.0 * total("hits").sum() / rows, rows, round=2)
            if total("evaluated") > 0:
                _log_derived_from_counts(total)

    def logging_outputs_can_be_summed(self) -> bool:
        """Correlations of ranks need every prediction, everything else sums."""
        return not self.regression


def _log_derived_from_counts(total: Any) -> None:
    # A name that begins with "_" is kept from logs; the meters add up over the batches of a validation.
    for name in COUNTS:
        metrics.log_scalar_sum(f"_{name}", total(name).double(), round=None)

    def counts(meters: Any) -> Counts:
        return Counts(*(meters[f"_{name}"].sum for name in COUNTS))

    metrics.log_derived("mcc", lambda meters: round(100 * counts(meters).mcc, 2))
    if total("actual").numel() == 2:
        metrics.log_derived("f1", lambda meters: round(100 * counts(meters).f1, 2))


def _log_correlations(logging_outputs: Sequence[dict[str, Any]]) -> None:
    for name in ("scores", "targets"):
        values = [value for log in logging_outputs for value in log.get(name, ())]
        metrics.log_concat_tensor(f"_{name}", torch.tensor(values, dtype=torch.float64), dim=0)

    def correlation(function: Any) -> Any:
        def derived(meters: Any) -> float:
            return 100 * function(*(meters[f"_{name}"].tensor.numpy() for name in ("scores", "targets")))

        return derived

    metrics.log_derived("pearson", lambda meters: round(correlation(pearson)(meters), 2))
    metrics.log_derived("spearman", lambda meters: round(correlation(spearman)(meters), 2))
    metrics.log_derived(
        "pearson_spearman",
        lambda meters: round((correlation(pearson)(meters) + correlation(spearman)(meters)) / 2, 2),
    )
