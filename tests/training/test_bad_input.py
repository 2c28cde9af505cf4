"""Wrong input of a user ends in one line that says what to do, and leaves the checkpoints as they are."""

import errno
import os
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import fairseq_cli.hydra_train
import pytest
import torch
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lln_fairseq.errors import UserError
from lln_fairseq.training.exit import exit_with_one_line
from lln_fairseq.training.settings import (
    TORCHRUN,
    check_best_metric,
    check_patience,
    check_ranges,
    check_workers,
    complete_schedule,
)
from tests.fairseq_runs import (
    LLN,
    MASKED_LM,
    SCORED_CLASSIFICATION,
    hydra_train,
    make_classification,
    make_corpus,
    train,
    write_scores,
)
from tests.training.conftest import RUN_OPTIONS


def test_resume_rejects_another_optimizer(run_copy, tmp_path, monkeypatch):
    before = run_copy.checkpoint.read_bytes()
    run_options = (*RUN_OPTIONS, "--max-update", 4, "--bf16")
    with pytest.raises(UserError, match=r"does not fit this run: Optimizer does not match.* or another --save-dir"):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *run_options)
    assert run_copy.checkpoint.read_bytes() == before


def test_finetuning_from_a_directory_names_the_checkpoint_in_it(started_run, tmp_path, monkeypatch):
    options = (*RUN_OPTIONS, "--finetune-from-model", started_run.save_dir)
    with pytest.raises(UserError, match=r"run is a directory: give a checkpoint in it, .*run/checkpoint_best\.pt"):
        train(monkeypatch, tmp_path / "log", started_run.corpus, tmp_path / "a", *options)


@pytest.mark.parametrize(("content", "message"), [(b"", "cannot load .*EOFError"), (b"export T=1\n", "cannot load ")])
def test_finetuning_rejects_a_file_that_is_no_checkpoint(content, message, corpus, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *RUN_OPTIONS, "--finetune-from-model", path)


def test_damaged_data_is_rejected(tmp_path, monkeypatch):
    data = make_corpus(tmp_path / "data")
    (data / "valid.idx").write_text("")
    with pytest.raises(UserError, match=r"valid\.idx is damaged or cut off"):
        train(monkeypatch, tmp_path / "log", data, tmp_path / "a", *RUN_OPTIONS)


def test_validation_split_without_labels_is_rejected(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data", sizes=(("train", 60), ("valid", 11), ("test", 7)))
    for suffix in ("bin", "idx"):
        (data / "label" / f"test.{suffix}").unlink()
    options = (*SCORED_CLASSIFICATION, "--valid-subset", "valid,test")
    message = r"split 'test' .* has no labels: .*label/test\.idx does not exist; --valid-subset .* must name splits"
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "log", data, tmp_path / "a", *options)


@pytest.mark.parametrize("missing", ["valid", "train"])
def test_regression_with_labels_of_a_classification_names_the_file_it_reads(missing, tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    write_scores(data)
    (data / "label" / f"{missing}.label").unlink()
    options = (*SCORED_CLASSIFICATION, "--num-classes", 1, "--regression-target")
    with pytest.raises(UserError, match=rf"a regression reads {data}/label/{missing}\.label, one number per line"):
        train(monkeypatch, tmp_path / "log", data, tmp_path / "a", *options)


def test_regression_on_one_row_is_a_warning(tmp_path, monkeypatch, caplog):
    sizes = (("train", 60), ("valid", 1))
    data = make_classification(tmp_path / "data", sizes)
    write_scores(data, sizes)
    options = (*SCORED_CLASSIFICATION, "--num-classes", 1, "--regression-target", "--max-update", 1)

    train(monkeypatch, tmp_path / "log", data, tmp_path / "a", *options)

    assert f"split 'valid' of {data} has one row: its correlations are 0 in every epoch" in caplog.text


def test_save_dir_that_cannot_be_written_is_rejected(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="dummy: Not a directory"):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "file", *RUN_OPTIONS)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_torchrun_that_fairseq_does_not_know_are_rejected(workers, monkeypatch):
    for name in TORCHRUN:
        monkeypatch.setenv(name, "2")
    distributed = SimpleNamespace(distributed_world_size=workers, distributed_init_method=None)
    cfg = SimpleNamespace(distributed_training=distributed)
    if workers == 1:
        with pytest.raises(UserError, match=r"torchrun started 2 workers, but each would train .*: set .* to 2"):
            check_workers(cfg)
    else:
        check_workers(cfg)


@pytest.mark.parametrize(("variable", "is_rejected"), [("SLURM_STEP_NUM_TASKS", True), ("SLURM_NTASKS", False)])
def test_tasks_of_srun_that_fairseq_does_not_know_are_rejected(variable, is_rejected, monkeypatch):
    """Nodes with one GPU each: fairseq's default, the GPUs of a node, is one worker."""
    monkeypatch.setenv(variable, "4")
    distributed = SimpleNamespace(distributed_world_size=1, distributed_init_method=None)
    cfg = SimpleNamespace(distributed_training=distributed)
    if is_rejected:
        with pytest.raises(UserError, match=r"srun started 4 workers, but each would train .*: set .* to 4"):
            check_workers(cfg)
    else:  # a batch script that runs a program without srun
        check_workers(cfg)


def test_removed_save_dir_is_named(corpus, tmp_path, monkeypatch):
    save = torch.save

    def remove_and_save(*args, **kwargs):
        shutil.rmtree(tmp_path / "a")
        save(*args, **kwargs)

    monkeypatch.setattr(torch, "save", remove_and_save)
    with pytest.raises(UserError, match=r"cannot save .*: .*/a.* removed by another program"):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *RUN_OPTIONS)


def test_batch_that_does_not_fit_into_memory_ends_the_run(corpus, tmp_path, monkeypatch, caplog):
    calls = []

    def run_out_of_memory(*args, **kwargs):
        calls.append(args)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(FairseqTask, "train_step", run_out_of_memory)
    message = (
        r"update 1 does not fit into memory: its largest batch has 8 rows of 64 tokens\. Use a smaller --batch-size"
    )
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *RUN_OPTIONS, "--max-epoch", 1)

    assert len(calls) == 1
    assert "Ran out of memory" not in caplog.text
    assert not (tmp_path / "a" / "crash.pt").exists()


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_ends_in_one_line_and_run_resumes(signal_number, code, corpus, tmp_path, monkeypatch, capfd):
    run_options = (*MASKED_LM, *LLN, "--save-interval-updates", 2, "--max-update", 6)
    train_step = Trainer.train_step

    def interrupted_train_step(self, *args, **kwargs):
        if self.get_num_updates() == 4:
            os.kill(os.getpid(), signal_number)
        return train_step(self, *args, **kwargs)

    with monkeypatch.context() as interruption:
        interruption.setattr(Trainer, "train_step", interrupted_train_step)
        with pytest.raises(SystemExit) as exit_info:
            train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options)
    assert exit_info.value.code == code
    last_line = capfd.readouterr().err.splitlines()[-1]
    assert last_line.startswith("interrupted; ")

    log = train(monkeypatch, tmp_path / "b.log", corpus, tmp_path / "a", *run_options)
    assert log["train"][0]["num_updates"] == "5"


def test_full_disk_is_an_input_error_without_a_file_name():
    full_disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as TensorBoard raises it
    with pytest.raises(UserError, match="cannot write the logs: No space left"), exit_with_one_line():
        raise full_disk


def test_error_of_the_system_keeps_its_class():
    with pytest.raises(ConnectionError), exit_with_one_line():
        raise ConnectionError("not the user's fault")


def test_hydra_full_error_keeps_the_exception(monkeypatch):
    monkeypatch.setattr(GlobalHydra.instance(), "is_initialized", lambda: True)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError), exit_with_one_line():
        raise UserError("this and that")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch-size", 0, r"--batch-size \(dataset\.batch_size\) must be at least 1, got 0"),
        ("--encoder-layerdrop", 2, r"model\.encoder_layerdrop\) must be in \[0, 1\], got 2\.0"),
        ("--lr", -1, r"optimization\.lr\) must be at least 0, got -1"),
    ],
)
def test_number_out_of_range_is_rejected(option, value, message, corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *LLN, option, value)
    assert not (tmp_path / "a" / "checkpoint_last.pt").exists()


OTHER_OPTION = r"--lln-diag-{} \(model\.lln_diag_{}\) is an option of lln_diag, but this run trains elu: leave it out"


def test_option_of_another_mechanism_is_rejected(corpus, tmp_path, monkeypatch):
    options = (*MASKED_LM, *LLN, "--attention", "elu", "--lln-diag-block-size", 7)
    with pytest.raises(UserError, match=OTHER_OPTION.format("block-size", "block_size")):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *options)


@pytest.mark.parametrize("attention", ["attention=elu", "model.attention=elu"])
def test_option_of_another_mechanism_is_rejected_under_hydra(attention, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        hydra_train(monkeypatch, "corpus=demo", "run=cpu", attention, "++model.lln_diag_mix=average")
    assert re.match("error: " + OTHER_OPTION.format("mix", "mix"), capfd.readouterr().err)


def test_files_may_have_options_of_another_mechanism(tmp_path, monkeypatch):
    """configs/layout/long_pairs.yaml sets options of block_diag, which the command line then replaces."""
    monkeypatch.chdir(tmp_path)
    models = []

    def main(cfg):
        models.append(cfg.model)

    monkeypatch.setattr(fairseq_cli.hydra_train, "pre_main", main)
    hydra_train(monkeypatch, "corpus=demo", "run=cpu", "layout=long_pairs", "model.attention=elu")
    assert (models[0].attention, models[0].block_diag_block_size) == ("elu", 128)


def test_ranges_of_missing_options_are_not_checked():
    check_ranges(OmegaConf.create({"model": {"encoder_layerdrop": None}, "optimization": {"lr": "???"}}))


def test_default_criterion_is_rejected(corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="add --criterion masked_lm"):
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *RUN_OPTIONS, "--criterion", "cross_entropy")


@pytest.mark.parametrize(("fraction", "last"), [(0.1, 1), (None, 0)])
def test_planned_schedule_needs_no_last_update(fraction, last):
    scheduler = {"_name": "polynomial_decay", "total_num_update": 0}
    cfg = OmegaConf.create({"lr_scheduler": scheduler, "task": {"warmup_fraction": fraction}})
    complete_schedule(cfg)
    assert cfg.lr_scheduler.total_num_update == last


def check_metric(metric, maximize, criterion="lln_sentence_prediction", classes=2, regression=False):
    """Call check_best_metric with these options of a recipe."""
    check_best_metric(
        OmegaConf.create(
            {
                "checkpoint": {"best_checkpoint_metric": metric, "maximize_best_checkpoint_metric": maximize},
                "criterion": {"_name": criterion, "regression_target": regression},
                "dataset": {"disable_validation": False},
                "task": {"num_classes": classes},
            }
        )
    )


@pytest.mark.parametrize(("metric", "maximize"), [("loss", True), ("ppl", True), ("accuracy", False), ("mcc", False)])
def test_best_checkpoint_must_not_be_the_worst(metric, maximize):
    check_metric(metric, not maximize, "sentence_prediction")
    expected, given = ("false", "true") if maximize else ("true", "false")
    with pytest.raises(UserError, match=rf"must be {expected} for {metric} .*, got {given}"):
        check_metric(metric, maximize, "sentence_prediction")


@pytest.mark.parametrize(
    ("metric", "classes", "regression", "message"),
    [
        ("acc", 2, False, "loss, accuracy, mcc, f1 for 2 classes, got acc"),
        ("f1", 3, False, "loss, accuracy, mcc for 3 classes, got f1"),
        ("accuracy", 1, True, "loss, pearson, spearman, pearson_spearman for a regression, got accuracy"),
    ],
)
def test_metric_that_is_not_logged_is_rejected(metric, classes, regression, message):
    with pytest.raises(UserError, match=f"must be one of {message}"):
        check_metric(metric, maximize=True, classes=classes, regression=regression)


def check_intervals(updates, epochs, patience=3):
    """Call check_patience with pairs of intervals between validations and between checkpoints."""
    check_patience(
        OmegaConf.create(
            {
                "checkpoint": {"patience": patience, "save_interval_updates": updates[1], "save_interval": epochs[1]},
                "dataset": {
                    "disable_validation": False,
                    "validate_interval_updates": updates[0],
                    "validate_interval": epochs[0],
                },
            }
        )
    )


@pytest.mark.parametrize(
    ("updates", "epochs", "message"),
    [
        ((50, 0), (1, 1), r"set checkpoint\.save_interval_updates to 50, .* got 0"),
        ((500, 5000), (1, 1), r"set checkpoint\.save_interval_updates to 500, .* got 5000"),
        ((0, 0), (1, 2), r"set checkpoint\.save_interval to 1, .* got 2"),
    ],
)
def test_patience_needs_a_checkpoint_of_every_validation(updates, epochs, message):
    with pytest.raises(UserError, match=message):
        check_intervals(updates, epochs)
    check_intervals(updates, epochs, patience=-1)


@pytest.mark.parametrize("updates", [(0, 0), (0, 5000), (50, 50), (50, 25)])
def test_patience_accepts_a_checkpoint_of_every_validation(updates):
    check_intervals(updates, epochs=(1, 1))


def test_fp16_and_bf16_exclude_each_other(corpus, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="fp16") as exception_info:  # fairseq-train's own
        train(monkeypatch, tmp_path / "log", corpus, tmp_path / "a", *MASKED_LM, *LLN, "--bf16", "--fp16")
    sys.excepthook(ValueError, exception_info.value, None)
    assert capsys.readouterr().err == "error: --fp16 and --bf16 cannot be combined: set only one of them\n"
