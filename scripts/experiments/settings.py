"""Write, read, store and compare the settings of a run, which are Hydra overrides such as `common.seed=1`."""

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
    """Return the override `option=value`, quoted for Hydra if the value has characters that Hydra would interpret."""
    if re.fullmatch(r"[\w./-]+", str(value)):
        return f"{option}={value}"
    return f"{option}={QuotedString(str(value), Quote.single).with_quotes()}"


def last_value(option: str, overrides: list[str]) -> str:
    """Return the value that the last override of an option gives it, or "" if no override names the option.

    Raises:
        UserError: if Hydra cannot parse that override.
    """
    matching = [override for override in overrides if override.startswith(f"{option}=")]
    if not matching:
        return ""
    try:
        return str(OverridesParser.create().parse_override(matching[-1]).value())
    except HydraException as error:
        raise UserError(f"{matching[-1]}: {str(error).splitlines()[0]}") from None


def check_task(group: str, task: str) -> None:
    """Raise UserError if configs/GROUP has no recipe for a task."""
    known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml") if path.stem != "recipe")
    if task not in known:
        raise UserError(f"no such task: {task} (known: {' '.join(known)})")


def save_settings(directory: Path, settings: list[str]) -> None:
    """Write the settings of a result into its directory, which must exist."""
    write_bytes(directory / SETTINGS_FILE, (json.dumps(settings, indent=1) + "\n").encode())


def is_complete(result: Path, settings: list[str]) -> bool:
    """Return True if a result file exists. A result without stored settings is accepted.

    Raises:
        UserError: if the stored settings of the result differ from `settings`.
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

    Settings without an effect on results, such as the device, are not compared.

    Args:
        subject: start of the error message, which names the earlier run or its result.
        before: settings of the earlier run.
        now: settings of the present run.
        option: option that chooses another directory, for the error message.
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
    return " ".join(settings) or "nothing in their place"
