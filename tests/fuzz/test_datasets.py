"""Binarized data with one damaged file is rejected, or is read with ids and labels that the model has."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.tasks import setup_task
from hypothesis import event, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lln_fairseq.errors import UserError
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
def intact_files(tmp_path_factory):
    """Return the contents of the files of a small data set, by task and by name."""
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
    return {task: read_files(folder / task) for task in TASKS}


def read_files(folder):
    """Return the content of every file below a folder, by its relative path."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def draw_changed_content(data, name, contents):
    """Draw the damaged content of one file. An index may be that of another data set, and an id another one."""
    kind = data.draw(st.sampled_from(["bytes", "bytes", "empty", "special"]))
    if kind == "empty":
        return b""
    if kind == "special" and name.endswith(".idx"):
        indices = [file for file in contents if file.endswith(".idx")]
        return contents[data.draw(st.sampled_from(indices))]
    if kind == "special" and name.endswith(".bin"):
        ids = np.frombuffer(contents[name], np.uint16).copy()
        ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.sampled_from(IDS))
        return ids.tobytes()
    return data.draw(damages(contents[name])).apply(contents[name])


def read_samples(task_name, folder):
    """Return the ids and the target of every training sample by its number, and check that the model has them."""
    task = setup_task(OmegaConf.create({**TASKS[task_name], "data": str(folder), "seed": 1}))
    task.load_dataset("train", combine=True)
    dataset = task.dataset("train")
    samples = {}
    for index in range(len(dataset)):
        sample = dataset[index]
        ids = sample["net_input.src_tokens"]
        assert 0 <= ids.min() <= ids.max() < len(task.source_dictionary), "an id beyond the embedding"
        target = []
        if task_name != "lm":
            target = torch.as_tensor(sample["target"]).flatten().tolist()
        if task_name == "labels":
            assert target in ([0], [1]), "a label beyond the classes"
        samples[int(sample["id"])] = [*ids.tolist(), *target]
    return samples


@given(data=st.data(), task=st.sampled_from(list(TASKS)))
def test_damaged_data_is_rejected_or_read_within_the_dictionary(intact_files, data, task):
    contents = intact_files[task]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, contents)
        expected = read_samples(task, folder)
        file = data.draw(st.sampled_from(list(contents)))
        write_files(folder, {file: draw_changed_content(data, file, contents)})
        try:
            samples = read_samples(task, folder)
        except UserError:
            return

    if samples == expected:
        event("same samples")
        return
    event(f"other samples after damage to {Path(file).suffix}")
    assert file.endswith((".bin", ".label", "dict.txt")), f"damage to {file} changed the samples"
    assert len(samples) == len(expected) or task == "lm", f"damage to {file} changed the number of samples"
