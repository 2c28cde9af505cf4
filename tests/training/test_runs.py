"""Whole runs of fairseq-train with this package's tasks, in situations in which fairseq fails silently."""

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
from lln_fairseq.errors import TrainingError, UserError
from lln_fairseq.models.multihead_attention import LLNMultiheadAttention
from lln_fairseq.tasks import run_registered_worker
from lln_fairseq.training import start
from lln_fairseq.training.settings import split_global_batch
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    MASKED_LM,
    SCORED_CLASSIFICATION,
    WORDS,
    make_classification,
    make_corpus,
    split_options,
    train,
    write_scores,
)


def test_validation_metrics_agree_with_fairseq(task_data, tmp_path, monkeypatch):
    best = split_options("--best-checkpoint-metric mcc --maximize-best-checkpoint-metric")
    log = train(monkeypatch, tmp_path / "a.log", task_data, tmp_path / "a", *SCORED_CLASSIFICATION, *best)
    stock_options = (*CLASSIFICATION, *LLN, "--report-acc-and-f1")
    stock = train(monkeypatch, tmp_path / "b.log", task_data, tmp_path / "b", *stock_options)

    assert [row["loss"] for row in log["train"]] == [row["loss"] for row in stock["train"]]
    scores = log["valid"][-1]
    for name in ("valid_f1", "valid_accuracy"):
        assert float(scores[name]) == pytest.approx(float(stock["valid"][-1][name]), abs=0.06), name
    assert -100 <= float(scores["valid_mcc"]) <= 100


def test_word_labels_have_an_f1(tmp_path, monkeypatch):
    labels = ["contradiction", "entailment"]
    data = make_classification(tmp_path / "data", names=labels, class_of=lambda row, line: row % 2)
    stock_options = (*CLASSIFICATION, *LLN, "--report-acc-and-f1")
    with pytest.raises(ValueError, match="invalid literal for int"):
        train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *stock_options)

    log = train(monkeypatch, tmp_path / "b.log", data, tmp_path / "b", *SCORED_CLASSIFICATION)

    assert {"valid_f1", "valid_mcc", "valid_accuracy"} <= set(log["valid"][-1])


def test_regression_logs_mean_of_correlations(task_data, tmp_path, monkeypatch):
    data = shutil.copytree(task_data, tmp_path / "data")
    write_scores(data)
    best = split_options("--best-checkpoint-metric pearson_spearman --maximize-best-checkpoint-metric")
    regression = ("--regression-target", "--num-classes", 1, *best)

    log = train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *SCORED_CLASSIFICATION, *regression)

    scores = log["valid"][-1]
    mean = (float(scores["valid_pearson"]) + float(scores["valid_spearman"])) / 2
    assert float(scores["valid_pearson_spearman"]) == pytest.approx(mean, abs=0.01)


def return_nan_from_third_update(monkeypatch):
    """Make the attention of the model, which has two layers, return NaN from its fifth call on."""
    forward = LLNMultiheadAttention.forward
    calls = []

    def broken_forward(self, *args, **kwargs):
        calls.append(1)
        out = forward(self, *args, **kwargs)
        if len(calls) > 4:
            out = out * torch.nan
        return out

    monkeypatch.setattr(LLNMultiheadAttention, "forward", broken_forward)


def test_minimum_loss_scale_names_module_and_last_scales(corpus, tmp_path, monkeypatch, half):
    return_nan_from_third_update(monkeypatch)
    fp16 = split_options("--fp16 --memory-efficient-fp16 --fp16-init-scale 8 --min-loss-scale 0.5 --max-update 9")

    with pytest.raises(TrainingError) as caught:
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *fp16)

    message = str(caught.value)
    assert message.startswith("update 3: Minimum loss scale reached (0.5)")
    assert "layers.0.self_attn" in message
    assert "Last loss scales: 8, 4, 2, 1." in message
    assert "bf16 instead of fp16" in message
    assert (tmp_path / "a" / "crash.pt").exists()


def test_kill_during_copy_keeps_old_checkpoint(tmp_path, monkeypatch):
    source = tmp_path / "new.pt"
    source.write_bytes(b"new " * 1000)
    target = tmp_path / "checkpoint_last.pt"

    def killed_copy(src, dst):
        Path(dst).write_bytes(b"new ")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", killed_copy)
    stock_copy = PathManager.copy.__wrapped__
    for copy, content in ((stock_copy, b"new "), (PathManager.copy, b"old")):
        target.write_bytes(b"old")
        with pytest.raises(KeyboardInterrupt):
            copy(str(source), str(target), overwrite=True)
        assert target.read_bytes() == content


def test_full_disk_keeps_last_checkpoint(corpus, tmp_path, monkeypatch):
    run_options = (*MASKED_LM, *LLN, "--max-update")
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options, 2)
    last = tmp_path / "a" / "checkpoint_last.pt"
    before = last.read_bytes()

    def save_on_full_disk(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", save_on_full_disk)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # fairseq waits before it tries again

    with pytest.raises(
        UserError, match=r"cannot save .*: No space left on device .*the last saved checkpoint is complete"
    ):
        train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *run_options, 4)
    assert last.read_bytes() == before
    assert not [path for path in (tmp_path / "a").iterdir() if path.suffix in (".tmp", ".part")]

    with pytest.raises(UserError, match=r"cannot save .*/new .*checkpoint_last\.pt.* free some space"):
        train(monkeypatch, tmp_path / "new.log", corpus, tmp_path / "new", *run_options, 4)


@pytest.mark.parametrize(
    ("wrong_options", "message"),
    [
        (("--fp16",), r"fp16 needs a GPU, but --cpu .* is set: leave fp16 out \(common\.fp16=false\)$"),
        (("--global-batch", 64, "--update-freq", 2), r"batch_size 8 x optimization.update_freq 2 x 1 workers is 16"),
        (("--finetune-from-model", "nowhere.pt"), "no such checkpoint: nowhere.pt"),
    ],
)
def test_impossible_settings_are_rejected(wrong_options, message, corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *MASKED_LM, *LLN, *wrong_options)


def batch_configuration(global_batch, batch_size, update_freq, workers):
    return OmegaConf.create(
        {
            "task": {"global_batch": global_batch},
            "dataset": {"batch_size": batch_size},
            "optimization": {"update_freq": [update_freq]},
            "distributed_training": {"distributed_world_size": workers},
        }
    )


@pytest.mark.parametrize(
    ("global_batch", "batch_size", "update_freq", "workers", "expected"),
    [
        (256, 16, 1, 1, (16, [16])),
        (256, 16, 1, 8, (16, [2])),
        (32, 32, 1, 8, (4, [1])),
        (32, 8, 4, 1, (8, [4])),
        (None, 8, 3, 5, (8, [3])),
    ],
)
def test_global_batch_is_split_over_devices(global_batch, batch_size, update_freq, workers, expected):
    cfg = batch_configuration(global_batch, batch_size, update_freq, workers)
    split_global_batch(cfg)
    assert (cfg.dataset.batch_size, list(cfg.optimization.update_freq)) == expected


@pytest.mark.parametrize(
    ("batch_size", "update_freq", "workers"),
    [(8, 2, 1), (12, 1, 1), (32, 1, 3), (None, 1, 1)],
)
def test_indivisible_global_batch_is_rejected(batch_size, update_freq, workers):
    cfg = batch_configuration(32, batch_size, update_freq, workers)
    with pytest.raises(UserError, match=r"task\.global_batch is 32 .* change one of them"):
        split_global_batch(cfg)


def test_update_sees_global_batch(tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path / "corpus", sizes=(("train", 150), ("valid", 11)))
    for size in (4, 16, 32):
        batch = ("--global-batch", 16, "--batch-size", size, "--max-update", 2)
        log = train(monkeypatch, tmp_path / f"{size}.log", corpus, tmp_path / f"{size}", *MASKED_LM, *LLN, *batch)
        assert max(float(row["bsz"]) for row in log["train"]) == 16


def main_with_wrong_input(cfg):
    """Fail like the main of a training in a spawned process, where the tasks must be registered too."""
    assert "lln_masked_lm" in fairseq.tasks.TASK_REGISTRY
    raise UserError("no such file: x")


def call_main_in_process(cfg, main):
    """Do the same as fairseq's call_main with several workers."""
    torch.multiprocessing.spawn(_call, args=(main, cfg), nprocs=1)


def _call(rank, main, cfg):
    main(cfg)


@pytest.mark.exhaustive
def test_error_in_spawned_worker_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cfg = OmegaConf.create(
        {
            "common": {"bf16": False, "tpu": False},
            "checkpoint": {"no_save": True},
            "model": None,
            "distributed_training": {
                "distributed_init_method": "env://",
                "distributed_rank": 0,
                "distributed_world_size": 1,
                "distributed_no_spawn": False,
            },
        }
    )

    with pytest.raises(SystemExit) as exit_info:
        start.start_run(run_registered_worker, call_main_in_process, cfg, main_with_wrong_input)

    assert exit_info.value.code == 1
    stderr = capfd.readouterr().err
    assert "error: no such file: x\n" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("symbols", [WORDS[:50], WORDS[::-1]], ids=["fewer", "reversed"])
def test_finetuning_rejects_another_dictionary(symbols, started_run, tmp_path, monkeypatch):
    other_corpus = make_corpus(tmp_path / "other", words=symbols)
    run_options = (*MASKED_LM, *LLN, "--finetune-from-model", started_run.checkpoint)
    with pytest.raises(UserError, match=r"dictionary of .*other .*checkpoint_last.pt"):
        train(monkeypatch, tmp_path / "a.log", other_corpus, tmp_path / "a", *run_options)


@pytest.mark.parametrize(
    ("stored", "attention_options", "warning"),
    [
        ({}, ("--attention", "softmax"), "attention = lln_diag"),
        ({}, ("--lln-diag-block-size", 8), "lln_diag_block_size = 16, here it is 8"),
        ({}, ("--lln-diag-block-size", 16), None),  # the head dimension, which is the default
        ({}, (), None),
        ({}, ("--softmax-layers", 1), "softmax_layers = None, here it is 1"),
        ({"softmax_layers": "1"}, (), "softmax_layers = 1, here it is None"),
        ({"softmax_layers": "1"}, ("--softmax-layers", "every:2"), None),
        ({}, ("--rotary",), "rotary = False, here it is True"),
        ({"rotary": True}, (), "rotary = True, here it is False"),
        ({"activation_fn": "relu"}, (), "activation_fn = relu, here it is gelu"),
    ],
)
def test_finetuning_warns_of_another_attention(
    stored, attention_options, warning, started_run, tmp_path, monkeypatch, caplog
):
    state = torch.load(started_run.checkpoint)
    state["cfg"]["model"].update(stored)
    torch.save(state, tmp_path / "model.pt")
    pretrained = ("--finetune-from-model", tmp_path / "model.pt", "--max-update", 1)
    run_options = (*MASKED_LM, *LLN, *attention_options, *pretrained)

    with caplog.at_level(logging.WARNING):
        train(monkeypatch, tmp_path / "a.log", started_run.corpus, tmp_path / "a", *run_options)

    warnings = [message for message in caplog.messages if "was trained with" in message]
    if warning is None:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert warning in warnings[0]


def test_finetuning_rejects_other_norms(started_run, tmp_path, monkeypatch):
    pretrained = ("--finetune-from-model", started_run.checkpoint, "--max-update", 1)
    run_options = (*MASKED_LM, *LLN, "--encoder-normalize-before", *pretrained)
    with pytest.raises(UserError, match=r"encoder_normalize_before = False, here it is True.*layout that sets it"):
        train(monkeypatch, tmp_path / "a.log", started_run.corpus, tmp_path / "a", *run_options)


CLASSIFICATION_WITHOUT_POSITIONS = [option for option in CLASSIFICATION if option not in ("--max-positions", "64")]


def position_count(checkpoint):
    return len(torch.load(checkpoint)["model"]["encoder.sentence_encoder.embed_positions.weight"])


def test_positions_default_to_those_of_checkpoint(corpus, tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "p.log", corpus, tmp_path / "p", *MASKED_LM, *LLN, "--max-update", 1)
    pretrained = ("--finetune-from-model", tmp_path / "p" / "checkpoint_last.pt", "--max-update", 1)
    run_options = (*CLASSIFICATION_WITHOUT_POSITIONS, *LLN, *pretrained)

    train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *run_options)

    last = tmp_path / "a" / "checkpoint_last.pt"
    assert position_count(last) == 64 + 2
    shutil.rmtree(tmp_path / "p")  # an evaluation does not need the pre-trained checkpoint
    assert main(["evaluate", str(last), str(data)]) == 0
    assert "valid: 11 rows" in capsys.readouterr().out


def test_positions_default_to_512_without_checkpoint(tmp_path, monkeypatch, capsys):
    data = make_classification(tmp_path / "data")
    run_options = (*CLASSIFICATION_WITHOUT_POSITIONS, *LLN, "--max-update", 1)

    train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *run_options)

    last = tmp_path / "a" / "checkpoint_last.pt"
    assert position_count(last) == 512 + 2
    assert main(["evaluate", str(last), str(data)]) == 0
    assert "valid: 11 rows" in capsys.readouterr().out


def test_stock_task_keeps_its_default_positions(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    stock_task = ("--task", "sentence_prediction", "--max-update", 1)
    run_options = (*CLASSIFICATION_WITHOUT_POSITIONS, *LLN, *stock_task)

    train(monkeypatch, tmp_path / "log", data, tmp_path / "a", *run_options)

    assert torch.load(tmp_path / "a" / "checkpoint_last.pt")["cfg"]["task"]["max_positions"] == 512
