"""Tests of `lln-fairseq linearize`, on a small trained teacher."""

import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from fairseq.data import Dictionary

from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.reading import PLUGIN_STATE
from lln_fairseq.conversion.convert import convert
from lln_fairseq.inference.loading import load_model
from lln_fairseq.linearize.attention_transfer import swapped_attention
from lln_fairseq.linearize.students import Students
from lln_fairseq.linearize.text_encoder import held_out_count, held_out_lengths, read_texts
from tests.fairseq_runs import LLN, MASKED_LM, WORDS, make_classification, make_corpus, train
from tests.helpers import relative_rms

SIZES = (("train", 120), ("valid", 90))
SOFTMAX = (*MASKED_LM, *LLN, "--attention", "softmax", "--max-positions", 64, "--dropout", 0)
STUDENT = ("--option", "mix=joint_offset", "gain=learned", "block_size=8")
OPTIONS = (*STUDENT, "--steps", 60, "--tokens", 192, "--lr", 0.03)
SHORT = ("--steps", 2, "--tokens", 64)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Train a small model with softmax attention, and return its path and its data."""
    folder = tmp_path_factory.mktemp("teacher")
    data = make_corpus(folder / "data", SIZES)
    return train_teacher(folder, data), data


@pytest.fixture(scope="module")
def rotary_teacher(tmp_path_factory):
    """Train a small pre-norm model with softmax attention and rotary positions, and return its path and its data."""
    folder = tmp_path_factory.mktemp("rotary_teacher")
    data = make_corpus(folder / "data", SIZES)
    return train_teacher(folder, data, "--rotary", "--encoder-normalize-before"), data


def train_teacher(folder, data, *options):
    """Train a small model with softmax attention, widen its attention scores, and return its path."""
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context():
        train(monkeypatch, folder / "log", data, folder / "run", *SOFTMAX, *options, "--max-update", 2)
    path = folder / "run" / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    for name, value in state["model"].items():
        if re.search(r"\.[qk]_proj\.(weight|bias)", name):
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.35)
    torch.save(state, path)
    return path


# A program that locks a file until it is killed.
HOLD_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


def run(*arguments):
    return main(["linearize", *map(str, arguments)])


def random_tokens():
    return torch.randint(4, 60, (3, 50), generator=torch.Generator().manual_seed(7))


def features(model):
    """Return the last layer's states for fixed tokens."""
    with torch.no_grad():
        return model(src_tokens=random_tokens(), features_only=True)[0]


@pytest.fixture(scope="module")
def short_run(teacher, tmp_path_factory):
    """Return the OUT of a finished run with SHORT. Copy it before you change it."""
    out = tmp_path_factory.mktemp("short") / "out"
    assert run(*teacher, out, *SHORT) == 0
    return out


def features_of(path):
    model, _ = load_model(str(path))
    return features(model)


def parameters_of(folder):
    return torch.load(folder / "model.pt")["model"]


def before_and_after(pattern, text):
    """Return (before, after) of every line "PATTERN x -> y" in a report."""
    return [(float(before), float(after)) for before, after in re.findall(rf"{pattern} +(\S+) -> (\S+)", text)]


def test_transfer_reduces_errors_and_keeps_softmax(teacher, tmp_path, capsys):
    path, data = teacher
    out = tmp_path / "out"

    assert run(path, data, out, *OPTIONS) == 0

    report = capsys.readouterr().out
    errors = before_and_after(r"error of layer +\d+", report)
    assert len(errors) == 2
    assert all(after < 0.8 * before for before, after in errors), report
    cosines = before_and_after("vectors", report)
    assert all(before < after <= 1 for before, after in cosines), report
    assert re.search(r"LLN only +cosine .*\n +Diag only +cosine", report)
    linear, _ = load_model(str(out / "model.pt"))
    attention = linear.encoder.sentence_encoder.layers[0].self_attn.attention
    config = attention.config
    assert (config.mix, config.gain, config.block_size) == ("joint_offset", "learned", 8)
    assert attention.offset.all()  # both were 0 before the transfer
    assert attention.log_gain.all()
    convert(out / "model.pt", tmp_path / "softmax", "softmax", dictionary=out / "dict.txt")
    softmax = features_of(tmp_path / "softmax" / "model.pt")
    torch.testing.assert_close(softmax, features_of(path), rtol=1e-5, atol=1e-5)
    assert run(path, data, out, *OPTIONS) == 0
    assert "is complete" in capsys.readouterr().out
    assert list((out / "tensorboard").iterdir())


def test_rotary_pre_norm_teacher(rotary_teacher, tmp_path, capsys):
    path, data = rotary_teacher
    out = tmp_path / "out"

    assert run(path, data, out, *OPTIONS, "--softmax-layers", "0") == 0

    errors = before_and_after(r"error of layer +\d+", capsys.readouterr().out)
    assert len(errors) == 2
    assert all(after < 0.8 * before for before, after in errors), errors
    teacher_state = torch.load(path, weights_only=False)["model"]
    name = "encoder.sentence_encoder.layers.1.self_attn.q_proj.weight"
    assert relative_rms(parameters_of(out)[name], teacher_state[name]) > 0.1
    linear, _ = load_model(str(out / "model.pt"))
    assert linear.args.rotary
    assert linear.args.encoder_normalize_before
    attentions = [type(layer.self_attn.attention).__name__ for layer in linear.encoder.sentence_encoder.layers]
    assert attentions == ["SoftmaxAttention", "LLNDiagAttention"]
    # The projections have changed, but softmax attention with them has not.
    convert(out / "model.pt", tmp_path / "softmax", "softmax", dictionary=out / "dict.txt")
    softmax = features_of(tmp_path / "softmax" / "model.pt")
    torch.testing.assert_close(softmax, features_of(path), rtol=1e-5, atol=1e-5)


def test_blocks_keep_positions_and_norms_of_the_teacher(rotary_teacher, tmp_path, capsys):
    path, data = rotary_teacher
    blocks = ("--attention", "window", "--option", "block_size=8", "--softmax-layers", "every:2")

    assert run(path, data, tmp_path / "out", *blocks, *SHORT, "--distill", 2) == 0

    assert re.search(r"with softmax in layer 1\n  64 tokens: cosine \d", capsys.readouterr().out)
    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    assert (model.args.rotary, model.args.encoder_normalize_before) == (True, True)
    attentions = [type(layer.self_attn.attention).__name__ for layer in model.encoder.sentence_encoder.layers]
    assert attentions == ["WindowAttention", "SoftmaxAttention"]
    assert features(model).isfinite().all()


def test_blocks_without_distillation_are_said_to_learn_nothing(teacher, tmp_path, capsys):
    blocks = ("--attention", "window", "--option", "block_size=8")
    advice = "window has nothing to learn in the transfer: --distill"
    assert run(*teacher, tmp_path / "swapped", *blocks, *SHORT) == 0
    report = capsys.readouterr().out
    assert advice in report
    assert re.search(r"teacher: without a transfer\n  cosine of the texts' vectors    \S+\n", report)
    assert "->" not in report.partition("without a transfer")[2]
    assert run(*teacher, tmp_path / "distilled", *blocks, *SHORT, "--distill", 1) == 0
    assert advice not in capsys.readouterr().out


def test_linear_model_computes_what_the_students_computed(rotary_teacher):
    path, _ = rotary_teacher
    model, _ = load_model(str(path))
    students = Students(model, "lln", {}, lr=0.01, steps=1, seed=1)
    for student in students.students:
        for parameter in student.alignment.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    with swapped_attention(students.layers, students.students):
        expected = features(model)

    students.fold()

    torch.testing.assert_close(features(model), expected, rtol=1e-5, atol=1e-5)


def test_teacher_that_keeps_softmax_everywhere_is_unchanged(teacher, tmp_path):
    path, data = teacher
    assert run(path, data, tmp_path / "out", *SHORT, "--softmax-layers", "0,1") == 0
    assert torch.equal(features_of(tmp_path / "out" / "model.pt"), features_of(path))


def test_teacher_needs_no_data_of_its_own(teacher, tmp_path):
    path, data = teacher
    moved = data.rename(tmp_path / "moved")
    try:
        assert run(path, moved, tmp_path / "out", *SHORT) == 0
    finally:
        moved.rename(data)


def test_teacher_without_dictionary_takes_that_of_its_data(teacher, tmp_path):
    path, data = teacher
    (tmp_path / "run").mkdir()
    checkpoint = shutil.copy(path, tmp_path / "run")  # without the folder tokenizer, as fairseq-train leaves it

    assert run(checkpoint, data, tmp_path / "out", *SHORT) == 0

    symbols = Dictionary.load(str(tmp_path / "out" / "dict.txt")).symbols
    assert symbols == Dictionary.load(str(data / "dict.txt")).symbols


def test_finished_run_rejects_changed_settings(teacher, short_run, monkeypatch, capsys):
    path, data = teacher
    for change, message in (
        (("--steps", 3), "--steps 2, now 3"),
        (("--option", "mix=average"), "another option"),
        (("--seed", 2), "--seed 1, now 2"),
    ):
        assert run(path, data, short_run, *SHORT, *change) == 1
        assert f"holds a run with {message}: give another OUT" in capsys.readouterr().err

    # Other paths to the same teacher and text, and an option that states its default, change nothing.
    monkeypatch.chdir(path.parent)
    assert run(path.name, os.path.relpath(data), short_run, *SHORT, "--option", "mix=joint_offset") == 0
    assert "is complete" in capsys.readouterr().out


def test_directory_with_another_model_is_rejected(teacher, tmp_path, capsys):
    path, data = teacher
    (tmp_path / "model.pt").touch()

    for out in (path.parent, tmp_path):
        assert run(path, data, out, "--steps", 2) == 1
        assert capsys.readouterr().err.endswith("holds another model: give another OUT\n")

    assert not (tmp_path / "linearize.pt").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved.pop("stages"),
        lambda saved: saved.update(settings=[]),
        lambda saved: saved.update(softmax_layers="0"),
        lambda saved: saved["stages"]["transfer"].pop("module"),
        lambda saved: saved["stages"]["transfer"].update(step=10**9),
        lambda saved: saved["stages"]["transfer"].update(step=-5),
        lambda saved: saved["stages"]["transfer"].update(step="one"),
    ],
)
def test_damaged_progress_ends_in_one_line(change, teacher, short_run, tmp_path, capsys):
    out = shutil.copytree(short_run, tmp_path / "out")
    saved = torch.load(out / "linearize.pt")
    change(saved)
    saved["complete"] = False
    torch.save(saved, out / "linearize.pt")
    capsys.readouterr()

    assert run(*teacher, out, *SHORT) == 1

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {out / 'linearize.pt'}")
    assert error.endswith("remove it and model.pt to start again, or give another OUT")


DIVERGING = {
    "transfer in step": ("--lr", 1e4, "--steps", 30),
    "transfer on held-out texts": ("--lr", 1e30, "--steps", 1),
    "distillation in step": ("--steps", 1, "--distill", 30, "--distill-lr", 1e20),
}


@pytest.mark.parametrize("stage", DIVERGING)
def test_diverging_stage_writes_no_model(stage, teacher, tmp_path, capsys):
    options = ("--tokens", 64, "--option", "block_size=8")

    assert run(*teacher, tmp_path / "out", *options, *DIVERGING[stage]) == 1

    error = capsys.readouterr().err.strip()
    assert re.search(rf"the {stage} .*diverged to NaN or infinity: try a lower --\S*lr and another OUT$", error)
    assert not (tmp_path / "out" / "model.pt").exists()


def test_fold_keeps_what_the_students_compute(teacher):
    path, data = teacher
    model, task = load_model(str(path))
    students = Students(model, "lln_diag", {"mix": "joint_offset"}, 0.03, 10, seed=1)
    texts = read_texts(data, "train", task.source_dictionary)
    for _ in range(5):
        students.train_step(texts, 128, 64)
    with swapped_attention(students.layers, students.students):
        expected = features(model)

    students.fold()

    torch.testing.assert_close(features(model), expected, rtol=1e-5, atol=1e-5)


def test_distillation_reduces_errors_and_trains_only_layers(teacher, tmp_path, capsys):
    path, data = teacher
    options = ("--option", "block_size=8", "--steps", 20, "--tokens", 192)
    errors = []
    for stages in ((), ("--distill", 60, "--distill-lr", 1e-3)):
        assert run(path, data, tmp_path / "out", *options, *stages) == 0
        errors.append(relative_rms(features_of(tmp_path / "out" / "model.pt"), features_of(path)))

    assert errors[1] < 0.7 * errors[0]
    assert capsys.readouterr().out.count("after the distillation") == 1
    before = torch.load(path)["model"]
    after = parameters_of(tmp_path / "out")
    for name in before:
        assert torch.equal(before[name], after[name]) == (".layers." not in name), name


def test_full_disk_is_reported_in_one_line_and_keeps_the_last_save(teacher, short_run, tmp_path, capsys):
    """A limit on the size of files takes the place of a full disk: the second stage's file exceeds it."""
    path, data = teacher
    out = shutil.copytree(short_run, tmp_path / "out")
    saved = (out / "linearize.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(saved), limits[1]))
    try:
        assert run(path, data, out, *SHORT, "--distill", 2) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    error = capsys.readouterr().err
    assert error.startswith("error: cannot write linearize.pt: ")
    assert error.count("\n") == 1
    assert (out / "linearize.pt").read_bytes() == saved
    assert not list(out.glob("linearize.pt.*"))


def test_directory_of_a_running_conversion_is_rejected(teacher, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, out / "training.lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"locked\n"
        assert run(*teacher, out, "--steps", 2) == 1
    finally:
        holder.kill()
        holder.wait()

    error = capsys.readouterr().err
    assert "belongs to a conversion that is running" in error
    assert error.endswith("or give another OUT\n")
    assert [path.name for path in out.iterdir()] == ["training.lock"]


def test_attention_without_branches_and_data_of_a_task_work(teacher, tmp_path, capsys):
    path, _ = teacher
    data = make_classification(tmp_path / "task", SIZES)

    assert run(path, data, tmp_path / "out", "--attention", "elu", "--steps", 20, "--tokens", 64) == 0

    assert "only" not in capsys.readouterr().out
    assert features_of(tmp_path / "out" / "model.pt").isfinite().all()


def data_cut_off(data, folder):
    """Copy a data directory, with an empty index of the split "valid"."""
    shutil.copytree(data, folder / "data")
    os.truncate(folder / "data" / "valid.idx", 0)
    return folder / "data"


def teacher_and_data_of_other_tokenizers(path, data, folder):
    state = torch.load(path)
    state["extra_state"][PLUGIN_STATE]["tokenizer"] = "cased"
    torch.save(state, folder / "teacher.pt")
    shutil.copytree(data, folder / "data")
    (folder / "data" / "manifest.json").write_text('{"tokenizer": {"identity": "uncased"}}')
    return folder / "teacher.pt", folder / "data"


BAD_INPUT = {  # the error, and a function that returns TEACHER and DATA, or those and options after OUT
    "no such checkpoint": lambda path, data, folder: (folder / "nowhere.pt", data),
    "dict.txt is missing: prepare the data first": lambda path, data, folder: (path, folder),
    "has no option 'nope'": lambda path, data, folder: (path, data, "--option", "nope=1"),
    "--length is 65": lambda path, data, folder: (path, data, "--length", 65),
    "valid.idx is damaged or cut off": lambda path, data, folder: (path, data_cut_off(data, folder)),
    "is not the teacher's": lambda path, data, folder: (path, make_corpus(folder / "corpus", SIZES, WORDS[::-1])),
    "the same ids would stand for other texts": teacher_and_data_of_other_tokenizers,
    "has no text in its split 'valid'": lambda path, data, folder: (
        path,
        make_corpus(folder / "corpus", (("train", 9),)),
    ),
}


@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_input_is_reported_in_one_line_and_creates_nothing(message, teacher, tmp_path, capsys):
    teacher_path, data, *options = BAD_INPUT[message](*teacher, tmp_path)

    assert run(teacher_path, data, tmp_path / "out", *options) == 1

    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_teacher_without_softmax_is_rejected(teacher, tmp_path, monkeypatch, capsys):
    data = teacher[1]
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *MASKED_LM, *LLN, "--max-update", 1)

    assert run(tmp_path / "run" / "checkpoint_last.pt", data, tmp_path / "out") == 1

    assert "has lln_diag attention, but a teacher must have softmax" in capsys.readouterr().err


def test_held_out_texts_of_three_lengths():
    assert held_out_lengths(2048) == [128, 512, 2048]
    assert held_out_lengths(512) == [128, 512]
    assert held_out_lengths(64) == [64]
    assert [held_out_count(64, length) for length in (128, 512, 2048, 16384)] == [64, 64, 16, 8]
    assert held_out_count(4, 16384) == 4


def test_number_of_held_out_texts_can_change_later(teacher, tmp_path, capsys):
    path, data = teacher
    assert run(path, data, tmp_path / "out", *STUDENT, *SHORT, "--evaluate-texts", 2) == 0
    report = capsys.readouterr().out
    assert "stages     transfer (2 steps), about 64 tokens per step" in report
    assert "transfer: 2 steps, relative error" in report
    assert run(path, data, tmp_path / "out", *STUDENT, *SHORT) == 0
    report = capsys.readouterr().out
    assert "held-out texts of 64 tokens" in report
    assert "transfer: 2 steps" not in report  # it was complete

    with pytest.raises(SystemExit):
        run(path, data, tmp_path / "out", "--evaluate-texts", 1)
    assert "--evaluate-texts must be at least 2" in capsys.readouterr().err
