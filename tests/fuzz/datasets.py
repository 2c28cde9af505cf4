"""Binarised data with a damaged file, or files of other data, read through our tasks."""

import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.tasks import setup_task
from omegaconf import OmegaConf

from lln_fairseq.data.binary_format import count_dataset
from lln_fairseq.data.reporting import DataError
from lln_fairseq.host.errors import InputError
from tests.fairseq_runs import make_classification, make_corpus
from tests.fuzz._damage import damaged

TASKS = {
    "lm": {"_name": "lln_masked_lm", "tokens_per_sample": 32, "sample_break_mode": "complete", "skip_masking": True},
    "labels": {"_name": "lln_sentence_prediction", "num_classes": 2, "regression_target": False},
    "scores": {"_name": "lln_sentence_prediction", "num_classes": 1, "regression_target": True},
}


@cache
def sound() -> dict[str, dict[str, bytes]]:
    """The files of a small data set for each task."""
    sizes = (("train", 9),)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder / "lm", sizes)
        make_classification(folder / "labels", sizes)
        make_classification(folder / "scores", sizes)
        for file in (folder / "scores/label").iterdir():
            file.unlink()
        (folder / "scores/label/train.label").write_text("".join(f"{0.1 * k:.2f}\n" for k in range(9)))
        for task in ("labels", "scores"):  # pairs of sentences
            second = make_classification(folder / f"{task}2", sizes)
            (second / "input0").rename(folder / task / "input1")
        files = {task: [path for path in (folder / task).rglob("*") if path.is_file()] for task in TASKS}
        return {task: {str(p.relative_to(folder / task)): p.read_bytes() for p in files[task]} for task in TASKS}


@cache
def expected(task: str) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), sound()[task])
        return samples(task, Path(name))


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def samples(name: str, folder: Path) -> list[list[int]]:
    """The ids and the target of every sample, as a training sees them, in the order of the data."""
    task = setup_task(OmegaConf.create({**TASKS[name], "data": str(folder), "seed": 1}))
    task.load_dataset("train", combine=True)
    dataset = task.dataset("train")
    found = {}
    for i in range(len(dataset)):
        sample = dataset[i]
        ids = sample["net_input.src_tokens"]
        assert 0 <= ids.min() <= ids.max() < len(task.source_dictionary), "an id beyond the embedding"
        target = torch.as_tensor(sample["target"]).flatten().tolist() if name != "lm" else []
        if name == "labels":
            assert [0 <= label < 2 for label in target] == [True], "a label beyond the classes"
        found[int(sample["id"])] = [*ids.tolist(), *target]
    return [found[i] for i in sorted(found)]


def mixed_up(rng: random.Random, content: bytes) -> bytes:
    """A dictionary's lines in another number."""
    lines = content.splitlines(keepends=True)
    del lines[rng.randrange(len(lines)) :]
    return rng.choice((content + content, b"".join(lines), content + rng.choice(lines or [b"\n"]), b"\n" + content))


def odd_ids(rng: random.Random, content: bytes) -> bytes:
    """An id of a .bin file is any number."""
    ids = np.frombuffer(content, np.uint16).copy()
    ids[rng.randrange(len(ids))] = rng.choice((0, 1, 2, 3, 4, 5, 6, 63, 64, 65, 71, 72, 73, 1000, 65535))
    return ids.tobytes()


def change(rng: random.Random, name: str) -> Callable[[random.Random, bytes], bytes]:
    """What happens to this file."""
    special = {".txt": mixed_up, ".bin": odd_ids}.get(Path(name).suffix, damaged)
    return rng.choice((damaged, special)) if rng.random() < 0.95 else lambda rng, content: b""


def attack(rng: random.Random, folder: Path) -> str:
    """One damaged file, and the data is refused or read with ids and labels that the model has."""
    task = rng.choice(list(TASKS))
    files = dict(sound()[task])
    wanted = expected(task)
    name = rng.choice([name for name in files if name != "label/dict.txt" or rng.random() < 0.5])
    if rng.random() < 0.05:
        del files[name]
    elif rng.random() < 0.1 and name.endswith(".idx"):  # the index of other data
        files[name] = rng.choice([content for other, content in files.items() if other.endswith(".idx")])
    else:
        files[name] = change(rng, name)(rng, files[name])
    write(folder, files)
    prepared(folder, name)
    try:
        found = samples(task, folder)
    except InputError:
        return "refused"
    if found == wanted:
        return "same"
    assert name.endswith((".bin", ".label", "dict.txt")), f"{name}: other samples"
    assert len(found) == len(wanted) or task == "lm", f"{name}: another number of samples"
    return "other ids of the dictionary"


def prepared(folder: Path, name: str) -> None:
    """data_prep reads back what it finds: refused, or counted."""
    prefix = (folder / name).with_suffix("")
    if not all(prefix.with_suffix(suffix).is_file() for suffix in (".bin", ".idx")):
        return
    try:
        counts = count_dataset(prefix, len(Dictionary()) + 60)
    except DataError:
        return
    assert counts.tokens == counts.by_id.sum()
