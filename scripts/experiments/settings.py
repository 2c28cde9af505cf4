"""Format, parse, store and compare the settings of a run. Settings are Hydra overrides such as `common.seed=1`."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from lln_fairseq.command import UserError
from lln_fairseq.data.files import write_bytes
from lln_fairseq.training.recipes import CONFIGS

SETTINGS_FILE = "settings.json"  # stored next to a result
# Settings that do not change a result: the device, the directory, and the names of the scored splits.
WITHOUT_EFFECT = ("run=", "checkpoint.save_dir=", "--split=")


def format_override(option: str, value: str | Path) -> str:
    """Return the override `option=value`. The value is quoted if it has characters that Hydra would interpret."""
    if re.fullmatch(r"[\w./-]+", str(value)):
        return f"{option}={value}"
    return f"{option}={QuotedString(str(value), Quote.single).with_quotes()}"


def last_value(option: str, overrides: list[str]) -> str:
    """Return the value of an option in the last override that sets it, as text, or "" if no override sets it.

    Raises:
        UserError: if Hydra cannot parse this override.
    """
    matching = [override for override in overrides if override.startswith(f"{option}=")]
    if not matching:
        return ""
    try:
        return str(OverridesParser.create().parse_override(matching[-1]).value())
    except HydraException as error:
        raise UserError(f"{matching[-1]}: {str(error).splitlines()[0]}") from None


def check_task(group: str, task: str) -> None:
    """Raise UserError unless configs/GROUP has a recipe for the task."""
    known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml") if path.stem != "recipe")
    if task not in known:
        raise UserError(f"no such task: {task} (known: {' '.join(known)})")


def save_settings(directory: Path, settings: list[str]) -> None:
    """Write the settings of a result to DIRECTORY/settings.json. The directory must exist."""
    write_bytes(directory / SETTINGS_FILE, (json.dumps(settings, indent=1) + "\n").encode())


def is_complete(result: Path, settings: list[str]) -> bool:
    """Return True if a result file exists, and compare its settings with those of the present run.

    The settings are read from settings.json next to the result. If there is no such file, they are not compared.

    Args:
        result: the result file.
        settings: the settings of the present run.

    Raises:
        UserError: if the result exists and was computed with other settings.
    """
    if not result.is_file():
        return False
    stored = result.with_name(SETTINGS_FILE)
    if stored.is_file():
        before = json.loads(stored.read_text())
        check_settings(f"{result.parent} holds a result", before, settings, "checkpoint.save_dir")
    return True


def check_settings(subject: str, before: Iterable[str], now: Iterable[str], option: str) -> None:
    """Raise UserError if the settings of an earlier run differ from the present ones.

    Their order does not matter. Settings without an effect on results, such as the device, are not compared.

    Args:
        subject: the start of the error message, such as "runs/x holds a result".
        before: settings of the earlier run.
        now: settings of the present run.
        option: the option with which the user can choose another directory, for the error message.
    """
    settings_before = [word for word in before if not word.startswith(WITHOUT_EFFECT)]
    settings_now = [word for word in now if not word.startswith(WITHOUT_EFFECT)]
    removed = [word for word in settings_before if word not in settings_now]
    added = [word for word in settings_now if word not in settings_before]
    if removed or added:
        raise UserError(
            f"{subject} with other settings: it has {_describe(removed)}, this command has {_describe(added)}. "
            f"Repeat the earlier settings or choose another {option}"
        )


def _describe(settings: list[str]) -> str:
    """Return the settings in one line, for an error message."""
    return " ".join(settings) or "nothing in their place"
