"""The settings of a training as Hydra overrides: how they are written, read, kept beside a result and compared."""

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

FILE = "settings.json"  # beside a result
# What may differ for the same result: the device, where it lies, and which splits have labels here.
MAY_DIFFER = ("run=", "checkpoint.save_dir=", "--split=")


def setting(option: str, value: str | Path) -> str:
    """An override with a value that Hydra is to take as it is, which to it `=`, commas and spaces are not."""
    plain = re.fullmatch(r"[\w./-]+", str(value))
    return f"{option}={value if plain else QuotedString(str(value), Quote.single).with_quotes()}"


def last_of(option: str, overrides: list[str]) -> str:
    """The value of the last override of an option; "" where there is none. Raises: UserError for what Hydra cannot
    read."""
    given = [word for word in overrides if word.startswith(f"{option}=")]
    try:
        return str(OverridesParser.create().parse_override(given[-1]).value()) if given else ""
    except HydraException as error:
        raise UserError(f"{given[-1]}: {str(error).splitlines()[0]}") from None


def check_task(group: str, task: str) -> None:
    """Raise UserError if there is no recipe for a task in configs/GROUP."""
    known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml") if path.stem != "recipe")
    if task not in known:
        raise UserError(f"no such task: {task} (known: {' '.join(known)})")


def keep_settings(folder: Path, settings: list[str]) -> None:
    write_bytes(folder / FILE, (json.dumps(settings, indent=1) + "\n").encode())


def done_before(result: Path, settings: list[str]) -> bool:
    """Whether a result is there. Raises: UserError where it is that of other settings, as far as these are known."""
    if result.is_file() and (file := result.with_name(FILE)).is_file():
        check_settings(f"{result.parent} holds a result", json.loads(file.read_text()), settings, "checkpoint.save_dir")
    return result.is_file()


def check_settings(what: str, before: Iterable[str], now: Iterable[str], option: str) -> None:
    """Raises UserError where what was done before had other settings; `option` gives it another directory."""
    then, here = ([word for word in words if not word.startswith(MAY_DIFFER)] for words in (before, now))
    gone, new = [word for word in then if word not in here], [word for word in here if word not in then]
    if gone or new:
        had, has = (" ".join(words) or "without" for words in (gone, new))
        raise UserError(f"{what} with other settings: {had}, here: {has}. Give what it had, or another {option}")
