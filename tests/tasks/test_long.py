"""Documents of thousands of tokens, and the report of how much of a training's computation is padding."""

import logging
import re

import numpy as np
import pytest
import torch

from data_prep import lra
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.training.padding_report import row_lengths, text_fraction
from tests.data_prep.test_lra import SOURCES
from tests.fairseq_runs import (
    WORDS,
    binarize,
    hydra_train,
    make_classification,
    make_corpus,
    make_dictionary,
    split_options,
)
from tests.tasks.test_tasks import PAD, load_batches, make_classifier, make_masked_lm

TRAIN_DOCUMENTS = (9000, 50, 5000, 700)  # numbers of words


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Documents in lines of 100 words, with a blank line after each document."""
    folder = tmp_path_factory.mktemp("documents")
    dictionary = make_dictionary(folder / "dict.txt", WORDS)
    generator = np.random.default_rng(0)
    for split, word_counts in (("train", TRAIN_DOCUMENTS), ("valid", (4500, 90))):
        lines = []
        for word_count in word_counts:
            words = generator.choice(WORDS, word_count)
            for start in range(0, word_count, 100):
                lines.append(" ".join(words[start : start + 100]))
            lines.append("")
        binarize(lines, dictionary, folder / split)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The data of LRA's retrieval task with few rows."""
    folder = tmp_path_factory.mktemp("pairs")
    for name, content in SOURCES["retrieval"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    assert lra.main(["retrieval", "--out", str(folder), "--source", str(folder)]) == 0
    return folder / "retrieval"


def count_text(task):
    """Return the fraction of text and the number of tokens, counted in the batches of the training data."""
    text = 0
    computed = 0
    for batch in load_batches(task, "train"):
        for name in ("src_tokens", "other_tokens"):
            if name in batch["net_input"]:
                text += int(batch["net_input"][name].ne(PAD).sum())
                computed += batch["net_input"][name].numel()
    return text / computed, computed


@pytest.mark.parametrize("kind", ["blocks", "sentences", "grouped sentences", "two towers"])
def test_text_fraction_is_that_of_the_batches(kind, tmp_path, pairs):
    if kind == "blocks":
        task = make_masked_lm(make_corpus(tmp_path), "complete")
    elif kind == "two towers":
        task = make_classifier("lln_sentence_prediction", pairs, two_towers=True)
    else:
        data = make_classification(tmp_path)
        task = make_classifier("lln_sentence_prediction", data, group_by_length=kind == "grouped sentences")

    expected_fraction, expected_computed = count_text(task)

    dataset = task.dataset("train")
    iterator = task.get_batch_iterator(dataset, max_sentences=8, max_positions=512)
    fraction, computed = text_fraction(row_lengths(dataset), iterator.frozen_batches)
    assert fraction == pytest.approx(expected_fraction)
    assert fraction < 1
    assert computed == expected_computed


def log_padding_report(task, caplog):
    """Make the batches of two epochs, and return the report, which must be logged once."""
    task.load_dataset("train")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            task.get_batch_iterator(task.dataset("train"), max_sentences=8, max_positions=512)
    (line,) = [message for message in caplog.messages if message.startswith("padding: ")]
    return line


def test_padding_report_advises_group_by_length(tmp_path, caplog):
    task = make_classifier("lln_sentence_prediction", make_classification(tmp_path))
    line = log_padding_report(task, caplog)
    match = re.fullmatch(r"padding: (\d\d\.\d)% of the \d+ tokens .* are text; .*task.group_by_length=true", line)
    assert float(match[1]) < 95


def test_padding_report_of_grouped_batches_gives_no_advice(tmp_path, caplog):
    task = make_classifier("lln_sentence_prediction", make_classification(tmp_path), group_by_length=True)
    assert log_padding_report(task, caplog).endswith("are text")


@pytest.mark.parametrize(("mode", "ending"), [("eos", "cuts lines and documents"), ("none", "are text")])
def test_padding_report_advises_break_mode_none(mode, ending, tmp_path, caplog):
    corpus = make_corpus(tmp_path, sizes=(("train", 20),))
    line = log_padding_report(make_masked_lm(corpus, mode), caplog)
    assert line.endswith(ending)
    assert ("task.sample_break_mode=none" in line) == (mode == "eos")


def test_complete_doc_puts_no_two_documents_into_a_sample(documents):
    task = make_masked_lm(documents, "complete_doc", skip_masking=True)
    task.cfg.tokens_per_sample = 4096
    task.load_dataset("train")
    sizes = row_lengths(task.dataset("train"))[0]
    tokens = [words + -(-words // 100) for words in TRAIN_DOCUMENTS]  # each line ends with </s>
    assert sum(sizes - 1) == sum(tokens)
    assert sizes.max() <= 4096
    assert len(sizes) == sum(-(-words // 4000) for words in TRAIN_DOCUMENTS)  # 9000 words are three samples


def position_table(checkpoint):
    return load_checkpoint_lazily(str(checkpoint))["model"]["encoder.sentence_encoder.embed_positions.weight"]


def test_training_with_4096_tokens_starts_from_512_positions(documents, tmp_path, monkeypatch):
    small = split_options("""
        model=tiny run=cpu model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=64 optimization.max_update=1
        dataset.validate_interval_updates=0 common.log_interval=1
    """)
    small.append(f"task.data={documents}")
    short = tmp_path / "a" / "checkpoint_last.pt"
    long = tmp_path / "b" / "checkpoint_last.pt"

    hydra_train(monkeypatch, *small, "corpus=wikitext103", "task.global_batch=2", f"checkpoint.save_dir={short.parent}")
    articles = split_options("corpus=wikitext103_articles optimization.update_freq=[1] optimization.lr=[0.0]")
    paths = (f"checkpoint.finetune_from_model={short}", f"checkpoint.save_dir={long.parent}")
    hydra_train(monkeypatch, *small, *articles, *paths)

    before = position_table(short)
    after = position_table(long)
    assert (len(before), len(after)) == (512 + 2, 4096 + 2)
    assert torch.equal(after[2 + 512 : 2 + 1024], before[2:])  # the learned positions are repeated
    state = load_checkpoint_lazily(str(long))
    assert state["cfg"]["model"]["checkpoint_activations"]
    assert state["optimizer_history"][-1]["num_updates"] == 1
