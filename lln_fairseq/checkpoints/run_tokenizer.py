"""The tokenizer and the dictionaries of a run, kept beside its checkpoints: what turns text into the model's ids.

    SAVE_DIR/tokenizer/     in the layout of the training data, without the data
        dict.txt            or input0/, input1/ (tasks of pairs) and label/dict.txt
        spm.model           or encoder.json and vocab.bpe, as data_prep puts them beside its data
        manifest.json       which of these they are, with checksums; `data_prep.glue --tokenizer` takes the folder

Data of others has no tokenizer: the dictionaries alone are kept then.
"""

import json
import logging
from pathlib import Path
from typing import Any

from fairseq.utils import split_paths

from lln_fairseq.command import UserError
from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.special_symbols import NUM_SPECIAL
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.errors import InputError

FOLDER, MANIFEST = "tokenizer", "manifest.json"
DICTIONARIES = ("dict.txt", "input0/dict.txt", "input1/dict.txt", "label/dict.txt")

logger = logging.getLogger(__name__)


def save_tokenizer(task: Any, save_dir: str) -> None:
    """Copies what prediction needs of the task's data into the run's folder; files that are there already stay.

    Raises: OSError where they cannot be written.
    """
    data, folder = Path(split_paths(task.cfg.data)[0]), Path(save_dir, FOLDER)
    dictionaries = {name: (data / name).read_bytes() for name in DICTIONARIES if (data / name).is_file()}
    if (data / "input1").is_dir() and "input0/dict.txt" in dictionaries:  # pairs, whose second dictionary may lack
        dictionaries.setdefault("input1/dict.txt", dictionaries["input0/dict.txt"])
    files = dict(dictionaries)
    try:
        vocabulary = load_vocabulary(str(data))
        check_vocabulary(vocabulary, task, str(data))
    except UserError as error:
        logger.info(f"text can be given to this run's model only with a --tokenizer: {error}")
    else:
        files |= vocabulary.tokenizer.files
        record = vocabulary.record(folder="input0/" if "input0/dict.txt" in files else "")
        files[MANIFEST] = (json.dumps({"tokenizer": record}, indent=1) + "\n").encode()  # the last one
    for name in {*DICTIONARIES, MANIFEST} - files.keys():  # of other data in the same directory
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_bytes(folder / name, content)


def check_vocabulary(vocabulary: Any, task: Any, where: str) -> None:
    """Raises: InputError where the symbols of a tokenizer have other ids than in the task's dictionary."""
    if task.source_dictionary.symbols[NUM_SPECIAL : NUM_SPECIAL + len(vocabulary.symbols)] != vocabulary.symbols:
        raise InputError(f"the tokenizer of {where} has other symbols than the dictionary of {task.cfg.data}")


def directories(checkpoint: str, data: str | None) -> list[Path]:
    """Where the dictionaries of a checkpoint may be, in the order of search: its run's folder, the directory that it
    is in, the data of its training. Those that have dictionaries."""
    beside = Path(checkpoint).parent
    places = [beside / FOLDER, beside, *(Path(part) for part in split_paths(data or "")[:1])]
    return [place for place in places if any((place / name).is_file() for name in DICTIONARIES[:2])]
