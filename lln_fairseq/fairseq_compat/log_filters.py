"""Log fairseq's messages for its own developers at level DEBUG instead of INFO.

Before its first update, fairseq logs the whole configuration in one line of several kB, the listing of the model and
dozens of lines on the progress of its functions. training/summary.py logs what a user wants to know instead. The
messages appear again with LOGLEVEL=DEBUG, or with hydra.verbose=true under Hydra.
"""

import logging

from omegaconf import DictConfig
from torch import nn

OBJECTS = (DictConfig, nn.Module)  # fairseq_cli.train logs its configuration and the model as objects
# The first words of the messages, by logger; empty: all messages of the logger.
DETAILS: dict[str, tuple[str, ...]] = {
    "fairseq.checkpoint_utils": ("Preparing to save", "State of "),
    "fairseq.data.data_utils": (),
    "fairseq.data.iterators": (),
    "fairseq.models.roberta.model": (),
    "fairseq.tasks.fairseq_task": (),
    "fairseq.tasks.masked_lm": (),
    "fairseq.tasks.sentence_prediction": (),
    "fairseq.trainer": (
        "Finished saving",
        "No existing checkpoint",
        "Preparing to load",
        "Saving checkpoint to",
        "begin training epoch",
        "detected shared parameter",
        "loading train data",
    ),
    "fairseq.utils": ("--user-dir=",),
    "fairseq_cli.train": (
        "Start iterating",
        "begin dry-run validation",
        "begin validation",
        "criterion: ",
        "max tokens per device",
        "model: ",
        "num. ",
        "task: ",
        "training on ",
    ),
}


def demote_details(record: logging.LogRecord) -> bool:
    """Change the level of a record that matches DETAILS from INFO to DEBUG, in place.

    The result is False, which drops the record, if its logger does not log DEBUG then.
    """
    if record.levelno != logging.INFO:
        return True
    beginnings = DETAILS[record.name]
    is_detail = not beginnings or isinstance(record.msg, OBJECTS) or str(record.msg).startswith(beginnings)
    if not is_detail:
        return True
    record.levelno = logging.DEBUG
    record.levelname = "DEBUG"
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


def install_filters() -> None:
    """Add the filter to every logger in DETAILS. A second call does nothing."""
    for name in DETAILS:
        logging.getLogger(name).addFilter(demote_details)
