"""Linear Log-Normal attention (arXiv 2311.13541) for fairseq's RoBERTa, as a package and as a fairseq user directory.

Importing the package imports nothing else and changes nothing. `lln_fairseq.ops` and `lln_fairseq.attention` need only
torch. As a user directory (`--user-dir lln_fairseq`), fairseq imports `lln_fairseq.tasks`, which registers models,
tasks and criterions and patches fairseq. A program that imports this package before fairseq calls `register` instead.
"""

from typing import Any

__version__ = "0.3.0"


def register() -> None:
    """Register the package's models, tasks and criterions with fairseq, as `--user-dir lln_fairseq` does.

    Importing fairseq changes the root logger so that the messages of every library are printed; its level and handlers
    are restored. Further calls do nothing.
    """
    import logging
    import warnings

    root = logging.getLogger()
    level = root.level
    handlers = root.handlers[:]
    # On import, fairseq warns that tensorboardX is missing, for a task that this package does not use.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # fairseq uses torch.jit.script, of which torch 2.14 warns every user.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        from lln_fairseq import tasks  # noqa: F401  registers on import

    root.setLevel(level)
    root.handlers[:] = handlers


def __getattr__(name: str) -> Any:
    """Import `lln_fairseq.load`, the function `load_text_model`, when it is first used: it needs fairseq."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lln_fairseq.inference.text_model import load_text_model

    return load_text_model
