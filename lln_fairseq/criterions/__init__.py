"""The criterions that fairseq registers: losses, with the metrics that are logged during a training."""

from lln_fairseq.criterions.sentence_prediction import LLNSentencePredictionCriterion

__all__ = ["LLNSentencePredictionCriterion"]
