"""A run goes on with what it began with: other settings that change its result are named."""

import shutil

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lln_fairseq.checkpoints.reading import PLUGIN_STATE, load_checkpoint_lazily, plugin_state
from lln_fairseq.errors import InputError
from lln_fairseq.training import run_identity
from lln_fairseq.training.run_identity import differences
from tests.fairseq_runs import CLASSIFICATION, LLN, binarize, hydra_train, make_classification, sentences, train
from tests.training.conftest import COMMON

CHANGES = [
    (("--seed", 4), r"common\.seed = 3, here it is 4"),
    (("--attention", "lln"), r"model\.attention = lln_diag, here it is lln"),
    (("--lln-diag-block-size", 16, "--dropout", 0.3), r"model\.dropout = 0\.1, here it is 0\.3"),
    (("--lln-diag-alpha", 2.0, "--lln-diag-beta", 2.0), r"model\.lln_diag_alpha = None, here it is 2\.0"),
    (("--mask-prob", 0.3), r"task\.mask_prob = 0\.15, here it is 0\.3"),
    (("--adam-eps", 1e-6), r"optimizer\.adam_eps = 1e-08, here it is 1e-06"),
    (("--update-freq", 2), r"sequences an update = \[8\], here it is \[16\]"),
    (("--max-tokens", 500), r"tokens an update = as many as there are, here it is \[500\]"),
    (("--train-subset", "valid"), r"dataset\.train_subset = train, here it is valid"),
    (("--best-checkpoint-metric", "ppl"), r"checkpoint\.best_checkpoint_metric = loss, here it is ppl"),
    (("--seed", 4, "--reset-meters"), r"common\.seed = 3, here it is 4"),
]


@pytest.mark.parametrize(("options", "message"), CHANGES, ids=[str(change[0][0]) for change in CHANGES])
def test_what_changes_the_result_is_named(options, message, begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    before = (run / "checkpoint_last.pt").read_bytes()
    with pytest.raises(InputError, match=f"holds another run: .*{message}.*or another --save-dir"):
        train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, "--max-update", 4, *options)
    assert (run / "checkpoint_last.pt").read_bytes() == before


def test_a_checkpoint_beside_the_last_is_of_the_same_run(begun, tmp_path, monkeypatch):
    """fairseq takes every --restore-file but the default as it is, and not from the --save-dir."""
    shutil.copytree(begun[1], tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for options in (
        ("--restore-file", "run/checkpoint_best.pt"),
        ("--restore-file", tmp_path / "run/../run/checkpoint_last.pt"),
    ):
        with pytest.raises(InputError, match=r"run holds another run: common\.seed = 3, here it is 4"):
            train(monkeypatch, tmp_path / "log", begun[0], "run", *COMMON, "--max-update", 4, *options, "--seed", 4)


def test_another_metric_begins_with_other_scores(begun, tmp_path, monkeypatch):
    """Of a training that stops early too, whose patience has a score of its own."""
    run = shutil.copytree(begun[1], tmp_path / "run")
    state = torch.load(run / "checkpoint_last.pt")
    state["extra_state"]["LLNMaskedLMTask"]["patience"] = {"best": -1.0, "num_runs": 1}
    torch.save(state, run / "checkpoint_last.pt")
    options = ("--max-update", 4, "--patience", 2, "--best-checkpoint-metric", "ppl", "--reset-meters")
    log = train(monkeypatch, tmp_path / "log", begun[0], run, *COMMON, *options)
    assert log["train"][-1]["num_updates"] == "4"
    extra = torch.load(run / "checkpoint_last.pt")["extra_state"]
    assert extra["best"] == extra["LLNMaskedLMTask"]["patience"]["best"] == extra["val_loss"]


def settings_of(tokens, size, frequency=1, workers=1):
    return OmegaConf.create({
        "dataset": {"max_tokens": tokens, "batch_size": size}, "optimization": {"update_freq": [frequency]},
        "distributed_training": {"distributed_world_size": workers},
    })  # fmt: skip


SPLITS = [  # of (4400 tokens, 32 sequences, 1 batch an update, 1 worker)
    ((4400, 4, 1, 8), []),
    ((2200, 16, 2), []),
    ((1100, 32), ["tokens an update", "dataset.max_tokens"]),
    ((4400, 16), ["sequences an update"]),
    ((None, 32), ["tokens an update", "dataset.max_tokens"]),
    ((4400, None), ["sequences an update"]),
]


@pytest.mark.parametrize(("split", "expected"), SPLITS)
def test_the_size_of_an_update_where_tokens_are_counted_too(split, expected):
    saved = OmegaConf.to_container(settings_of(4400, 32))
    assert [text.split(" = ")[0] for text in differences(saved, settings_of(*split))] == expected


def test_the_size_of_an_update_where_tokens_alone_are_counted():
    saved = OmegaConf.to_container(settings_of(4400, None, workers=8))
    assert not differences(saved, settings_of(4400, None, 8))
    found = ["tokens an update = [35200], here it is [4400]"]
    assert differences(saved, settings_of(4400, None)) == found


def test_a_run_of_fairseqs_own_roberta_is_one_of_softmax():
    stock = {"model": {"_name": "roberta_base", "dropout": 0.1}}
    ours = {"model": {"_name": "lln_roberta_base", "attention": "lln_diag", "dropout": 0.1}}
    assert differences(stock, OmegaConf.create(ours)) == ["model.attention = softmax, here it is lln_diag"]
    assert differences(ours, OmegaConf.create(stock)) == ["model.attention = lln_diag, here it is softmax"]
    stock["model"]["attention"] = "lln_diag"  # of a recipe, which that model does not look at
    assert differences(stock, OmegaConf.create(ours)) == ["model.attention = softmax, here it is lln_diag"]
    ours["model"]["attention"] = "softmax"
    assert not differences(stock, OmegaConf.create(ours))


def test_what_does_not_change_the_result_goes_on(begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    options = ("--max-update", 4, "--log-interval", 2, "--checkpoint-activations", "--num-workers", 1,
               "--tensorboard-logdir", tmp_path / "tb", "--linformer-projected-length", 7)  # fmt: skip
    log = train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, *options)
    assert log["train"][-1]["num_updates"] == "4"


WITHOUT_DATACLASS = [("--optimizer", name) for name in ("sgd", "adafactor")]
WITHOUT_DATACLASS.append(("--arch", "roberta_base"))


@pytest.mark.parametrize("options", WITHOUT_DATACLASS, ids=" ".join)
def test_classes_without_a_dataclass_resume_after_harmless_changes(options, begun, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path / "a.log", begun[0], tmp_path / "a", *COMMON, *options, "--max-update", 1)
    shutil.move(tmp_path / "a", tmp_path / "b")
    harmless = ("--max-update", 2, "--log-interval", 2, "--num-workers", 1, "--patience", 5)
    log = train(monkeypatch, tmp_path / "b.log", begun[0], tmp_path / "b", *COMMON, *options, *harmless)
    assert log["train"][-1]["num_updates"] == "2"
    others = ("--max-update", 3, "--dropout", 0.3, "--weight-decay", 0.2)
    with pytest.raises(InputError, match=r"model\.dropout = 0\.1, .* optimizer\.weight_decay = 0\.0, "):
        train(monkeypatch, tmp_path / "c.log", begun[0], tmp_path / "b", *COMMON, *options, *others)


def test_a_model_of_fairseqs_own_that_is_given_an_attention(begun, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    options = ("model=tiny", "corpus=demo", "run=cpu", f"task.data={begun[0]}", "lr_scheduler.warmup_updates=1",
               "model._name=roberta_base", "model.encoder_layers=1", "checkpoint.save_dir=run", "hydra.run.dir=job",
               "task.global_batch=8", "dataset.batch_size=8", "dataset.num_workers=0")  # fmt: skip
    with pytest.raises(SystemExit):
        hydra_train(monkeypatch, *options)
    said = capfd.readouterr().err
    assert "error: model._name=roberta_base is fairseq's own and has softmax, not lln_diag: lln_roberta_base" in said


def test_a_reset_begins_something_new(begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    options = ("--max-update", 4, "--lr", 0.01, "--reset-optimizer")
    assert train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, *options)["train"][-1]["lr"] == "0.01"


def test_other_data_of_the_same_dictionary(begun, tmp_path, monkeypatch):
    run, other = shutil.copytree(begun[1], tmp_path / "run"), shutil.copytree(begun[0], tmp_path / "other")
    binarize(sentences(60, seed=9), other / "dict.txt", other / "train")
    with pytest.raises(InputError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "a.log", other, run, *COMMON, "--max-update", 4)
    moved = shutil.copytree(begun[0], tmp_path / "moved")  # the same data elsewhere
    log = train(monkeypatch, tmp_path / "b.log", moved, run, *COMMON, "--max-update", 3)
    assert next(row["num_updates"] for row in log["train"]) == "3"


def test_the_ends_and_the_middle_of_large_data_count(tmp_path, monkeypatch):
    monkeypatch.setattr(run_identity, "WHOLE_FILE", 1000)
    monkeypatch.setattr(run_identity, "CHUNK", 10)
    content = np.zeros(2000, np.uint8)
    hashes = set()
    for change in (None, 0, 1999, (1990 * 31) // 63):
        content[:] = 0
        if change is not None:
            content[change] = 1
        content.tofile(tmp_path / "train.bin")
        hashes.add(run_identity.data_hash([str(tmp_path)]))
    content[:1999].tofile(tmp_path / "train.bin")
    assert len(hashes | {run_identity.data_hash([str(tmp_path)])}) == 5


def test_labels_that_were_exchanged(tmp_path, monkeypatch):
    a = make_classification(tmp_path / "a")
    b = make_classification(tmp_path / "b", class_of=lambda row, line: "w1 " not in line)
    options = (*CLASSIFICATION, *LLN, "--max-update")
    train(monkeypatch, tmp_path / "a.log", a, tmp_path / "run", *options, 1)
    with pytest.raises(InputError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "b.log", b, tmp_path / "run", *options, 2)


def test_checkpoints_of_before_are_not_compared_by_what_they_lack(begun, tmp_path, monkeypatch):
    corpus, run = begun[0], shutil.copytree(begun[1], tmp_path / "run")
    state = torch.load(run / "checkpoint_last.pt")
    record = state["extra_state"][PLUGIN_STATE]
    assert (record.pop("start"), len(record.pop("content"))) == ("", 64)
    record["data"] = "a hash of the lengths"
    torch.save(state, run / "checkpoint_last.pt")
    log = train(monkeypatch, tmp_path / "log", corpus, run, *COMMON, "--max-update", 3)
    assert log["train"][-1]["num_updates"] == "3"
    assert "start" not in torch.load(run / "checkpoint_last.pt")["extra_state"][PLUGIN_STATE]


def test_another_model_to_start_from(begun, tmp_path, monkeypatch):
    """By its content: not by its path, and a file that is gone says nothing."""
    corpus, scratch = begun
    a, b, moved = (tmp_path / f"{name}.pt" for name in ("a", "b", "moved"))
    shutil.copy(scratch / "checkpoint_last.pt", a)
    state = torch.load(a)
    state["model"]["encoder.lm_head.bias"] += 1
    torch.save(state, b)
    shutil.copy(a, moved)

    def go_on(updates, run, *options):
        train(monkeypatch, tmp_path / f"{updates}.log", corpus, run, *COMMON, "--max-update", updates, *options)
        return plugin_state(load_checkpoint_lazily(str(run / "checkpoint_last.pt")))["start"]

    def refused(run, *options):
        with pytest.raises(InputError, match="holds another run: another model to start from"):
            go_on(9, run, *options)

    run = tmp_path / "run"
    begin = go_on(1, run, "--finetune-from-model", a)
    refused(run, "--finetune-from-model", b)
    refused(run)
    refused(shutil.copytree(scratch, tmp_path / "scratch"), "--finetune-from-model", a)
    assert go_on(2, run, "--finetune-from-model", moved) == begin
    shutil.copy(b, a)
    refused(run, "--finetune-from-model", a)
    a.unlink()
    assert go_on(3, run, "--finetune-from-model", a) == begin
    elsewhere = tmp_path / "elsewhere"
    assert go_on(2, elsewhere, "--restore-file", moved, "--reset-optimizer") == begin
    assert go_on(3, elsewhere) == go_on(4, elsewhere, "--finetune-from-model", moved) == begin
