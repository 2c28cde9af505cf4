"""Linear Log-Normal attention for fairseq's RoBERTa (arXiv 2311.13541); also the fairseq user directory.

Importing it loads and changes nothing: `lln_fairseq.ops` and `lln_fairseq.attention` need torch alone. fairseq imports
the `tasks` of its user directory, and with them all that registers and what repairs the host; a program that imports
this package before fairseq does calls `register`. `load`, for a trained model that takes text, imports all of it when
it is asked for.
"""

from typing import Any

__version__ = "0.2.0"


def register() -> None:
    """Registers our models, tasks and criterions with fairseq, as `--user-dir lln_fairseq` does; again is harmless."""
    import logging

    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    # fairseq asks for tensorboardX on import, for a task that has nothing to do with this.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.ERROR)
    from lln_fairseq import tasks  # noqa: F401  registers on import

    # Importing fairseq makes the root logger print everything that any library has to say; the caller's choice stands.
    root.setLevel(level)
    root.handlers[:] = handlers


def __getattr__(name: str) -> Any:
    """Import `lln_fairseq.load`, which needs fairseq, when it is first asked for."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()  # before anything else imports fairseq
    from lln_fairseq.inference.text_model import load

    return load
