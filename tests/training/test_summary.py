"""A run logs a summary in about ten lines, and neither its whole configuration nor the listing of its model."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
import yaml
from fairseq.optim import FairseqOptimizer
from omegaconf import OmegaConf

from lln_fairseq.errors import UserError
from lln_fairseq.fairseq_compat.log_filters import DETAILS
from tests.fairseq_runs import LLN, MASKED_LM, train
from tests.training.conftest import RUN_OPTIONS


def test_log_begins_with_summary(run_copy, tmp_path, monkeypatch, caplog):
    changes = ("--max-update", 3, "--tensorboard-logdir", tmp_path / "my tb")
    with caplog.at_level(logging.INFO):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, *changes)

    lines = [record.getMessage() for record in caplog.records if record.funcName == "log_summary"]
    logged = dict(re.split(r" +", line, maxsplit=1) for line in lines if not line.startswith("saves to"))
    assert re.fullmatch(rf"{run_copy.corpus}: \d+ rows in train, \d+ rows in valid", logged["data"])
    assert logged["model"] == "lln_roberta_tiny: layers 2, width 32, heads 2, from random weights"
    assert re.match("lln_diag constants=calibrated .* block_size=16 mix=average", logged["attention"])
    assert re.fullmatch(r"\d\d,\d{3}", logged["parameters"])
    assert re.fullmatch(r"3 \(\d\.?\d* epochs\), learning rate 0.001, fixed", logged["updates"])
    assert logged["batch"].startswith("at most 8 rows x 1 (update_freq) x 1 (workers); on average 7 rows, ")
    assert logged["precision"] == "fp32 on CPU"
    assert logged["watch"] == f"tensorboard --logdir '{tmp_path}/my tb'"
    assert logged["resumes"] == "after update 2, with the learning rate 0.001"
    assert f"saves to   {run_copy.save_dir} (config.yaml has all settings)" in lines
    assert yaml.safe_load((run_copy.save_dir / "config.yaml").read_text())["model"]["encoder_embed_dim"] == 32
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    assert not {record.name for record in caplog.records} & {name for name, words in DETAILS.items() if not words}


@pytest.mark.parametrize("option", ["--finetune-from-model", "--restore-file"])
def test_summary_names_the_checkpoint_that_a_run_starts_from(option, started_run, tmp_path, monkeypatch, caplog):
    changes = (option, started_run.checkpoint, "--max-update", 3)
    with caplog.at_level(logging.INFO):
        train(monkeypatch, tmp_path / "log", started_run.corpus, tmp_path / "run", *RUN_OPTIONS, *changes)

    assert f"heads 2, from {started_run.checkpoint}\n" in caplog.text


def test_autocast_keeps_weights_and_gradients_in_float32(corpus, tmp_path, monkeypatch, caplog):
    products = []
    dtypes = set()

    def record(optimizer, *arguments):
        dtypes.update((parameter.dtype, parameter.grad.dtype) for parameter in optimizer.params)
        return step(optimizer, *arguments)

    def linear(x, weight, bias=None):
        out = plain_linear(x, weight, bias)
        products.append(out.dtype)
        return out

    step = FairseqOptimizer.step
    plain_linear = F.linear
    monkeypatch.setattr(FairseqOptimizer, "step", record)
    monkeypatch.setattr(F, "linear", linear)
    options = (*MASKED_LM, *LLN, "--autocast", "--no-save", "--max-update", 1)
    with caplog.at_level(logging.INFO):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *options)

    assert "precision  fp32 with autocast to bf16 on CPU\n" in caplog.text
    assert set(products) == {torch.bfloat16}
    assert dtypes == {(torch.float32, torch.float32)}


def test_autocast_with_half_precision_weights_is_rejected(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--autocast", "--bf16", "--no-save", "--max-update", 1)
    with pytest.raises(UserError, match=r"task.autocast cannot be combined with bf16: set common.bf16=false"):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *options)


def test_run_that_saves_nothing_writes_no_configuration(corpus, tmp_path, monkeypatch, caplog):
    run_options = (*MASKED_LM, *LLN, "--attention", "softmax", "--no-save", "--max-update", 1)
    with caplog.at_level(logging.INFO):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "run", *run_options)
    assert "saves to   nothing (no_save)" in caplog.text
    assert "attention  softmax\n" in caplog.text
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("message", [OmegaConf.create({"a": 1}), "max tokens per device = 1"], ids=str)
def test_details_of_fairseq_are_logged_at_level_debug(message, caplog):
    logger = logging.getLogger("fairseq_cli.train")
    with caplog.at_level(logging.INFO):
        logger.info(message)
        logger.info("done training")
        logger.warning("training on a CPU")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        logger.info(message)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
