"""Define the criterions of this package: losses, with the metrics that are logged during training."""

from lln_fairseq.criterions.sentence_prediction import LLNSentencePredictionCriterion

__all__ = ["LLNSentencePredictionCriterion"]
