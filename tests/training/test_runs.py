"""Whole runs of fairseq-train with our tasks: what used to fail in silence."""

import errno
import logging
import shutil
from pathlib import Path

import fairseq.tasks
import pytest
import torch
from fairseq.file_io import PathManager
from omegaconf import OmegaConf

from lln_fairseq.__main__ import main
from lln_fairseq.errors import InputError, TrainingError
from lln_fairseq.fairseq_compat import patches
from lln_fairseq.tasks import run_worker
from lln_fairseq.training.settings import split_global_batch
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, WORDS, make_classification, make_corpus, train
from tests.helpers import with_representatives

SCORED = ("--criterion", "lln_sentence_prediction")
FP16 = ("--fp16", "--memory-efficient-fp16", "--fp16-init-scale", 8)


def parameters(path):
    return torch.load(path)["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


RESUMED = [
    (),
    FP16,
    ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 8),
    ("--bf16",),
    ("--bf16", "--fp16-no-flatten-grads", "--optimizer", "nag"),
    ("--store-ema", "--ema-fp32", "--ema-update-freq", 2, "--ema-decay", 0.9),
]


@pytest.mark.parametrize(
    "precision",
    with_representatives(RESUMED, (), *RESUMED[2:4], RESUMED[-1]),
    ids=lambda options: " ".join(map(str, options)),
)
def test_an_interrupted_run_goes_on_exactly(precision, corpus, tmp_path, monkeypatch, half):
    options = (*MASKED_LM, *LLN, *precision, "--fp16-scale-window", 3)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options, "--max-update", 10)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "b", *options, "--max-update", 5)
    train(monkeypatch, tmp_path / "c.log", corpus, tmp_path / "b", *options, "--max-update", 10)
    whole, resumed = (torch.load(tmp_path / run / "checkpoint_last.pt") for run in "ab")
    assert same(whole["model"], resumed["model"])
    averages = [state["extra_state"].get("ema_fp32_params", {}) for state in (whole, resumed)]
    assert same(*averages)
    scales = [state["last_optimizer_state"].get("loss_scale") for state in (whole, resumed)]
    assert scales[0] == scales[1]


@pytest.mark.exhaustive
def test_the_host_alone_forgets_the_float32_parameters_of_fp16(corpus, tmp_path, monkeypatch, half):
    options = (*MASKED_LM, *LLN, "--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 8, "--task", "masked_lm",
               "--required-batch-size-multiple", 1)  # fmt: skip
    for run, updates in (("a", 10), ("b", 5), ("b", 10)):
        train(monkeypatch, tmp_path / f"{run}{updates}.log", corpus, tmp_path / run, *options, "--max-update", updates)
    assert not same(*(parameters(tmp_path / run / "checkpoint_last.pt") for run in "ab"))


def test_a_restore_file_does_not_replace_a_run_that_is_under_way(corpus, task_data, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "p", *MASKED_LM, *LLN, "--max-positions", 64)
    before = ("--restore-file", tmp_path / "p" / "checkpoint_last.pt", "--reset-optimizer", "--reset-dataloader",
              "--reset-meters", "--reset-lr-scheduler")  # fmt: skip
    train(monkeypatch, tmp_path / "a.log", task_data, tmp_path / "a", *CLASSIFICATION, *LLN, *before)
    with pytest.raises(InputError, match="would start again and replace it: give --finetune-from-model"):
        train(monkeypatch, tmp_path / "b.log", task_data, tmp_path / "a", *CLASSIFICATION, *LLN, *before)


def test_metrics_of_validation(task_data, tmp_path, monkeypatch):
    log = train(monkeypatch, tmp_path / "a.log", task_data, tmp_path / "a", *CLASSIFICATION, *SCORED, *LLN,
                "--best-checkpoint-metric", "mcc", "--maximize-best-checkpoint-metric")  # fmt: skip
    stock = train(monkeypatch, tmp_path / "b.log", task_data, tmp_path / "b", *CLASSIFICATION, *LLN,
                  "--report-acc-and-f1")  # fmt: skip
    assert [row["loss"] for row in log["train"]] == [row["loss"] for row in stock["train"]]
    ours, theirs = log["valid"][-1], stock["valid"][-1]
    assert float(ours["valid_f1"]) == pytest.approx(float(theirs["valid_f1"]), abs=0.06)
    assert float(ours["valid_accuracy"]) == pytest.approx(float(theirs["valid_accuracy"]), abs=0.06)
    assert -100 <= float(ours["valid_mcc"]) <= 100


def test_word_labels_have_an_f1_too(tmp_path, monkeypatch):
    words = ["contradiction", "entailment"]
    data = make_classification(tmp_path / "data", names=words, class_of=lambda row, line: row % 2)
    options = (*CLASSIFICATION, *LLN)
    with pytest.raises(ValueError, match="invalid literal for int"):
        train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *options, "--report-acc-and-f1")
    log = train(monkeypatch, tmp_path / "b.log", data, tmp_path / "b", *options, *SCORED)
    assert {"valid_f1", "valid_mcc", "valid_accuracy"} <= set(log["valid"][-1])


def test_correlations_of_a_regression(task_data, tmp_path, monkeypatch):
    data = shutil.copytree(task_data, tmp_path / "data")
    for split, count in (("train", 60), ("valid", 11)):
        (data / "label" / f"{split}.label").write_text("".join(f"{row % 7 / 6}\n" for row in range(count)))
    log = train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *CLASSIFICATION, *SCORED, *LLN,
                "--regression-target", "--num-classes", 1, "--best-checkpoint-metric", "pearson_spearman",
                "--maximize-best-checkpoint-metric")  # fmt: skip
    valid = {key: float(value) for key, value in log["valid"][-1].items() if key.startswith("valid_")}
    mean = (valid["valid_pearson"] + valid["valid_spearman"]) / 2
    assert valid["valid_pearson_spearman"] == pytest.approx(mean, abs=0.01)


def break_a_layer(monkeypatch):
    """From the third update on the first layer's attention gives NaN."""
    from lln_fairseq.modules.multihead_attention import LLNMultiheadAttention

    forward, calls = LLNMultiheadAttention.forward, []

    def broken(self, *args, **kwargs):
        calls.append(1)
        out, weights = forward(self, *args, **kwargs)
        return (out * torch.nan if len(calls) > 4 else out), weights

    monkeypatch.setattr(LLNMultiheadAttention, "forward", broken)


def test_the_minimum_loss_scale_names_the_module_and_the_last_scales(corpus, tmp_path, monkeypatch, half):
    break_a_layer(monkeypatch)
    with pytest.raises(TrainingError) as caught:
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *FP16,
              "--min-loss-scale", 0.5, "--max-update", 9)  # fmt: skip
    message = str(caught.value)
    assert message.startswith("update 3: Minimum loss scale reached (0.5)")
    assert "layers.0.self_attn" in message
    assert "Last loss scales: 8, 4, 2, 1." in message
    assert "bf16 instead of fp16" in message
    assert (tmp_path / "a" / "crash.pt").exists()


def test_a_kill_while_a_checkpoint_is_copied_leaves_the_old_one(tmp_path, monkeypatch):
    source, target = tmp_path / "new.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new " * 1000)
    target.write_bytes(b"old")

    def killed(src, dst):
        Path(dst).write_bytes(b"new ")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", killed)
    for copy, left in ((PathManager.copy.__wrapped__, b"new "), (PathManager.copy, b"old")):
        target.write_bytes(b"old")
        with pytest.raises(KeyboardInterrupt):
            copy(str(source), str(target), overwrite=True)
        assert target.read_bytes() == left


def test_a_full_disk_leaves_the_last_checkpoint(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options, "--max-update", 2)
    last = tmp_path / "a" / "checkpoint_last.pt"
    before = last.read_bytes()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(InputError, match=r"cannot save .*: No space left on device .* the last checkpoint .* is whole"):
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *options, "--max-update", 4)
    assert last.read_bytes() == before
    assert not list((tmp_path / "a").glob("*.tmp"))
    with pytest.raises(InputError, match=r"cannot save .*/new has no checkpoint_last\.pt yet: make room"):
        train(monkeypatch, tmp_path / "new.log", corpus, tmp_path / "new", *options, "--max-update", 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fp16",), "fp16 needs a GPU"),
        (("--distributed-world-size", 3), "3 workers here, but this machine has 0 GPUs"),
        (("--global-batch", 64, "--update-freq", 2), r"batch_size 8 x optimization.update_freq 2 x 1 workers is 16"),
        (("--finetune-from-model", "nowhere.pt"), "nowhere.pt: no such checkpoint"),
        (("--spectral-norm-classification-head",), r"model\.spectral_norm_classification_head does not work"),
        (("--mask-prob", 0), r"task\.mask_prob is 0\.0, and must be more than 0 and less than 1"),
        (("--encoder-layers-to-keep", 0), r"model\.encoder_layers_to_keep does not work .* Set model\.encoder_layers"),
    ],
)
def test_settings_that_cannot_work(options, message, corpus, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=message):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *options)


GLOBAL_BATCHES = [  # global batch, batch size, update freq, workers -> batch size and update freq, or None: refused
    ((256, 16, 1, 1), (16, 16)),
    ((256, 16, 1, 8), (16, 2)),
    ((32, 32, 1, 8), (4, 1)),
    ((32, 8, 4, 1), (8, 4)),
    ((32, 8, 2, 1), None),
    ((32, 12, 1, 1), None),
    ((32, 32, 1, 3), None),
    ((32, None, 1, 1), None),
    ((None, 8, 3, 5), (8, 3)),
]


@pytest.mark.parametrize(("given", "expected"), GLOBAL_BATCHES)
def test_the_split_of_a_global_batch_over_devices(given, expected):
    total, size, frequency, workers = given
    cfg = OmegaConf.create({"task": {"global_batch": total}, "dataset": {"batch_size": size},
                            "optimization": {"update_freq": [frequency]},
                            "distributed_training": {"distributed_world_size": workers}})  # fmt: skip
    if expected is None:
        with pytest.raises(InputError, match=r"task\.global_batch is 32 .* change the split"):
            split_global_batch(cfg)
    else:
        split_global_batch(cfg)
        assert (cfg.dataset.batch_size, list(cfg.optimization.update_freq)) == (expected[0], [expected[1]])


def wrong_input(cfg):
    """A training's main, in a process that fairseq spawns: everything is registered, and the input is wrong."""
    assert "lln_masked_lm" in fairseq.tasks.TASK_REGISTRY
    raise InputError("no such file: x")


def spawn(cfg, main):
    torch.multiprocessing.spawn(call, args=(main, cfg), nprocs=1)


def call(number, main, cfg):
    main(cfg)


@pytest.mark.exhaustive
def test_an_error_in_a_worker_is_one_line_too(capfd):
    cfg = OmegaConf.create({"common": {"bf16": False, "tpu": False}, "checkpoint": {"no_save": True}, "model": None,
                            "distributed_training": {"distributed_init_method": "env://", "distributed_rank": 0,
                                                     "distributed_world_size": 1}})  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        patches._call_main(run_worker, spawn, cfg, wrong_input)
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert "error: no such file: x\n" in said
    assert "Traceback" not in said


def test_an_update_sees_the_global_batch(tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path / "corpus", sizes=(("train", 150), ("valid", 11)))
    for size in (4, 16, 32):
        log = train(monkeypatch, tmp_path / f"{size}.log", corpus, tmp_path / f"{size}", *MASKED_LM, *LLN,
                    "--global-batch", 16, "--batch-size", size, "--max-update", 2)  # fmt: skip
        assert max(float(row["bsz"]) for row in log["train"]) == 16


@pytest.mark.parametrize("symbols", [WORDS[:50], WORDS[::-1]])
def test_data_with_another_dictionary_is_refused(symbols, begun, tmp_path, monkeypatch):
    other = make_corpus(tmp_path / "other", words=symbols)
    with pytest.raises(
        InputError, match=r"the dictionary of .*other is not the one that .*checkpoint_last.pt was made"
    ):
        train(monkeypatch, tmp_path / "a.log", other, tmp_path / "a", *MASKED_LM, *LLN,
              "--finetune-from-model", begun[1] / "checkpoint_last.pt")  # fmt: skip


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (("--attention", "softmax"), "attention = lln_diag, here it is softmax"),
        (("--lln-diag-block-size", 8), "lln_diag_block_size = None, here it is 8"),
        ((), None),
    ],
)
def test_another_attention_than_in_pre_training_is_said(options, warning, begun, tmp_path, monkeypatch, caplog):
    corpus, pretrained = begun
    with caplog.at_level(logging.WARNING):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *options,
              "--finetune-from-model", pretrained / "checkpoint_last.pt", "--max-update", 1)  # fmt: skip
    said = [record.getMessage() for record in caplog.records if "was trained with" in record.getMessage()]
    assert len(said) == (warning is not None)
    assert warning is None or warning in said[0]


def test_positions_come_from_the_checkpoint_where_no_flag_says_them(corpus, tmp_path, monkeypatch, capsys):
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "p", *MASKED_LM, *LLN, "--max-update", 1)
    data = make_classification(tmp_path / "data")
    options = [option for option in CLASSIFICATION if option not in ("--max-positions", "64")]
    for name, more, rows in (
        ("a", ("--finetune-from-model", tmp_path / "p" / "checkpoint_last.pt"), 66),
        ("b", (), 514),
    ):
        train(monkeypatch, tmp_path / f"{name}.log", data, tmp_path / name, *options, *LLN, *more, "--max-update", 1)
        last = tmp_path / name / "checkpoint_last.pt"
        assert len(torch.load(last)["model"]["encoder.sentence_encoder.embed_positions.weight"]) == rows
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
        assert main(["evaluate", str(last), str(data)]) == 0
    assert "valid: 11 rows" in capsys.readouterr().out


def test_positions_of_fairseqs_own_task_are_its_own(tmp_path, monkeypatch):
    options = [{"lln_sentence_prediction": "sentence_prediction"}.get(option, option) for option in CLASSIFICATION
               if option not in ("--max-positions", "64")]  # fmt: skip
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "a", *options, *LLN, "--max-update", 1)
    assert torch.load(tmp_path / "a" / "checkpoint_last.pt")["cfg"]["task"]["max_positions"] == 512


@pytest.mark.parametrize(
    ("extra", "left"),
    [
        (("checkpoint_1_0.pt",), ()),
        (("checkpoint_1_0.pt", "checkpoint_2_0.pt"), ("checkpoint_1_0.pt", "checkpoint_2_0.pt")),
    ],
)
def test_a_complete_training_removes_what_its_last_save_was_killed_before_removing(
    extra, left, corpus, tmp_path, monkeypatch
):
    """One checkpoint too many is what a kill leaves; more are of a run that was to keep them."""
    options = (*MASKED_LM, *LLN, "--max-update", 3, "--save-interval-updates", 1, "--keep-interval-updates", 2)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").glob("*.pt")}
    for name in (*extra, "checkpoint_other.pt"):
        shutil.copy(tmp_path / "a" / "checkpoint_1_2.pt", tmp_path / "a" / name)
    train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *options)
    after = {path.name: path.read_bytes() for path in (tmp_path / "a").glob("*.pt")}
    assert set(after) == {*before, *left, "checkpoint_other.pt"}
    assert [name for name, content in before.items() if after[name] != content] == []


def test_a_training_that_stopped_early_does_not_go_on(corpus, tmp_path, monkeypatch, caplog):
    options = (*MASKED_LM, *LLN, "--lr", 0, "--patience", 2, "--validate-interval-updates", 1, "--max-update", 9)
    log = train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options)
    assert len(log["train"]) == 3  # a first score, and two that are no better
    before = (tmp_path / "a" / "checkpoint_last.pt").read_bytes()
    with caplog.at_level(logging.INFO):
        again = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *options)
    assert again["train"] == []
    assert "a is complete: stopped early at update 3, without a better score in 2 validations" in caplog.text
    assert (tmp_path / "a" / "checkpoint_last.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("option", "said"),
    [(("--max-epoch", 1), "3 updates in 1 epochs"), (("--stop-time-hours", 1e-7), "1 updates in 1e-07 hours")],
    ids=["epochs", "time"],
)
def test_a_training_that_ended_by_epochs_or_time_does_not_go_on(option, said, corpus, tmp_path, monkeypatch, caplog):
    options = (*MASKED_LM, *LLN, "--max-update", 9, *option)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options)
    before = (tmp_path / "a" / "checkpoint_last.pt").read_bytes()
    with caplog.at_level(logging.INFO):
        again = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *options)
    assert again["train"] == []
    assert f"a is complete: {said}" in caplog.text
    assert (tmp_path / "a" / "checkpoint_last.pt").read_bytes() == before


def test_patience_is_kept_over_an_interruption(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--lr", 0, "--patience", 3, "--validate-interval-updates", 1)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *options, "--max-update", 2)
    log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *options, "--max-update", 9)
    assert sorted({row["num_updates"] for row in log["train"]}) == ["3", "4"]
