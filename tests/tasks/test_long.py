"""Documents of thousands of tokens, and how much of what is computed for them is text."""

import logging
import re

import numpy as np
import pytest
import torch

from data_prep import lra
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.training.padding_report import row_lengths, share_of_text
from tests.data_prep.test_lra import SOURCES
from tests.fairseq_runs import WORDS, binarize, hydra_train, make_classification, make_corpus, make_dictionary
from tests.tasks.test_tasks import batches, make_classifier, make_masked_lm

PAD = 1


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Documents of 50 to 9,000 words in lines of about 100, a blank line between two."""
    folder = tmp_path_factory.mktemp("documents")
    dictionary = make_dictionary(folder / "dict.txt", WORDS)
    generator = np.random.default_rng(0)
    for split, sizes in {"train": (9000, 50, 5000, 700), "valid": (4500, 90)}.items():
        lines = []
        for words in sizes:
            text = generator.choice(WORDS, words)
            lines += [" ".join(text[start : start + 100]) for start in range(0, words, 100)] + [""]
        binarize(lines, dictionary, folder / split)
    return folder


def of_batches(task, split="train"):
    """Real and computed tokens, counted in the batches themselves."""
    real = computed = 0
    for batch in batches(task, split):
        for name in ("src_tokens", "other_tokens"):
            if name in batch["net_input"]:
                real += int(batch["net_input"][name].ne(PAD).sum())
                computed += batch["net_input"][name].numel()
    return real / computed, computed


def reported(task, split="train"):
    iterator = task.get_batch_iterator(task.dataset(split), max_sentences=8, max_positions=512)
    return share_of_text(row_lengths(task.dataset(split)), iterator.frozen_batches)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    for name, content in SOURCES["retrieval"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert lra.main(["retrieval", "--out", str(folder), "--source", str(folder)]) == 0
    return folder / "retrieval"


@pytest.mark.parametrize("kind", ["blocks", "sentences", "sentences of like lengths", "two towers"])
def test_the_share_of_text_is_that_of_the_batches(kind, tmp_path, pairs):
    if kind == "blocks":
        task = make_masked_lm(make_corpus(tmp_path), "complete")
    elif kind == "two towers":
        task = make_classifier("lln_sentence_prediction", pairs, two_towers=True)
    else:
        options = {"group_by_length": kind != "sentences"}
        task = make_classifier("lln_sentence_prediction", make_classification(tmp_path), **options)
    share, computed = of_batches(task)
    assert reported(task) == (pytest.approx(share), computed)
    assert share < 1


def logged(task, caplog, **options):
    task.load_dataset("train")
    with caplog.at_level(logging.INFO):
        for _ in range(2):  # an epoch later it is not said again
            task.get_batch_iterator(task.dataset("train"), max_sentences=8, max_positions=512)
    (line,) = [record.message for record in caplog.records if record.message.startswith("padding: ")]
    caplog.clear()
    return line


def test_a_training_says_it_and_what_helps(tmp_path, caplog):
    data = make_classification(tmp_path)
    line = logged(make_classifier("lln_sentence_prediction", data), caplog)
    found = re.fullmatch(r"padding: (\d\d\.\d)% of the (\d+) tokens that an epoch computes are text; less is wasted "
                         r"with batches of like lengths: task.group_by_length=true", line)  # fmt: skip
    assert float(found[1]) < 95
    line = logged(make_classifier("lln_sentence_prediction", data, group_by_length=True), caplog)
    assert line.endswith("are text")
    (tmp_path / "lm").mkdir()
    corpus = make_corpus(tmp_path / "lm", sizes=(("train", 20),))
    assert "task.sample_break_mode=none" in logged(make_masked_lm(corpus, "eos"), caplog)
    assert logged(make_masked_lm(corpus, "none"), caplog).endswith("are text")


def test_no_sample_holds_two_documents(documents):
    task = make_masked_lm(documents, "complete_doc", skip_masking=True)
    task.cfg.tokens_per_sample = 4096
    task.load_dataset("train")
    sizes = row_lengths(task.dataset("train"))[0]
    words = [9000, 50, 5000, 700]
    tokens = [size + -(-size // 100) for size in words]  # and </s> of each line
    assert sum(sizes - 1) == sum(tokens)
    assert sizes.max() <= 4096
    assert len(sizes) == sum(-(-size // 4000) for size in words)  # 9,000 words are three samples


def test_an_update_of_4096_tokens_from_a_checkpoint_of_512_positions(documents, tmp_path, monkeypatch):
    small = ("model=tiny", "run=cpu", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64",
             "optimization.max_update=1", "dataset.validate_interval_updates=0", "common.log_interval=1",
             f"task.data={documents}")  # fmt: skip
    hydra_train(monkeypatch, *small, "corpus=wikitext103", "task.global_batch=2", f"checkpoint.save_dir={tmp_path}/a")
    short = tmp_path / "a" / "checkpoint_last.pt"
    hydra_train(monkeypatch, *small, "corpus=wikitext103_articles", "optimization.update_freq=[1]",
                "optimization.lr=[0.0]", f"checkpoint.finetune_from_model={short}",
                f"checkpoint.save_dir={tmp_path}/b")  # fmt: skip
    state = load_checkpoint_lazily(str(tmp_path / "b" / "checkpoint_last.pt"))
    before, after = (load_checkpoint_lazily(str(path))["model"]["encoder.sentence_encoder.embed_positions.weight"]
                     for path in (short, tmp_path / "b" / "checkpoint_last.pt"))  # fmt: skip
    assert (len(before), len(after)) == (514, 4098)
    assert torch.equal(after[2 + 512 : 2 + 1024], before[2:])  # the learned positions again and again
    assert state["cfg"]["model"]["checkpoint_activations"]
    assert state["optimizer_history"][-1]["num_updates"] == 1
