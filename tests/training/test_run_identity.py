"""A run resumes only with the settings, the data and the initial model that it was started with."""

import lzma
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lln_fairseq import files
from lln_fairseq.checkpoints.reading import PLUGIN_STATE, load_checkpoint_lazily, plugin_state
from lln_fairseq.errors import UserError
from lln_fairseq.training import run_identity
from lln_fairseq.training.run_identity import changed_settings, result_settings
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    binarize,
    hydra_train,
    make_classification,
    make_dictionary,
    read_log,
    sentences,
    split_options,
    train,
)
from tests.training.conftest import RUN_OPTIONS

CHANGES = [
    (("--seed", 4), r"common\.seed\) = 3 .* now 4"),
    (("--attention", "lln"), r"model\.attention\) = lln_diag .* now lln"),
    (("--lln-diag-block-size", 16, "--dropout", 0.3), r"model\.dropout\) = 0\.1 .* now 0\.3"),
    (("--lln-diag-alpha", 2.0, "--lln-diag-beta", 2.0), r"model\.lln_diag_alpha\) = None .* now 2\.0"),
    (("--mask-prob", 0.3), r"task\.mask_prob\) = 0\.15 .* now 0\.3"),
    (("--adam-eps", 1e-6), r"optimizer\.adam_eps\) = 1e-08 .* now 1e-06"),
    (("--update-freq", 2), r"sequences an update = \[8\] .* now \[16\]"),
    (("--max-tokens", 500), r"tokens an update = unlimited .* now \[500\]"),
    (("--train-subset", "valid"), r"dataset\.train_subset\) = train .* now valid"),
    (("--best-checkpoint-metric", "ppl"), r"checkpoint\.best_checkpoint_metric\) = loss .* now ppl"),
    (("--seed", 4, "--reset-meters"), r"common\.seed\) = 3 .* now 4"),
]


UNUSED = "--ignore-unused-valid-subsets"


@pytest.mark.parametrize(("changes", "message"), CHANGES, ids=[str(changes[0]) for changes, _ in CHANGES])
def test_resume_rejects_changed_settings(changes, message, run_copy, tmp_path, monkeypatch):
    before = run_copy.checkpoint.read_bytes()
    run_options = (*RUN_OPTIONS, "--max-update", 4, *changes)
    with pytest.raises(UserError, match=f"holds another run: .*{message}.*or choose another --save-dir"):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *run_options)
    assert run_copy.checkpoint.read_bytes() == before


@pytest.mark.parametrize("path", ["run/checkpoint_best.pt", "{tmp_path}/run/../run/checkpoint_last.pt"])
def test_restore_file_in_save_dir_is_the_same_run(path, run_copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = ("--max-update", 4, "--seed", 4, "--restore-file", path.format(tmp_path=tmp_path))
    with pytest.raises(UserError, match=r"run holds another run: --seed \(common\.seed\) = 3 .* now 4"):
        train(monkeypatch, tmp_path / "log", run_copy.corpus, "run", *RUN_OPTIONS, *changes)


def test_resume_hashes_each_split_once(run_copy, tmp_path, monkeypatch):
    splits = []

    def record_split(directories, subset, **kwargs):
        splits.append(subset)
        return files.data_hash(directories, subset, **kwargs)

    monkeypatch.setattr(run_identity, "data_hash", record_split)
    train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, "--max-update", 4)
    assert splits == ["train", "valid"]


def test_reset_meters_forgets_scores_of_other_metric(run_copy, tmp_path, monkeypatch):
    state = torch.load(run_copy.checkpoint)
    state["extra_state"]["LLNMaskedLMTask"]["patience"] = {"best": -1.0, "num_runs": 1}
    torch.save(state, run_copy.checkpoint)
    changes = split_options("--max-update 4 --patience 2 --best-checkpoint-metric ppl --reset-meters")

    log = train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, *changes)

    assert log["train"][-1]["num_updates"] == "4"
    extra_state = torch.load(run_copy.checkpoint)["extra_state"]
    patience = extra_state["LLNMaskedLMTask"]["patience"]
    assert extra_state["best"] == patience["best"] == extra_state["val_loss"]


@pytest.fixture
def old_run(tmp_path):
    """The directory of a run that version 0.3.0 started on the corpus of `started_run`."""
    (tmp_path / "run").mkdir()
    content = lzma.decompress((Path(__file__).parent / "run_of_0_3_0.pt.xz").read_bytes())
    (tmp_path / "run" / "checkpoint_last.pt").write_bytes(content)
    return tmp_path / "run"


OLD_OPTIONS = (
    *RUN_OPTIONS,
    *split_options("--encoder-embed-dim 8 --encoder-ffn-embed-dim 8 --encoder-layers 1 --encoder-attention-heads 1"),
    *("--max-update", 3),
)


def test_run_of_version_0_3_0_resumes(old_run, started_run, tmp_path, monkeypatch):
    log = train(monkeypatch, tmp_path / "log", started_run.corpus, old_run, *OLD_OPTIONS)

    assert log["train"][-1]["num_updates"] == "3"
    assert "sequence_parallel_size" not in torch.load(old_run / "checkpoint_last.pt")["cfg"]["task"]


def test_run_of_version_0_3_0_rejects_changed_settings_and_data(old_run, started_run, tmp_path, monkeypatch):
    changes = ("--seed", 4, "--train-subset", "valid")
    with pytest.raises(UserError, match=r"common\.seed\) = 3 .*; --train-subset .*; other training data"):
        train(monkeypatch, tmp_path / "log", started_run.corpus, old_run, *OLD_OPTIONS, *changes)


def batch_settings(max_tokens, batch_size, update_freq=1, workers=1):
    return {
        "dataset": {"max_tokens": max_tokens, "batch_size": batch_size},
        "optimization": {"update_freq": [update_freq]},
        "distributed_training": {"distributed_world_size": workers},
    }


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        (batch_settings(4400, 4, workers=8), []),
        (batch_settings(2200, 16, update_freq=2), []),
        (batch_settings(1100, 32), ["tokens an update", "dataset.max_tokens"]),
        (batch_settings(4400, 16), ["sequences an update"]),
        (batch_settings(None, 32), ["tokens an update", "dataset.max_tokens"]),
        (batch_settings(4400, None), ["sequences an update"]),
    ],
)
def test_update_size_limited_by_sequences_and_tokens(settings, changed):
    assert changed_settings(result_settings(batch_settings(4400, 32)), result_settings(settings)) == changed


def test_update_size_limited_by_tokens():
    saved = result_settings(batch_settings(4400, None, workers=8))
    assert changed_settings(saved, result_settings(batch_settings(4400, None, update_freq=8))) == []
    assert changed_settings(saved, result_settings(batch_settings(4400, None))) == ["tokens an update"]


STOCK_MODEL = {"model": {"_name": "roberta_base", "dropout": 0.1}}
# A recipe sets the attention of every model, and fairseq's own models ignore it.
STOCK_MODEL_OF_RECIPE = {"model": {"_name": "roberta_base", "dropout": 0.1, "attention": "lln_diag"}}


@pytest.mark.parametrize("stock", [STOCK_MODEL, STOCK_MODEL_OF_RECIPE])
def test_stock_roberta_has_softmax_attention(stock):
    stock_settings = result_settings(stock)
    model = {"_name": "lln_roberta_base", "dropout": 0.1}
    lln_diag = result_settings({"model": {**model, "attention": "lln_diag"}})
    softmax = result_settings({"model": {**model, "attention": "softmax"}})
    assert changed_settings(stock_settings, lln_diag) == ["model.attention"]
    assert changed_settings(lln_diag, stock_settings) == ["model.attention"]
    assert changed_settings(stock_settings, softmax) == []


def test_resume_accepts_changes_without_effect_on_the_result(run_copy, tmp_path, monkeypatch):
    harmless = split_options("--max-update 4 --log-interval 2 --checkpoint-activations --num-workers 1")
    run_options = (*RUN_OPTIONS, *harmless, "--tensorboard-logdir", tmp_path / "tb")
    log = train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *run_options)
    assert log["train"][-1]["num_updates"] == "4"


def test_options_of_other_attentions_are_not_compared():
    """A recipe can have them: its files list the options of a default attention."""
    model = {"_name": "lln_roberta_base", "attention": "lln_diag", "linformer_projected_length": 256}
    other = {**model, "linformer_projected_length": 7}
    assert result_settings({"model": model}) == result_settings({"model": other})


@pytest.mark.parametrize(
    "class_option",
    [("--optimizer", "sgd"), ("--optimizer", "adafactor"), ("--arch", "roberta_base")],
    ids=" ".join,
)
def test_classes_without_dataclass_are_compared_too(class_option, started_run, tmp_path, monkeypatch):
    corpus = started_run.corpus
    run_options = (*RUN_OPTIONS, *class_option)
    train(monkeypatch, tmp_path / "a.log", corpus, tmp_path / "a", *run_options, "--max-update", 1)
    run = shutil.move(tmp_path / "a", tmp_path / "b")

    harmless = split_options("--max-update 2 --log-interval 2 --num-workers 1 --patience 5")
    log = train(monkeypatch, tmp_path / "b.log", corpus, run, *run_options, *harmless)
    assert log["train"][-1]["num_updates"] == "2"

    changes = ("--max-update", 3, "--dropout", 0.3, "--weight-decay", 0.2)
    with pytest.raises(UserError, match=r"model\.dropout\) = 0\.1 .*optimizer\.weight_decay\) = 0\.0 "):
        train(monkeypatch, tmp_path / "c.log", corpus, run, *run_options, *changes)


def test_stock_model_rejects_an_attention(started_run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    overrides = split_options("""
        model=tiny corpus=demo run=cpu lr_scheduler.warmup_updates=1 model._name=roberta_base model.encoder_layers=1
        checkpoint.save_dir=run hydra.run.dir=job task.global_batch=8 dataset.batch_size=8 dataset.num_workers=0
    """)
    with pytest.raises(SystemExit):
        hydra_train(monkeypatch, *overrides, f"task.data={started_run.corpus}")
    message = "error: model._name=roberta_base is fairseq's own model and supports only attention softmax, got lln_diag"
    assert message in capfd.readouterr().err


def test_reset_optimizer_accepts_changed_settings(run_copy, tmp_path, monkeypatch):
    changes = ("--max-update", 4, "--lr", 0.01, "--reset-optimizer")
    log = train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, *changes)
    assert log["train"][-1]["lr"] == "0.01"


def test_resume_rejects_other_data_with_same_dictionary(run_copy, tmp_path, monkeypatch):
    other_corpus = shutil.copytree(run_copy.corpus, tmp_path / "other")
    binarize(sentences(60, seed=9), other_corpus / "dict.txt", other_corpus / "train")
    with pytest.raises(UserError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "log", other_corpus, run_copy.save_dir, *RUN_OPTIONS, "--max-update", 4)


def test_resume_rejects_other_validation_data_unless_meters_are_reset(run_copy, tmp_path, monkeypatch):
    other_corpus = shutil.copytree(run_copy.corpus, tmp_path / "other")
    binarize(sentences(20, seed=9), other_corpus / "dict.txt", other_corpus / "valid")
    options = (*RUN_OPTIONS, "--max-update", 3)
    with pytest.raises(UserError, match="holds another run: other validation data"):
        train(monkeypatch, tmp_path / "log", other_corpus, run_copy.save_dir, *options)
    log = train(monkeypatch, tmp_path / "log", other_corpus, run_copy.save_dir, *options, "--reset-meters")
    assert log["train"][-1]["num_updates"] == "3"


@pytest.mark.parametrize(("split", "option"), [("valid", "--disable-validation"), ("valid1", UNUSED)])
def test_resume_accepts_other_validation_data_that_is_not_used(split, option, run_copy, tmp_path, monkeypatch):
    other_corpus = shutil.copytree(run_copy.corpus, tmp_path / "other")
    binarize(sentences(20, seed=9), other_corpus / "dict.txt", other_corpus / split)
    options = (*RUN_OPTIONS, "--max-update", 3, option)
    log = train(monkeypatch, tmp_path / "log", other_corpus, run_copy.save_dir, *options)
    assert log["train"][-1]["num_updates"] == "3"


def test_resume_accepts_moved_data(run_copy, tmp_path, monkeypatch):
    moved_corpus = shutil.copytree(run_copy.corpus, tmp_path / "moved")
    log = train(monkeypatch, tmp_path / "log", moved_corpus, run_copy.save_dir, *RUN_OPTIONS, "--max-update", 3)
    assert log["train"][0]["num_updates"] == "3"


def test_resume_rejects_exchanged_labels(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "a")
    exchanged = make_classification(tmp_path / "b", class_of=lambda row, line: "w1 " not in line)
    run_options = (*CLASSIFICATION, *LLN, "--max-update")
    train(monkeypatch, tmp_path / "a.log", data, tmp_path / "run", *run_options, 1)
    with pytest.raises(UserError, match="holds another run: other training data"):
        train(monkeypatch, tmp_path / "b.log", exchanged, tmp_path / "run", *run_options, 2)


def test_resume_rejects_labels_in_another_order(tmp_path, monkeypatch):
    """label/dict.txt alone names the classes: in the binarized labels nothing changes."""
    data = make_classification(tmp_path / "data", names=("no", "yes"))
    run_options = (*CLASSIFICATION, *LLN, "--max-update")
    train(monkeypatch, tmp_path / "a.log", data, tmp_path / "run", *run_options, 1)
    make_dictionary(data / "label" / "dict.txt", ("yes", "no"))
    message = r"holds another run: the labels \['no', 'yes'\] in the checkpoint, now \['yes', 'no'\]. Restore"
    with pytest.raises(UserError, match=message):
        train(monkeypatch, tmp_path / "b.log", data, tmp_path / "run", *run_options, 2)


def test_hash_of_large_data_covers_size_ends_and_middle(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WHOLE_FILE", 1000)
    monkeypatch.setattr(files, "CHUNK", 10)
    first_of_middle_chunk = (1990 * 31) // 63
    hashes = set()
    for changed_byte in (None, 0, 1999, first_of_middle_chunk):
        content = np.zeros(2000, np.uint8)
        if changed_byte is not None:
            content[changed_byte] = 1
        content.tofile(tmp_path / "train.bin")
        hashes.add(files.data_hash([str(tmp_path)]))
    np.zeros(1999, np.uint8).tofile(tmp_path / "train.bin")
    hashes.add(files.data_hash([str(tmp_path)]))
    assert len(hashes) == 5


def test_checkpoint_without_hashes_resumes(run_copy, tmp_path, monkeypatch):
    """Checkpoints of the first releases have no hashes, or another one of the data."""
    state = torch.load(run_copy.checkpoint)
    record = state["extra_state"][PLUGIN_STATE]
    assert record.pop("start") == ""
    assert len(record.pop("content")) == len(record.pop("validation")) == 64
    record["data"] = "a hash of the lengths"
    torch.save(state, run_copy.checkpoint)

    log = train(monkeypatch, tmp_path / "log", run_copy.corpus, run_copy.save_dir, *RUN_OPTIONS, "--max-update", 3)

    assert log["train"][-1]["num_updates"] == "3"
    assert "start" not in torch.load(run_copy.checkpoint)["extra_state"][PLUGIN_STATE]


class InitialModels:
    """Two initial models, a.pt and b.pt, and trainings that start from one of them."""

    def __init__(self, started_run, folder, monkeypatch):
        self.corpus = started_run.corpus
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.a = shutil.copy(started_run.checkpoint, folder / "a.pt")
        self.b = folder / "b.pt"
        state = torch.load(self.a)
        state["model"]["encoder.lm_head.bias"] += 1
        torch.save(state, self.b)

    def train(self, run, updates, *extra_options):
        """Train or resume a run, and return the hash of the initial model in its checkpoint."""
        run_options = (*RUN_OPTIONS, "--max-update", updates, *extra_options)
        train(self.monkeypatch, self.folder / f"{updates}.log", self.corpus, run, *run_options)
        return plugin_state(load_checkpoint_lazily(str(run / "checkpoint_last.pt")))["start"]

    def assert_rejected(self, run, *extra_options):
        with pytest.raises(UserError, match="holds another run: another initial model"):
            self.train(run, 9, *extra_options)


@pytest.fixture
def initial_models(started_run, tmp_path, monkeypatch):
    return InitialModels(started_run, tmp_path, monkeypatch)


def test_resume_compares_content_of_initial_model(initial_models, tmp_path):
    run = tmp_path / "finetuned"
    model = initial_models.a
    start = initial_models.train(run, 1, "--finetune-from-model", model)
    initial_models.assert_rejected(run, "--finetune-from-model", initial_models.b)
    initial_models.assert_rejected(run)

    moved = shutil.copy(model, tmp_path / "moved.pt")
    assert initial_models.train(run, 2, "--finetune-from-model", moved) == start

    shutil.copy(initial_models.b, model)
    initial_models.assert_rejected(run, "--finetune-from-model", model)
    model.unlink()  # a missing file cannot be compared
    assert initial_models.train(run, 3, "--finetune-from-model", model) == start


def test_finetuning_resumes_with_meters_or_dataloader_reset(initial_models, tmp_path):
    run = tmp_path / "finetuned"
    options = ("--finetune-from-model", initial_models.a)
    start = initial_models.train(run, 1, *options)
    for update, changes in ((2, ("--reset-meters",)), (3, ("--reset-dataloader", "--seed", 4))):
        assert initial_models.train(run, update, *options, *changes) == start
        log = read_log((tmp_path / f"{update}.log").read_text())
        assert log["train"][0]["num_updates"] == str(update)


def test_initial_model_in_save_dir_is_not_resumed(initial_models, tmp_path):
    (tmp_path / "run").mkdir()
    model = shutil.copy(initial_models.a, tmp_path / "run" / "initial.pt")
    options = ("--finetune-from-model", model, "--seed", 4)  # another run than that of the model
    assert initial_models.train(tmp_path / "run", 1, *options) == files.sha256_of(model)


def test_run_from_scratch_rejects_initial_model(initial_models, run_copy):
    initial_models.assert_rejected(run_copy.save_dir, "--finetune-from-model", initial_models.a)


def test_run_from_restore_file_resumes_with_and_without_initial_model(initial_models, tmp_path):
    run = tmp_path / "restored"
    model = initial_models.a
    start = initial_models.train(run, 2, "--restore-file", model, "--reset-optimizer")
    assert start == files.sha256_of(model)
    assert initial_models.train(run, 3) == start
    assert initial_models.train(run, 4, "--finetune-from-model", model) == start
