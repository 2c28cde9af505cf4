"""Make transformers know this package's models: `import lln_fairseq.hub`.

After the import, AutoConfig, AutoModel, AutoModelForMaskedLM and AutoModelForSequenceClassification open directories
that `lln-fairseq export` wrote without trust_remote_code, and so do `pipeline` and sentence-transformers. Of other
packages, only torch and transformers are needed.
"""

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from lln_fairseq.conversion.modeling_lln_roberta import (
    LLNRobertaConfig,
    LLNRobertaForMaskedLM,
    LLNRobertaForSequenceClassification,
    LLNRobertaModel,
)

AutoConfig.register(LLNRobertaConfig.model_type, LLNRobertaConfig, exist_ok=True)
for _auto_class, _model_class in (
    (AutoModel, LLNRobertaModel),
    (AutoModelForMaskedLM, LLNRobertaForMaskedLM),
    (AutoModelForSequenceClassification, LLNRobertaForSequenceClassification),
):
    _auto_class.register(LLNRobertaConfig, _model_class, exist_ok=True)
