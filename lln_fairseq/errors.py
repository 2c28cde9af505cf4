"""The exceptions that a user can fix, which all programs report in one line, without a traceback."""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """Wrong input or settings. The message is for the user."""


class TrainingError(UserError, FloatingPointError):
    """A training run that cannot continue, for example because of NaN, infinite gradients or a lost worker."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its class if the message is empty."""
    lines = str(error).splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError or FileNotFoundError in the `with` block into a UserError.

    Use this around code that builds models from options or loads files, where these exceptions are the user's mistakes.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"no such file: {error.filename or error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
