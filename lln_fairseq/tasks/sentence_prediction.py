"""Classification and regression of sentences and pairs: fairseq's task with its silent failures mended."""

from typing import Any

from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from lln_fairseq.tasks._host_fixes import HostFixes, require_files


@register_task("lln_sentence_prediction", dataclass=SentencePredictionConfig)
class LLNSentencePredictionTask(HostFixes, SentencePredictionTask):
    @classmethod
    def setup_task(cls, cfg: SentencePredictionConfig, **kwargs: Any) -> "LLNSentencePredictionTask":
        require_files(cfg.data, "input0/dict.txt")
        if not cfg.regression_target:
            require_files(cfg.data, "label/dict.txt")
        return super().setup_task(cfg, **kwargs)
