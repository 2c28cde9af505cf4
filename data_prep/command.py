"""How every program of this package ends."""

from collections.abc import Callable

from lln_fairseq.command import run_main


def run_command(program: Callable[[], object]) -> int:
    """The exit code of a program, whatever it returns: see lln_fairseq/command.py."""

    def run() -> None:
        program()

    return run_main(run, "interrupted: finished steps are kept, run the same command again to go on")
