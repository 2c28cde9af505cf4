"""Run a program of this package and turn its errors into exit codes."""

from collections.abc import Callable

from lln_fairseq.command import run_main


def run_command(program: Callable[[], object]) -> int:
    """Run a program and return its exit code: 0, 1 after an error that the user can fix, or 130 after Ctrl-C.

    The return value of the program is ignored. An error that the user can fix is printed as one line on stderr. After
    Ctrl-C, a message says what the same command will not do again. Other exceptions are raised.
    """

    def run() -> None:
        program()

    return run_main(run, "interrupted: run the same command again; finished downloads and data directories are kept")
