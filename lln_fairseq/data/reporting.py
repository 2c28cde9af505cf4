"""Define how programs report to their user: status lines on stdout, and an exception for bad input."""

from lln_fairseq.command import UserError


class DataError(UserError):
    """Bad input or bad settings that the user can fix. Programs print the message as one line, without a traceback."""


def print_status(message: str) -> None:
    """Print a status line on stdout and flush it. Errors and progress bars are printed on stderr instead."""
    print(message, flush=True)
