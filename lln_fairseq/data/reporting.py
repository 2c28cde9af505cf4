"""How the data programs report to the user: status lines on stdout, and one exception for bad input."""

from lln_fairseq.command import UserError


class DataError(UserError):
    """Bad input or bad settings that the user can fix. Programs print the message as one line, without a traceback."""


def print_status(message: str) -> None:
    """Print a status line on stdout at once. Errors and progress bars go to stderr instead."""
    print(message, flush=True)
