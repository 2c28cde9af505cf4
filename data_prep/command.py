"""Run a program of this package and turn its errors into exit codes."""

from collections.abc import Callable

from lln_fairseq.command import run_main


def run_command(program: Callable[[], object]) -> int:
    """Run a program, ignore what it returns, and return the exit code.

    The exit code is 0, or that of the error that lln_fairseq.command.run_main reports in one line on stderr. After
    Ctrl-C the message says that running the same command again continues with the next unfinished step.
    """

    def run() -> None:
        program()

    return run_main(run, "interrupted: finished steps are kept; run the same command again to continue")
