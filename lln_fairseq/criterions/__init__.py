"""fairseq criterions: losses and the metrics that go with them."""

from lln_fairseq.criterions.sentence_prediction import LLNSentencePredictionCriterion

__all__ = ["LLNSentencePredictionCriterion"]
