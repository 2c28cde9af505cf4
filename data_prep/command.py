"""Run a program of this package and turn its errors into exit codes."""

from collections.abc import Callable

from lln_fairseq.command import run_main


def run_command(program: Callable[[], object]) -> int:
    """Run a program, ignore what it returns, and return the exit code.

    Errors that the user can fix are reported as one line on stderr (see lln_fairseq.command.run_main). After Ctrl-C the
    message says that the same command resumes the program.
    """

    def run() -> None:
        program()

    return run_main(run, "interrupted: finished steps are kept; run the same command again to continue")
