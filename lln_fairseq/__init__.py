"""Linear Log-Normal attention for fairseq's RoBERTa (arXiv 2311.13541); also the fairseq user directory.

Importing it registers the models, tasks and criterions with fairseq. Where fairseq is not installed, `lln_fairseq.ops`
and `lln_fairseq.attention` work all the same.
"""

import importlib.util
import logging


def _register_with_fairseq() -> None:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    # fairseq asks for tensorboardX on import, for a task that has nothing to do with this.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.ERROR)
    from lln_fairseq import checkpoint, criterions, errors, host_patches, models, tasks  # noqa: F401  some register

    # Importing fairseq makes the root logger print everything that any library has to say; the caller's choice stands.
    root.setLevel(level)
    root.handlers[:] = handlers
    errors.show_input_errors_in_one_line()
    checkpoint.allow_fairseq_checkpoints()
    host_patches.apply()


if importlib.util.find_spec("fairseq") is not None:
    _register_with_fairseq()
