"""Linear Log-Normal attention for fairseq's RoBERTa (arXiv 2311.13541); also the fairseq user directory.

Importing it registers the models, tasks and criterions with fairseq. Where fairseq is not installed, `lln_fairseq.ops`
and `lln_fairseq.attention` work all the same.
"""

import importlib.util

if importlib.util.find_spec("fairseq") is not None:
    from lln_fairseq import checkpoint, errors

    errors.show_input_errors_in_one_line()
    checkpoint.allow_fairseq_checkpoints()
    importlib.import_module("lln_fairseq.tasks")
    importlib.import_module("lln_fairseq.models")
