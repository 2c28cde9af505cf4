"""A softmax encoder becomes a linear one, and keeps its own softmax."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import convert
from lln_fairseq.inference.loading import load_model
from lln_fairseq.linearize import linearize
from lln_fairseq.linearize.attention_transfer import swapped_attention
from lln_fairseq.linearize.distillation import Distillation
from lln_fairseq.linearize.layerwise import Students
from scripts.experiments import conversion
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, WORDS, make_classification, make_corpus, train
from tests.helpers import relative_rms

SIZES = (("train", 120), ("valid", 90))
SOFTMAX = (*MASKED_LM, *LLN, "--attention", "softmax", "--max-positions", 64, "--dropout", 0)
FORM = ("--option", "mix=joint_offset", "gain=learned", "block_size=8")
OPTIONS = (*FORM, "--steps", 100, "--tokens", 192, "--lr", 0.03)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A small model with softmax attention of some contrast, and its data."""
    folder, monkeypatch = tmp_path_factory.mktemp("teacher"), pytest.MonkeyPatch()
    with monkeypatch.context():
        data = make_corpus(folder / "data", SIZES)
        train(monkeypatch, folder / "log", data, folder / "run", *SOFTMAX, "--max-update", 2)
    path = folder / "run" / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    for name, value in state["model"].items():
        if re.search(r"\.[qk]_proj\.(weight|bias)", name):
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.35)
    torch.save(state, path)
    return path, data


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


def run(*arguments):
    return main(["linearize", *map(str, arguments)])


def tokens():
    return torch.randint(4, 60, (3, 50), generator=torch.Generator().manual_seed(7))


def output(path):
    model, _ = load_model(str(path))
    with torch.no_grad():
        return model(src_tokens=tokens(), features_only=True)[0]


def test_the_students_come_nearer_and_the_softmax_stays(teacher, tmp_path, capsys):
    path, data = teacher
    out = tmp_path / "out"
    assert run(path, data, out, *OPTIONS) == 0
    said = capsys.readouterr().out
    errors = [tuple(map(float, pair)) for pair in re.findall(r"error of layer +\d+ +(\S+) -> (\S+)", said)]
    assert len(errors) == 2
    assert all(after < 0.8 * before for before, after in errors), said
    cosines = [tuple(map(float, pair)) for pair in re.findall(r"vectors +(\S+) -> (\S+)", said)]
    assert all(before < after <= 1 for before, after in cosines), said
    assert re.search(r"LLN only +cosine .*\n +Diag only +cosine", said)
    linear, _ = load_model(str(out / "model.pt"))
    config = linear.encoder.sentence_encoder.layers[0].self_attn.attention.config
    assert (config.mix, config.gain, config.block_size) == ("joint_offset", "learned", 8)
    convert(out / "model.pt", tmp_path / "softmax", "softmax", dictionary=out / "dict.txt")
    torch.testing.assert_close(output(tmp_path / "softmax" / "model.pt"), output(path), rtol=1e-5, atol=1e-5)
    assert run(path, data, out, *OPTIONS) == 0
    assert "is complete" in capsys.readouterr().out
    assert list((out / "tensorboard").iterdir())


def test_a_finished_run_is_that_of_its_settings(teacher, tmp_path, monkeypatch, capsys):
    path, data = teacher
    out, short = tmp_path / "out", ("--steps", 2, "--tokens", 64)
    assert run(path, data, out, *short) == 0
    for other, named in ((("--steps", 3), "steps"), (("--option", "mix=joint"), "option"), (("--seed", 2), "seed")):
        assert run(path, data, out, *short, *other) == 1
        assert f"holds a run with another {named}: give another OUT" in capsys.readouterr().err
    monkeypatch.chdir(path.parent)  # the same teacher and text, by other paths; a default that is given
    assert run(path.name, os.path.relpath(data), out, *short, "--option", "mix=average") == 0
    assert "is complete" in capsys.readouterr().out
    second = ("--distill", 3, "--distill-lr", 1e-3)
    assert run(path, data, tmp_path / "whole", *short, *second) == 0
    assert run(path, data, out, *short, *second) == 0  # goes on where the transfer ended
    found, whole = (torch.load(folder / "model.pt")["model"] for folder in (out, tmp_path / "whole"))
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert run(path, data, out, *short) == 1
    assert "holds a run with another distill, another distill_lr" in capsys.readouterr().err


def test_a_model_of_something_else_is_not_taken_for_the_result(teacher, tmp_path, capsys):
    path, data = teacher
    assert run(path, data, path.parent, "--steps", 2) == 1
    (tmp_path / "model.pt").touch()
    assert run(path, data, tmp_path, "--steps", 2) == 1
    assert capsys.readouterr().err.count("holds another model: give another OUT\n") == 2
    assert not (tmp_path / "linearize.pt").exists()


DIVERGING = {
    "transfer in step": ("--lr", 1e4, "--steps", 30),
    "transfer on held-out texts": ("--lr", 1e30, "--steps", 1),
    "distillation in step": ("--steps", 1, "--distill", 30, "--distill-lr", 1e20),
}


@pytest.mark.parametrize("stage", DIVERGING)
def test_what_diverges_writes_no_model(stage, teacher, tmp_path, capsys):
    assert run(*teacher, tmp_path / "out", "--tokens", 64, *DIVERGING[stage]) == 1
    error = capsys.readouterr().err
    assert re.search(rf"the {stage} .*gives what is not finite: try a lower --\S*lr and another OUT$", error.strip())
    assert not (tmp_path / "out" / "model.pt").exists()


def test_folding_keeps_what_the_students_computed(teacher):
    path, data = teacher
    model, task = load_model(str(path))
    students = Students(model, "lln_diag", {"mix": "joint"}, 0.03, 10, seed=1)
    texts = linearize.read_texts(data, "train", task.source_dictionary)
    for _ in range(5):
        students.train_step(texts, 128, 64)
    with swapped_attention(students.layers, students.students), torch.no_grad():
        wanted = model(src_tokens=tokens(), features_only=True)[0]
    students.fold()
    with torch.no_grad():
        folded = model(src_tokens=tokens(), features_only=True)[0]
    torch.testing.assert_close(folded, wanted, rtol=1e-5, atol=1e-5)


def test_distillation_comes_nearer_still(teacher, tmp_path, capsys):
    path, data = teacher
    errors = {}
    for steps in (0, 100):
        options = ("--option", "block_size=8", "--steps", 20, "--distill", steps, "--distill-lr", 1e-3)
        assert run(path, data, tmp_path / str(steps), *options) == 0
        errors[steps] = relative_rms(output(tmp_path / str(steps) / "model.pt"), output(path))
    assert errors[100] < 0.7 * errors[0]
    assert capsys.readouterr().out.count("after the distillation") == 1
    before, after = (torch.load(p)["model"] for p in (path, tmp_path / "100" / "model.pt"))
    assert all(torch.equal(before[name], after[name]) == (".layers." not in name) for name in before)


STAGES = {Students: (), Distillation: ("--distill", 100)}


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_stage_goes_on_exactly(stage, teacher, tmp_path, monkeypatch, capsys):
    path, data = teacher
    options = (*OPTIONS, *STAGES[stage])
    assert run(path, data, tmp_path / "whole", *options) == 0
    step = stage.train_step

    def interrupted(self, *args):
        if self.step == 73:
            raise KeyboardInterrupt
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "train_step", interrupted)
        assert run(path, data, tmp_path / "out", *options) == 130
    assert not (tmp_path / "out" / "model.pt").exists()
    assert run(path, data, tmp_path / "out", *options, "--seed", 2) == 1
    assert "holds a run with another seed" in capsys.readouterr().err
    assert run(path, data, tmp_path / "out", *options) == 0
    found, whole = (torch.load(tmp_path / name / "model.pt")["model"] for name in ("out", "whole"))
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_full_disk_ends_in_one_line_and_keeps_the_last_save(teacher, tmp_path, capsys):
    """A limit on the size of files stands for the full disk; the second stage's save is larger than the first's."""
    path, data = teacher
    first_stage = (path, data, tmp_path / "out", "--steps", 2, "--tokens", 64)
    assert run(*first_stage) == 0
    saved = (tmp_path / "out" / "linearize.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(saved), limits[1]))
    try:
        assert run(*first_stage, "--distill", 2) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write linearize.pt.part: ")
    assert error.count("\n") == 1
    assert (tmp_path / "out" / "linearize.pt").read_bytes() == saved
    assert not (tmp_path / "out" / "linearize.pt.part").exists()


def test_two_of_them_do_not_share_a_directory(teacher, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "out" / "training.lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        assert run(*teacher, tmp_path / "out", "--steps", 2) == 1
    finally:
        holder.kill()
        holder.wait()
    error = capsys.readouterr().err
    assert "belongs to a conversion that is running" in error
    assert error.endswith("or give another OUT\n")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["training.lock"]


def test_a_training_that_goes_on_with_another_option_is_told(teacher, tmp_path, monkeypatch, caplog):
    """Also with one that the transfer had by default."""
    path, data = teacher
    assert run(path, data, tmp_path / "out", "--steps", 2, "--tokens", 64) == 0
    options = (*MASKED_LM, *LLN, "--max-positions", 64, "--finetune-from-model", tmp_path / "out" / "model.pt")
    changed = ("--lln-diag-mix", "joint", "--lln-diag-block-size", 8, "--max-update", 1)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *options, *changed)
    assert "was trained with lln_diag_mix = average, here it is joint" in caplog.text
    assert "was trained with lln_diag_block_size = None, here it is 8" in caplog.text
    assert caplog.text.count("was trained with") == 2


def test_the_text_of_a_task_and_an_attention_without_branches(teacher, tmp_path, capsys):
    path, _ = teacher
    task = make_classification(tmp_path / "task", SIZES)
    assert run(path, task, tmp_path / "out", "--attention", "elu", "--steps", 20, "--tokens", 64) == 0
    assert "only" not in capsys.readouterr().out
    assert output(tmp_path / "out" / "model.pt").isfinite().all()


def test_a_head_that_is_left_out_is_told(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data", SIZES)
    options = (*CLASSIFICATION, *LLN, "--attention", "softmax", "--max-update", 1)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *options)
    teacher = tmp_path / "run" / "checkpoint_last.pt"
    assert run(teacher, data, tmp_path / "out", "--steps", 2, "--tokens", 64) == 0
    said = capsys.readouterr().out.splitlines()
    assert "left out: classification_heads." in said[-2]


def cut_off(data, copy):
    shutil.copytree(data, copy)
    os.truncate(copy / "valid.idx", 0)
    return copy


CASES = {
    "no such checkpoint": lambda t, tmp: (tmp / "nowhere.pt", t[1], tmp / "out"),
    "is not a binarised data directory": lambda t, tmp: (t[0], tmp, tmp / "out"),
    "has no option 'nope'": lambda t, tmp: (*t, tmp / "out", "--option", "nope=1"),
    "--length is 65, and": lambda t, tmp: (*t, tmp / "out", "--length", 65),
    "cannot load split 'valid'": lambda t, tmp: (t[0], cut_off(t[1], tmp / "data"), tmp / "out"),
    "is not the teacher's": lambda t, tmp: (t[0], make_corpus(tmp / "c", SIZES, WORDS[::-1]), tmp / "out"),
    "has no text in its split 'valid'": lambda t, tmp: (t[0], make_corpus(tmp / "c", (("train", 9),)), tmp / "out"),
}


@pytest.mark.parametrize("message", CASES)
def test_bad_input_ends_in_one_line_and_leaves_nothing(message, teacher, tmp_path, capsys):
    assert run(*CASES[message](teacher, tmp_path)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_teacher_has_softmax(teacher, tmp_path, monkeypatch, capsys):
    data = teacher[1]
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *MASKED_LM, *LLN, "--max-update", 1)
    assert run(tmp_path / "run" / "checkpoint_last.pt", data, tmp_path / "out") == 1
    assert "has lln_diag attention, and a teacher has softmax" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_experiment_of_several_forms(teacher, tmp_path, capsys):
    rows = ["--variants", "average", "joint_offset, gain", "--seeds", "1", "2", "--lengths", "16", "40"]
    command = [*map(str, teacher), str(tmp_path), *rows, "--tokens", "80", "--block-size", "8", "--steps"]
    assert conversion.main([*command, "0"]) == 0
    before = (tmp_path / "conversion.json").read_text()
    assert conversion.main([*command, "0", "30"]) == 0
    found = json.loads((tmp_path / "conversion.json").read_text())["rows"]
    assert len(found) == 8
    assert all(found[key] == row for key, row in json.loads(before)["rows"].items())  # not run again
    cells = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[-5] for line in cells] == ["0", "30", "0", "30"]
    first, second = (found[f"average; 30 steps; seed {seed}"]["quality"][1][0] for seed in (1, 2))
    assert float(cells[1].split()[-2]) == pytest.approx((first + second) / 2, abs=1e-3)
    assert conversion.main([*command, "0", "--lr", "1"]) == 1
    assert "is of other settings" in capsys.readouterr().err


def test_seed_that_torch_cannot_take_is_wrong_usage(teacher, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(*teacher, tmp_path / "out", "--seed", "99999999999999999999999")
    assert "--seed must be from 0 to" in capsys.readouterr().err
