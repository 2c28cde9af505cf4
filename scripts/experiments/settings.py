"""Format, parse, store and compare the settings of a run. Settings are Hydra overrides such as `common.seed=1`."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from lln_fairseq.command import UserError
from lln_fairseq.data.files import data_hash, sha256_of, write_bytes
from lln_fairseq.training.recipes import CONFIGS

SETTINGS_FILE = "settings.json"  # stored next to a result
HASHES_FILE = "inputs.json"  # stored next to a result: hashes of the files that it was computed from
START_MODEL = "checkpoint.finetune_from_model"
DATA = "task.data"
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


def input_hashes(stage: str, task: str, overrides: list[str]) -> dict[str, str]:
    """Return the hashes of the data and of the initial model of a run, keyed by the option that names them.

    An input that does not exist is left out.

    Args:
        stage: name of the recipe, such as "finetune".
        task: the override that selects the task, such as "glue=sst2".
        overrides: all overrides of the run.
    """
    data = last_value(DATA, overrides)
    if not data:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hydra warns about version_base 1.1, which fairseq needs
            with initialize_config_dir(str(CONFIGS), version_base="1.1"):
                data = compose(stage, [task]).task.data
    start = Path(last_value(START_MODEL, overrides))
    hashes = {}
    content = data_hash([data], subset="")
    if content:
        hashes[DATA] = content
    if start.is_file():
        hashes[START_MODEL] = sha256_of(start)
    return hashes


def save_settings(directory: Path, settings: list[str], hashes: Mapping[str, str]) -> None:
    """Write the settings of a result to DIRECTORY/settings.json, and the hashes of its inputs to DIRECTORY/inputs.json.

    The directory must exist.
    """
    write_bytes(directory / SETTINGS_FILE, (json.dumps(settings, indent=1) + "\n").encode())
    write_bytes(directory / HASHES_FILE, (json.dumps(hashes, indent=1) + "\n").encode())


def is_complete(result: Path, settings: list[str], hashes: Mapping[str, str]) -> bool:
    """Return True if a result file exists, after checking that it was computed with the present settings and inputs.

    The settings and the hashes of the inputs are read from settings.json and inputs.json next to the result. What a
    missing file would hold is not checked, and neither is an input that has no hash in one of the runs.

    Args:
        result: the result file.
        settings: the settings of the present run.
        hashes: the result of `input_hashes` for the present run.

    Raises:
        UserError: if the result exists and was computed with other settings or inputs.
    """
    if not result.is_file():
        return False
    stored = result.with_name(SETTINGS_FILE)
    if stored.is_file():
        before = json.loads(stored.read_text())
        check_settings(f"{result.parent} holds a result", before, settings, "checkpoint.save_dir")
    stored = result.with_name(HASHES_FILE)
    if stored.is_file():
        hashes_before = json.loads(stored.read_text())
        changed = [option for option in hashes if hashes_before.get(option, hashes[option]) != hashes[option]]
        if changed:
            raise UserError(
                f"{result.parent} holds a result of other files: the content of {' and '.join(changed)} has changed "
                "since. Delete this directory to train again, choose another checkpoint.save_dir, or restore the files"
            )
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
