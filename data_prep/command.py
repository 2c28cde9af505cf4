"""How every program of this package talks: steps on stdout, one line on stderr and an exit code when it fails."""

from collections.abc import Callable

from lln_fairseq.command import UserError, run_main


class DataError(UserError):
    """Bad input or settings, in words for the user: printed as one line, without a traceback."""


def say(message: str) -> None:
    """One step of the program, on stdout; stderr is left to errors and progress bars."""
    print(message, flush=True)


def run_command(program: Callable[[], object]) -> int:
    """Run `program` and return the exit code: 0 done, 1 a foreseeable failure (one line on stderr), 130 Ctrl-C.

    Foreseeable are DataError, OSError (full disk, permissions) and a missing dependency. Anything else is a bug and
    keeps its traceback.
    """
    try:
        program()
    except KeyboardInterrupt:
        print("interrupted: finished steps are kept, run the same command again to go on", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        print(f"error: {error} (pip install -r requirements.txt)", file=sys.stderr)
        return 1
    except (DataError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0
