"""Save the tokenizer and the dictionaries of a run next to its checkpoints, so that the model can later encode text.

    SAVE_DIR/tokenizer/     in the layout of the training data, without the data
        dict.txt            or input0/dict.txt, input1/dict.txt (tasks with pairs of sentences) and label/dict.txt
        spm.model           or encoder.json and vocab.bpe, as data_prep puts them next to its data
        manifest.json       names these files, with checksums, so that `data_prep.glue --tokenizer` takes the directory

Data that data_prep did not write has no tokenizer. Then that of the checkpoint that the run starts from is saved if its
dictionary is the same, and otherwise only the dictionaries.
"""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fairseq.utils import split_paths

from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.text.special_symbols import MASK, NUM_SPECIAL
from lln_fairseq.text.vocabulary import MANIFEST, Vocabulary, load_vocabulary, recorded_identity

FOLDER = "tokenizer"
DICTIONARIES = ("dict.txt", "input0/dict.txt", "input1/dict.txt", "label/dict.txt")

logger = logging.getLogger(__name__)


def save_tokenizer(task: Any, save_dir: str, start: str | None = None) -> None:
    """Copy the dictionaries and the tokenizer of the task's data to SAVE_DIR/tokenizer.

    Data without a tokenizer gets that of the checkpoint `start`, from which the task's model begins, if both have the
    same dictionary. If there is none, only the dictionaries are copied and the reason is logged. Unchanged files are
    not written again. If an earlier task left a dictionary or a manifest there and this task has no such file, the old
    file is removed. Of several data directories, only the first is read.
    """
    data = Path(split_paths(task.cfg.data)[0])
    directory = Path(save_dir, FOLDER)
    files = {name: (data / name).read_bytes() for name in DICTIONARIES if (data / name).is_file()}
    if (data / "input1").is_dir() and "input0/dict.txt" in files:  # input1 has the same dictionary if it has no file
        files.setdefault("input1/dict.txt", files["input0/dict.txt"])
    try:
        vocabulary = _find_vocabulary(task, data, start)
    except UserError as error:
        logger.info(f"this run's model can be given text only with the option --tokenizer: {error}")
    else:
        files |= vocabulary.tokenizer.files
        dictionary_folder = "input0/" if "input0/dict.txt" in files else ""
        record = vocabulary.record(directory=dictionary_folder)
        # Last, so that it is written when all other files are there.
        files[MANIFEST] = (json.dumps({"tokenizer": record}, indent=1) + "\n").encode()
    for name in {*DICTIONARIES, MANIFEST} - files.keys():
        (directory / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_bytes(directory / name, content)


def _find_vocabulary(task: Any, data: Path, start: str | None) -> Vocabulary:
    """Return the vocabulary of the task's data, or that of the checkpoint `start` if the data has none.

    UserError, with the reason for the data, is raised if neither has one that fits the dictionary of the data.
    """
    try:
        vocabulary = load_vocabulary(str(data))
        check_vocabulary(vocabulary, task, str(data))
        return vocabulary
    except UserError:
        candidates = []
        if start:
            candidates = directories(start, None)
        for directory in candidates:
            with suppress(UserError):
                vocabulary = load_vocabulary(str(directory))
                has_same_symbols = task.source_dictionary.symbols[NUM_SPECIAL:] == [*vocabulary.symbols, MASK]
                if has_same_symbols and recorded_identity(data) in ("", vocabulary.identity):
                    return vocabulary
        raise


def check_vocabulary(vocabulary: Any, task: Any, where: str) -> None:
    """Raise UserError if the symbols of a `Vocabulary` have other ids in the task's dictionary, which may have more.

    `where` names the vocabulary in the message.
    """
    symbols = task.source_dictionary.symbols[NUM_SPECIAL : NUM_SPECIAL + len(vocabulary.symbols)]
    if symbols != vocabulary.symbols:
        raise UserError(f"the tokenizer of {where} has other symbols than the dictionary of {task.cfg.data}")


def directories(checkpoint: str, data: str | None) -> list[Path]:
    """Return the directories that have dictionaries for a checkpoint, in order of preference.

    There are three candidates: the folder `tokenizer` next to the checkpoint, the checkpoint's own directory, and the
    first directory of its training data, the option task.data. Only those with dict.txt or input0/dict.txt are
    returned.
    """
    checkpoint_directory = Path(checkpoint).parent
    candidates = [checkpoint_directory / FOLDER, checkpoint_directory]
    candidates += [Path(part) for part in split_paths(data or "")[:1]]
    return [directory for directory in candidates if has_dictionary(directory)]


def require_one_path(directory: str | Path) -> None:
    """Raise UserError if fairseq would take the path of a directory for several paths."""
    if len(split_paths(str(directory))) > 1:
        raise UserError(f"{directory} contains {os.pathsep!r}, which separates directories in fairseq: rename it")


def has_dictionary(directory: Path) -> bool:
    return (directory / "dict.txt").is_file() or (directory / "input0/dict.txt").is_file()
