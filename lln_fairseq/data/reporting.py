"""How the data programs talk to the user: steps on stdout, and one error type for bad input."""

from lln_fairseq.command import UserError


class DataError(UserError):
    """Bad input or settings, in words for the user: printed as one line, without a traceback."""


def say(message: str) -> None:
    """Print one step of the program on stdout; stderr is left to errors and progress bars."""
    print(message, flush=True)
