"""How every program of this package talks: steps on stdout, one line on stderr and an exit code when it fails."""

from collections.abc import Callable

from lln_fairseq.command import UserError, run_main


class DataError(UserError):
    """Bad input or settings, in words for the user: printed as one line, without a traceback."""


def say(message: str) -> None:
    """One step of the program, on stdout; stderr is left to errors and progress bars."""
    print(message, flush=True)


def run_command(program: Callable[[], object]) -> int:
    """The exit code of a program, whatever it returns: see lln_fairseq/command.py."""

    def run() -> None:
        program()

    return run_main(run, "interrupted: finished steps are kept, run the same command again to go on")
