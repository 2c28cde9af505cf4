"""Binarized data with one damaged file is refused, or read with ids and labels that the model has."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.tasks import setup_task
from hypothesis import event, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lln_fairseq.errors import InputError
from tests.fairseq_runs import make_classification, make_corpus
from tests.fuzz.damage import damages

TASKS = {
    "lm": {"_name": "lln_masked_lm", "tokens_per_sample": 32, "sample_break_mode": "complete", "skip_masking": True},
    "labels": {"_name": "lln_sentence_prediction", "num_classes": 2, "regression_target": False},
    "scores": {"_name": "lln_sentence_prediction", "num_classes": 1, "regression_target": True},
}
SIZES = (("train", 9),)
IDS = [0, 1, 2, 3, 4, 5, 6, 63, 64, 65, 71, 72, 73, 1000, 65535]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """For each task the files of a small data set."""
    folder = tmp_path_factory.mktemp("data")
    make_corpus(folder / "lm", SIZES)
    make_classification(folder / "labels", SIZES)
    make_classification(folder / "scores", SIZES)
    for file in (folder / "scores" / "label").iterdir():
        file.unlink()
    (folder / "scores" / "label" / "train.label").write_text("".join(f"{0.1 * k:.2f}\n" for k in range(9)))
    for task in ("labels", "scores"):  # pairs of sentences
        second = make_classification(folder / f"{task}2", SIZES)
        (second / "input0").rename(folder / task / "input1")
    found = {}
    for task in TASKS:
        paths = [path for path in sorted((folder / task).rglob("*")) if path.is_file()]
        found[task] = {str(path.relative_to(folder / task)): path.read_bytes() for path in paths}
    return found


def changed(draws, name, contents):
    """The content of one file, damaged; of an index also that of other data, of ids also other ones."""
    kind = draws.draw(st.sampled_from(["bytes", "bytes", "empty", "special"]))
    if kind == "empty":
        return b""
    if kind == "special" and name.endswith(".idx"):
        return contents[draws.draw(st.sampled_from([other for other in contents if other.endswith(".idx")]))]
    if kind == "special" and name.endswith(".bin"):
        ids = np.frombuffer(contents[name], np.uint16).copy()
        ids[draws.draw(st.integers(0, len(ids) - 1))] = draws.draw(st.sampled_from(IDS))
        return ids.tobytes()
    return draws.draw(damages(contents[name])).apply(contents[name])


def write(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read_samples(task_name, folder):
    """The ids and the target of every sample, as a training sees them."""
    task = setup_task(OmegaConf.create({**TASKS[task_name], "data": str(folder), "seed": 1}))
    task.load_dataset("train", combine=True)
    dataset = task.dataset("train")
    samples = {}
    for index in range(len(dataset)):
        sample = dataset[index]
        ids = sample["net_input.src_tokens"]
        assert 0 <= ids.min() <= ids.max() < len(task.source_dictionary), "an id beyond the embedding"
        target = [] if task_name == "lm" else torch.as_tensor(sample["target"]).flatten().tolist()
        if task_name == "labels":
            assert target in ([0], [1]), "a label beyond the classes"
        samples[int(sample["id"])] = [*ids.tolist(), *target]
    return samples


@given(draws=st.data(), task=st.sampled_from(list(TASKS)))
def test_damaged_data_is_refused_or_read_within_the_dictionary(files, draws, task):
    contents = dict(files[task])
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), contents)
        expected = read_samples(task, Path(name))
        file = draws.draw(st.sampled_from(list(contents)))
        write(Path(name), {file: changed(draws, file, contents)})
        try:
            found = read_samples(task, Path(name))
        except InputError:
            return
    event("same" if found == expected else f"other samples of {Path(file).suffix}")
    if found != expected:
        assert file.endswith((".bin", ".label", "dict.txt")), f"{file}: other samples"
        assert len(found) == len(expected) or task == "lm", f"{file}: another number of samples"
