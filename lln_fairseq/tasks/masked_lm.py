"""Masked language modelling: fairseq's task with its silent failures mended."""

from typing import Any

from fairseq import utils
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from lln_fairseq.tasks._host_fixes import HostFixes, require_files


@register_task("lln_masked_lm", dataclass=MaskedLMConfig)
class LLNMaskedLMTask(HostFixes, MaskedLMTask):
    @classmethod
    def setup_task(cls, cfg: MaskedLMConfig, **kwargs: Any) -> "LLNMaskedLMTask":
        for directory in utils.split_paths(cfg.data):
            require_files(directory, "dict.txt")
        return super().setup_task(cfg, **kwargs)
