"""Tests of `lln-fairseq linearize` with a fine-tuned teacher and the data of its task."""

import re
import shutil

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.inference.evaluate import compute_outputs, compute_scores
from lln_fairseq.inference.loading import load_model
from lln_fairseq.linearize import progress, softmax_layers
from lln_fairseq.linearize.attention_transfer import swapped_attention
from lln_fairseq.linearize.distillation import Distillation
from lln_fairseq.linearize.students import Students
from lln_fairseq.linearize.task_rows import TaskRows, encoder_tokens
from lln_fairseq.training.recipes import layout_options
from tests import text_runs
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    MASKED_LM,
    USER_DIR,
    binarize,
    make_classification,
    make_corpus,
    make_dictionary,
    sentences,
    train,
    widen_attention,
    write_scores,
)

SIZES = (("train", 120), ("valid", 90))
SOFTMAX = (*LLN, "--attention", "softmax", "--dropout", 0)
CLASSIFIER = (*CLASSIFICATION, "--criterion", "lln_sentence_prediction", "--lr", 0.003)
STUDENT = ("--option", "mix=joint_offset", "gain=learned", "block_size=8")
OPTIONS = (*STUDENT, "--steps", 20, "--tokens", 128, "--lr", 0.03)
SHORT = ("--steps", 2, "--tokens", 64)
HEADS = "classification_heads."


def run(*arguments):
    return main(["linearize", *map(str, arguments)])


def make_pairs(directory):
    """Binarize a classification with two inputs per row, and return the directory."""
    make_classification(directory, SIZES)
    shutil.copytree(directory / "input0", directory / "input1")
    for seed, (split, count) in enumerate(SIZES):
        binarize(sentences(count, seed + 7), directory / "input1" / "dict.txt", directory / "input1" / split)
    return directory


def fine_tune(folder, data, *options):
    """Train a classifier, widen its attention scores and its outputs, and return the path of its checkpoint."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        train(monkeypatch, folder / "log", data, folder / "run", *options)
    path = folder / "run" / "checkpoint_last.pt"
    state = widen_attention(path)
    model, task = load_model(str(path), str(data))
    medians = compute_outputs(model, task, "train").logits.median(dim=0).values
    state["model"][f"{HEADS}sentence_classification_head.out_proj.bias"] -= medians  # predict every class
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return the path and the data of a classifier of pairs."""
    folder = tmp_path_factory.mktemp("classifier")
    data = make_pairs(folder / "data")
    options = (*CLASSIFIER, *SOFTMAX, "--separator-token", 2, "--max-positions", 100, "--max-update", 4)
    return fine_tune(folder, data, *options), data


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    """Return the path and the data of a regression of single sentences."""
    folder = tmp_path_factory.mktemp("regression")
    data = make_classification(folder / "data", SIZES)
    write_scores(data, SIZES)
    options = (*CLASSIFIER, *SOFTMAX, "--regression-target", "--num-classes", 1, "--max-update", 3)
    return fine_tune(folder, data, *options), data


def printed_scores(report):
    """Return the scores in a report by their labels."""
    return dict(re.findall(r"^  (\S.*?)  +((?:accuracy|Spearman) \S+)$", report, re.MULTILINE))


def evaluated_score(capsys, *arguments):
    """Return the first score that `lln-fairseq evaluate` prints, without options on the split valid."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments)]) == 0
    return re.search(r"(accuracy|Spearman) [-.\d]+%?", capsys.readouterr().out)[0]


def test_classifier_keeps_its_task_and_prints_its_scores(teacher, tmp_path, capsys):
    path, data = teacher
    out = tmp_path / "out"

    assert run(path, data, out, *OPTIONS, "--distill", 20, "--distill-lr", 1e-3) == 0

    report = capsys.readouterr().out
    assert f"scores on all 90 rows of split 'valid' of {data}:\n" in report
    scores = printed_scores(report)
    assert list(scores) == [
        "teacher",
        "lln_diag swapped in without training",
        "after the transfer",
        "after the transfer, LLN only",
        "after the transfer, Diag only",
        "after the distillation",
    ]
    assert len(set(scores.values())) > 2  # the attention matters for this teacher
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the distillation"] == evaluated_score(capsys, out / "model.pt", data)
    assert scores["after the distillation"] == evaluated_score(capsys, out / "model.pt")  # with the same data
    before = torch.load(path, weights_only=False)["model"]
    after = torch.load(out / "model.pt")["model"]
    for name in before:
        assert torch.equal(before[name], after[name]) == (".layers." not in name), name
    assert any(HEADS in name for name in after)
    assert (out / "tokenizer" / "label" / "dict.txt").is_file()

    assert run(path, data, out, *OPTIONS, "--distill", 20, "--distill-lr", 1e-3) == 0
    report = capsys.readouterr().out
    assert printed_scores(report) == scores
    assert "is complete" in report


def test_scores_are_those_of_the_swapped_attentions(teacher, tmp_path, capsys):
    """Without any step of the transfer, all scores can be computed from the untrained students."""
    path, data = teacher
    assert run(path, data, tmp_path / "out", *STUDENT, "--steps", 0) == 0
    scores = printed_scores(capsys.readouterr().out)
    model, task = load_model(str(path), str(data))
    options = {"mix": "joint_offset", "gain": "learned", "block_size": 8}
    students = Students(model, "lln_diag", options, 0.01, 0, seed=1)
    swapped = "lln_diag swapped in without training"
    attentions = {swapped: students.students}
    for name, branch in students.branches().items():
        attentions[f"{swapped}, {name}"] = branch

    assert list(scores) == ["teacher", *attentions]
    for label, modules in attentions.items():
        with swapped_attention(students.layers, modules):
            expected = compute_scores(task, compute_outputs(model, task, "valid"))
        assert scores[label] == f"accuracy {expected['accuracy']:.2%}", label


def test_scores_of_other_validation_rows_are_not_kept(teacher, tmp_path, capsys):
    path, source = teacher
    data = shutil.copytree(source, tmp_path / "data")
    assert run(path, data, tmp_path / "out", *SHORT) == 0
    for file in data.glob("*/train.*"):
        shutil.copy(file, file.with_name(f"valid{file.suffix}"))
    capsys.readouterr()

    assert run(path, data, tmp_path / "out", *SHORT) == 0

    scores = printed_scores(capsys.readouterr().out)
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the transfer"] == evaluated_score(capsys, tmp_path / "out/model.pt", data)


def test_first_rows_can_be_scored_and_other_rows_later(teacher, tmp_path, capsys):
    path, data = teacher
    assert run(path, data, tmp_path / "out", *SHORT, "--evaluate-rows", 20) == 0
    report = capsys.readouterr().out
    assert "scores on the first 20 of 90 rows" in report
    model, task = load_model(str(path), str(data))
    outputs = compute_outputs(model, task, "valid")
    correct = (outputs.logits.argmax(dim=-1) == outputs.targets)[:20].double().mean().item()
    assert printed_scores(report)["teacher"] == f"accuracy {correct:.2%}"

    assert run(path, data, tmp_path / "out", *SHORT) == 0

    report = capsys.readouterr().out
    assert "scores on all 90 rows" in report
    assert printed_scores(report)["teacher"] == evaluated_score(capsys, path, data)


def test_regression_prints_spearman(regression, tmp_path, capsys):
    path, data = regression

    assert run(path, data, tmp_path / "out", *OPTIONS) == 0

    scores = printed_scores(capsys.readouterr().out)
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the transfer"] == evaluated_score(capsys, tmp_path / "out" / "model.pt")


def test_plain_text_keeps_the_classifier(teacher, tmp_path, capsys):
    path, data = teacher
    corpus = make_corpus(tmp_path / "corpus", SIZES)

    assert run(path, corpus, tmp_path / "out", *SHORT) == 0

    assert "held-out texts of 100 tokens" in capsys.readouterr().out
    before = torch.load(path, weights_only=False)["model"]
    after = torch.load(tmp_path / "out" / "model.pt")["model"]
    heads = [name for name in before if HEADS in name]
    assert heads
    assert all(torch.equal(before[name], after[name]) for name in heads)
    evaluated_score(capsys, tmp_path / "out" / "model.pt")  # on the data of the teacher
    _, task = load_model(str(tmp_path / "out" / "model.pt"))
    assert task.cfg.data == str(data)


def test_models_of_fairseq_are_teachers(tmp_path, capsys):
    data = make_classification(tmp_path / "data", SIZES)
    options = [str(option) for option in CLASSIFICATION]
    options[1] = "sentence_prediction"
    path = fine_tune(tmp_path, data, *options, *USER_DIR, "--arch", "roberta_base", "--max-update", 1)

    assert run(path, data, tmp_path / "out", *OPTIONS) == 0

    scores = printed_scores(capsys.readouterr().out)
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the transfer"] == evaluated_score(capsys, tmp_path / "out" / "model.pt")


def test_two_towers_are_linearized_on_both_texts(tmp_path, capsys):
    data = make_pairs(tmp_path / "data")
    options = ("--two-towers", "--max-positions", 64, "--max-update", 1)
    path = fine_tune(tmp_path, data, *CLASSIFIER, *SOFTMAX, *options)

    assert run(path, data, tmp_path / "out", *OPTIONS, "--distill", 2, "--softmax-layers", "best:1") == 0

    scores = printed_scores(capsys.readouterr().out)
    assert scores["teacher"] == evaluated_score(capsys, path, data)
    assert scores["after the distillation"] == evaluated_score(capsys, tmp_path / "out" / "model.pt")


def parameters_of(path):
    return torch.load(path, weights_only=False)["model"]


def test_named_layer_keeps_the_softmax_of_the_teacher(teacher, tmp_path, capsys):
    path, data = teacher
    out = tmp_path / "out"

    assert run(path, data, out, *OPTIONS, "--softmax-layers", "every:2") == 0

    scores = printed_scores(capsys.readouterr().out)
    assert scores["with softmax in layer 1"] == evaluated_score(capsys, out / "model.pt")
    before = parameters_of(path)
    after = parameters_of(out / "model.pt")
    for name in before:
        assert torch.equal(before[name], after[name]) == (not re.search(r"layers\.0\..*[qk]_proj", name)), name
    assert not any("layers.1.self_attn.attention." in name for name in after)
    model, _ = load_model(str(out / "model.pt"))
    attentions = [layer.self_attn.attention for layer in model.encoder.sentence_encoder.layers]
    assert [type(attention).__name__ for attention in attentions] == ["LLNDiagAttention", "SoftmaxAttention"]
    assert load_checkpoint_lazily(str(out / "model.pt"))["cfg"]["model"]["softmax_layers"] == "1"
    assert run(path, data, out, *OPTIONS, "--softmax-layers", "1") == 0
    assert "is complete" in capsys.readouterr().out


def test_layout_sets_attention_and_its_options(teacher, tmp_path, capsys):
    path, data = teacher
    out = tmp_path / "out"

    assert run(path, data, out, "--layout", "long_pairs", "--option", "block_size=16", "--softmax-layers", "0") == 0

    options = load_checkpoint_lazily(str(out / "model.pt"))["cfg"]["model"]
    assert layout_options("long_pairs").items() - {("block_diag_block_size", 128)} <= options.items()
    assert (options["block_diag_block_size"], options["softmax_layers"]) == (16, "0")


def test_softmax_layers_of_the_teacher_become_linear(teacher, tmp_path):
    path, data = teacher
    state = torch.load(path)
    state["cfg"]["model"]["softmax_layers"] = "1"  # of no effect in a model with softmax in every layer
    torch.save(state, tmp_path / "teacher.pt")

    assert run(tmp_path / "teacher.pt", data, tmp_path / "out", *STUDENT, *SHORT) == 0

    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    attentions = [layer.self_attn.attention for layer in model.encoder.sentence_encoder.layers]
    assert [type(attention).__name__ for attention in attentions] == ["LLNDiagAttention"] * 2


def test_best_layers_are_the_nearest_to_the_teacher(teacher, tmp_path, capsys):
    path, data = teacher
    assert run(path, data, tmp_path / "out", *OPTIONS, "--softmax-layers", "best:1") == 0
    report = capsys.readouterr().out
    assert "KL divergence from the teacher on 120 rows of split 'train'" in report
    assert "rounding errors" not in report
    linear = float(re.search(r"linear attention in every layer: (\S+)", report)[1])
    ranking = [(int(layer), float(kl)) for layer, kl in re.findall(r"layer (\d) (\d\S+?)(?:,|$)", report, re.MULTILINE)]
    assert len(ranking) == 2
    assert 0 < ranking[0][1] <= ranking[1][1]
    assert ranking[0][1] < linear
    best, divergence = ranking[0]
    assert f"with softmax in layer {best} " in report
    teacher_model, task = load_model(str(path), str(data))
    student, _ = load_model(str(tmp_path / "out" / "model.pt"))
    expected, actual = (
        compute_outputs(model, task, "train").logits.double().softmax(dim=-1) for model in (teacher_model, student)
    )
    assert (expected * (expected / actual).log()).sum(dim=-1).mean().item() == pytest.approx(divergence, abs=1e-4)

    # The choice is part of the progress, and all layers together are the teacher again.
    assert run(path, data, tmp_path / "out", *OPTIONS, "--softmax-layers", "best:1", "--distill", 2) == 0
    assert "KL divergence" not in capsys.readouterr().out
    assert run(path, data, tmp_path / "all", *OPTIONS, "--softmax-layers", "best:2") == 0
    assert re.search(r"softmax in layer \d and one more: layer \d 0\.0000$", capsys.readouterr().out, re.MULTILINE)


def test_best_layers_of_texts_in_one_block_have_a_warning(teacher, tmp_path, capsys):
    options = ("--option", "mix=joint_offset", "block_size=128", *SHORT)
    assert run(*teacher, tmp_path / "out", *options, "--softmax-layers", "best:2") == 0
    lines = capsys.readouterr().out.splitlines()
    (number,) = [number for number, line in enumerate(lines) if "so rounding errors choose the next layers" in line]
    assert lines[number - 1] == "  linear attention in every layer: 0.0000"
    assert lines[number + 1].startswith("  softmax in one layer: layer ")


def test_best_layers_of_a_regression_and_of_texts(regression, tmp_path, capsys, monkeypatch):
    path, data = regression
    assert run(path, data, tmp_path / "rows", *OPTIONS, "--softmax-layers", "best:1") == 0
    report = capsys.readouterr().out
    assert "mean squared error compared with the teacher" in report
    linear, best = (float(value) for value in re.findall(r"(?:every layer:|one layer: layer \d) (\d\S+\d)", report))
    assert best < linear

    corpus = make_corpus(tmp_path / "corpus", SIZES)
    monkeypatch.setattr(softmax_layers, "MAX_TOKENS", 2600)
    assert run(path, corpus, tmp_path / "texts", *OPTIONS, "--softmax-layers", "best:1") == 0
    report = capsys.readouterr().out
    assert "relative error of the last hidden state on 40 texts" in report  # of 64 tokens
    linear, best = (float(value) for value in re.findall(r"(?:every layer:|one layer: layer \d) (\d\S+\d)", report))
    assert best < linear
    assert re.search(r"with softmax in layer \d\n  64 tokens: cosine \d", report)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("9", "softmax_layers must be numbers from 0 to 1"),
        ("0,x", "or every:N with N from 1 to 2 (in linearize also best:N), got '0,x'"),
        ("every:4", "or every:N with N from 1 to 2 (in linearize also best:N), got 'every:4'"),
        ("best:3", "--softmax-layers is best:3, but the teacher has 2 layers"),
        ("best:0", "softmax_layers must be numbers from 0 to 1"),
    ],
)
def test_layers_that_do_not_exist_are_rejected(layers, message, teacher, tmp_path, capsys):
    assert run(*teacher, tmp_path / "out", *SHORT, "--softmax-layers", layers) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_stages_can_be_added_to_a_finished_run(teacher, tmp_path, capsys):
    path, data = teacher
    stages = ("--softmax-layers", "0", "--distill", 3)
    assert run(path, data, tmp_path / "whole", *OPTIONS, *stages) == 0
    assert run(path, data, tmp_path / "out", *OPTIONS) == 0

    assert run(path, data, tmp_path / "out", *OPTIONS, *stages) == 0

    expected = parameters_of(tmp_path / "whole" / "model.pt")
    actual = parameters_of(tmp_path / "out" / "model.pt")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    for layers, now in ((("--softmax-layers", "1"), "1"), ((), "none")):
        assert run(path, data, tmp_path / "out", *OPTIONS, *layers, "--distill", 3) == 1
        assert f"holds a run with --softmax-layers 0, now {now}: give another OUT" in capsys.readouterr().err
    assert run(path, data, tmp_path / "out", *OPTIONS, "--softmax-layers", "0") == 1
    assert "holds a run with --distill 3, now 0: give another OUT" in capsys.readouterr().err


def test_blocks_of_softmax_have_no_transfer(teacher, tmp_path, capsys):
    path, data = teacher
    blocks = ("--attention", "block_diag", "--option", "block_size=8", "--steps", 50)

    assert run(path, data, tmp_path / "out", *blocks, "--distill", 3) == 0

    report = capsys.readouterr().out
    assert re.search(r"^stages +distillation \(3 steps\)", report, re.MULTILINE)
    assert list(printed_scores(report)) == [
        "teacher",
        "block_diag swapped in without training",
        "after the distillation",
    ]


def test_padding_does_not_change_the_losses(teacher):
    path, data = teacher
    model, _ = load_model(str(path), str(data))
    options = {"mix": "joint_offset", "block_size": 8}
    students = Students(model, "lln_diag", options, 0.01, 1, seed=1)
    other, _ = load_model(str(path), str(data))
    with torch.no_grad():
        other.encoder.sentence_encoder.layers[0].fc1.weight.mul_(1.5)
    distillation = Distillation(model, other, 0.01, 1, seed=1)
    tokens = torch.randint(4, 60, (2, 30), generator=torch.Generator().manual_seed(7))
    padded = torch.nn.functional.pad(tokens, (0, 11), value=1)

    for trainer in (students, distillation):
        with torch.no_grad():
            torch.testing.assert_close(trainer.errors(padded), trainer.errors(tokens))


def test_students_get_the_lengths_of_first_segments(teacher):
    path, data = teacher
    model, task = load_model(str(path), str(data))
    students = Students(model, "lln_diag", {"mix": "joint_offset"}, 0.01, 0, seed=1)
    tokens = TaskRows(task, "train", 100).sample([0, 1, 2])["net_input"]["src_tokens"]
    contexts = []
    for student in students.students:
        student.register_forward_pre_hook(lambda module, inputs: contexts.append(inputs[3]))
    with torch.no_grad():
        students.errors(tokens)

    expected = [row.tolist().index(task.source_dictionary.eos()) + 1 for row in tokens]
    assert [context.first_lengths.tolist() for context in contexts] == len(students.students) * [expected]


STAGES = {"transfer": (), "distillation": ("--distill", 8)}


@pytest.mark.parametrize("stage", STAGES)
def test_interrupted_stage_resumes_exactly(stage, teacher, tmp_path, monkeypatch, capsys):
    path, data = teacher
    options = (*OPTIONS, "--steps", 8, *STAGES[stage])
    monkeypatch.setattr(progress, "SAVE_INTERVAL", 3)
    monkeypatch.setattr(progress, "LOG_INTERVAL", 1)
    # TensorBoard reads files in the order of their names, which end in this number if they are of the same second.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    assert run(path, data, tmp_path / "whole", *options) == 0
    whole_report = capsys.readouterr().out
    train_stage = progress.Progress.train

    def interrupted(self, name, trainer, *args):
        train_step = trainer.train_step

        def interrupted_step(*args):
            if name == stage and trainer.step == 5:
                raise KeyboardInterrupt
            return train_step(*args)

        trainer.train_step = interrupted_step
        train_stage(self, name, trainer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "train", interrupted)
        assert run(path, data, tmp_path / "out", *options) == 130
    assert not (tmp_path / "out" / "model.pt").exists()
    capsys.readouterr()

    assert run(path, data, tmp_path / "out", *options) == 0

    assert printed_scores(capsys.readouterr().out) == printed_scores(whole_report)
    expected = torch.load(tmp_path / "whole" / "model.pt")["model"]
    actual = torch.load(tmp_path / "out" / "model.pt")["model"]
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard" / stage))
    events.Reload()
    assert [event.step for event in events.Scalars(f"{stage}_error/layer_01")] == list(range(1, 9))


def load_rows(teacher):
    _, task = load_model(str(teacher[0]), str(teacher[1]))
    return TaskRows(task, "train", 100), task


def test_drawn_rows_have_similar_lengths_and_equal_chances(teacher):
    rows, task = load_rows(teacher)
    generator = torch.Generator().manual_seed(2)
    counts = np.zeros(len(rows))
    padded = 0
    total = 0
    for _ in range(2000):
        sample = rows.draw(160, 60, generator)
        tokens = sample["net_input"]["src_tokens"]
        assert tokens.numel() <= 160 or len(tokens) == 1
        assert tokens.shape[1] <= 60
        padded += tokens.eq(task.source_dictionary.pad()).sum().item()
        total += tokens.numel()
        counts[sample["id"].numpy()] += 1

    short = rows.lengths <= 60
    assert counts[~short].sum() == 0
    assert counts[short].min() > 0.5 * counts[short].mean()
    assert counts[short].max() < 2 * counts[short].mean()
    assert padded < 0.1 * total


def test_rows_are_the_sequences_of_the_classifier(teacher):
    rows, task = load_rows(teacher)
    task.load_dataset("train")
    expected = task.dataset("train")[3]["net_input.src_tokens"]

    sample = rows.sample([3, 4])

    assert sample["net_input"]["src_tokens"][0, : len(expected)].equal(expected)
    assert (expected == 2).sum() >= 3  # <s> A </s></s> B </s>
    separate = {"net_input": {"src_tokens": torch.full((2, 3), 5), "other_tokens": torch.full((2, 4), 6)}}
    assert encoder_tokens(separate, pad=1).tolist() == [[5, 5, 5, 1]] * 2 + [[6, 6, 6, 6]] * 2


def test_classifier_predicts_and_is_exported(tmp_path, monkeypatch, capsys):
    data = text_runs.make_glue(tmp_path / "glue", "RTE") / "RTE"
    options = (*CLASSIFIER, *SOFTMAX, *text_runs.OPTIONS["RTE"], "--max-update", 2)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *options)
    assert run(tmp_path / "run" / "checkpoint_last.pt", data, tmp_path / "out", *SHORT, "--distill", 2) == 0
    shutil.rmtree(data)  # the tokenizer is part of OUT
    text = tmp_path / "text.tsv"
    text.write_text("a wonderful film.\ta dreadful story!\n")

    assert main(["predict", str(tmp_path / "out" / "model.pt"), "--input", str(text)]) == 0
    assert re.search(r"^(not_)?entailment\t0\.\d+$", capsys.readouterr().out, re.MULTILINE)
    assert main(["export", str(tmp_path / "out" / "model.pt"), str(tmp_path / "hf")]) == 0
    assert "LLNRobertaForSequenceClassification" in capsys.readouterr().out


def test_diverging_transfer_writes_no_model(teacher, tmp_path, capsys):
    assert run(*teacher, tmp_path / "out", "--tokens", 64, "--lr", 1e30, "--steps", 1) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: after the transfer: the classifier gives NaN or infinite outputs")
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "model.pt").exists()


def without(data, copy, *names):
    """Copy a data directory without these files or directories."""
    shutil.copytree(data, copy)
    for name in names:
        for path in copy.glob(name):
            path.unlink()
    return copy


def with_labels(data, copy, names):
    """Copy a data directory with other names of labels."""
    shutil.copytree(data, copy)
    make_dictionary(copy / "label" / "dict.txt", names)
    return copy


BAD_INPUT = {
    "task.num_classes must be the number of labels": lambda data, copy: with_labels(data, copy, ["0", "1", "2"]),
    "was trained with the labels": lambda data, copy: with_labels(data, copy, ["1", "0"]),
    "cannot load split 'valid'": lambda data, copy: without(data, copy, "input?/valid.*", "label/valid.*"),
    "split 'valid' of .* has no labels": lambda data, copy: without(data, copy, "label/valid.*"),
    "split 'train' of .* has no labels": lambda data, copy: without(data, copy, "label/train.*"),
    "label/dict.txt is missing": lambda data, copy: without(data, copy, "label/dict.txt"),
    "has no row of at most 3 tokens": lambda data, copy: data,
}


def test_regression_without_labels_is_rejected(regression, tmp_path, capsys):
    for split in ("train", "valid"):
        data = without(regression[1], tmp_path / split, f"label/{split}.label")
        assert run(regression[0], data, tmp_path / "out", *SHORT) == 1
        assert f"split '{split}' of {data} has no labels" in capsys.readouterr().err


@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_data_is_reported_in_one_line_and_creates_nothing(message, teacher, tmp_path, capsys):
    path, data = teacher
    options = ("--length", 3) if "3 tokens" in message else ()

    assert run(path, BAD_INPUT[message](data, tmp_path / "data"), tmp_path / "out", *SHORT, *options) == 1

    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_options_of_classifiers_need_a_classifier(teacher, tmp_path, monkeypatch, capsys):
    data = make_corpus(tmp_path / "data", SIZES)
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *MASKED_LM, *SOFTMAX, "--max-update", 1)
    pretrained = tmp_path / "run" / "checkpoint_last.pt"
    for path, text in ((pretrained, data), (pretrained, teacher[1]), (teacher[0], data)):
        assert run(path, text, tmp_path / "out", *SHORT, "--evaluate-rows", 3) == 1
        assert "--evaluate-rows is for a fine-tuned TEACHER" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
