"""One line for what the user can mend, a traceback for what we must."""

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType

from hydra.errors import CompactHydraException


class InputError(CompactHydraException, ValueError):
    """Bad input: Hydra prints it without a traceback because of its base class, fairseq-train because of our hook."""


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Turns the ValueErrors and missing files of building and loading into InputErrors."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"no such file: {error.filename or error}") from error
    except ValueError as error:
        raise InputError(str(error)) from error


def show_input_errors_in_one_line() -> None:
    """Lets an InputError that nobody catches end the program with its message alone and exit code 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, InputError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook
