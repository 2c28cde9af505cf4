"""Make a tiny corpus and a tiny classification, and run fairseq-train and fairseq-hydra-train in this process."""

import json
import logging
import random
import re
import sys
from pathlib import Path

import fairseq_cli.hydra_train
import fairseq_cli.train
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, indexed_dataset
from fairseq.logging import progress_bar
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

import lln_fairseq
from lln_fairseq.training.recipes import CONFIGS
from lln_fairseq.training.resume import PATIENCE_ATTRIBUTES
from tests.shortcuts import speed_up_fairseq_train

speed_up_fairseq_train()
lln_fairseq.register()
WORDS = [f"w{i}" for i in range(60)]
USER_DIR = ("--user-dir", Path(__file__).parents[1] / "lln_fairseq")
LLN = (*USER_DIR, "--arch", "lln_roberta_tiny")


def make_dictionary(path, symbols):
    """Write a dict.txt with these symbols, each with the count 10, and return its path."""
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol, n=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    dictionary.save(str(path))
    return path


def binarize(lines, dictionary, prefix):
    """Write the data set `prefix` as fairseq-preprocess does; `dictionary` is the path of dict.txt."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = Dictionary.load(str(dictionary))
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(vocabulary))
    for line in lines:
        builder.add_item(vocabulary.encode_line(line, add_if_not_exist=False))
    builder.finalize(f"{prefix}.idx")


def sentences(count, seed):
    """Return random sentences of 3 to 40 words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(3, 40))) for _ in range(count)]


def make_corpus(directory, sizes=(("train", 60), ("valid", 11)), words=WORDS):
    """Binarize random sentences, `sizes` of each split, and return the directory.

    `words` are the symbols of the dictionary.
    """
    dictionary = make_dictionary(directory / "dict.txt", words)
    for seed, (split, count) in enumerate(sizes):
        binarize(sentences(count, seed), dictionary, directory / split)
    return directory


def contains_w1(row, sentence):
    """Return the class of a sentence: 1 if it contains w1 before its last word, else 0."""
    return int("w1 " in sentence)


def make_classification(directory, sizes=(("train", 60), ("valid", 11)), names=("0", "1"), class_of=contains_w1):
    """Binarize random sentences with labels, `sizes` of each split, and return the directory.

    Args:
        directory: gets input0/ and label/.
        sizes: the splits and their numbers of sentences.
        names: the names of the classes.
        class_of: returns the class of a sentence from its row and its text.
    """
    words = make_dictionary(directory / "input0" / "dict.txt", WORDS)
    labels = make_dictionary(directory / "label" / "dict.txt", names)
    for seed, (split, count) in enumerate(sizes):
        lines = sentences(count, seed)
        binarize(lines, words, directory / "input0" / split)
        binarize([names[class_of(row, line)] for row, line in enumerate(lines)], labels, directory / "label" / split)
    return directory


def write_scores(directory, sizes=(("train", 60), ("valid", 11))):
    """Turn a classification into a regression: write a score from 0 to 1 for each row of its splits."""
    for split, rows in sizes:
        (directory / "label" / f"{split}.label").write_text("".join(f"{row % 7 / 6}\n" for row in range(rows)))


def split_options(text):
    """Return the words of a command line."""
    return text.split()


def forget_previous_run():
    """Reset what fairseq keeps in a process from its previous run. Outside the tests, every run has its own process."""
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    for name in PATIENCE_ATTRIBUTES:
        vars(fairseq_cli.train.should_stop_early).pop(name, None)
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()
    HydraConfig.instance().cfg = None


TRAINING = split_options("""
    --cpu --num-workers 0 --seed 3 --optimizer adam --lr 0.001 --lr-scheduler fixed --log-format json --log-interval 1
    --no-progress-bar --no-epoch-checkpoints --batch-size 8 --max-update 3 --encoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --encoder-attention-heads 2
""")
MASKED_LM = split_options("--task lln_masked_lm --criterion masked_lm --tokens-per-sample 64 --sample-break-mode none")
CLASSIFICATION = split_options("""
    --task lln_sentence_prediction --criterion sentence_prediction --num-classes 2 --init-token 0 --max-positions 64
""")
SCORED_CLASSIFICATION = (*CLASSIFICATION, "--criterion", "lln_sentence_prediction", *LLN)


def train(monkeypatch, log, data, save_dir, *options):
    """Run fairseq-train in this process and return the statistics of its log file, see `read_log`."""
    arguments = [str(data), *TRAINING, "--save-dir", str(save_dir), "--log-file", str(log), *map(str, options)]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *arguments])
    logging.getLogger().setLevel(logging.INFO)  # fairseq-train sets it only if pytest has not configured logging
    forget_previous_run()
    try:
        fairseq_cli.train.cli_main()
    finally:
        close_log(log)
    return read_log(log.read_text())


def close_log(log):
    """Close the handlers of a log file, which fairseq leaves open: later trainings would write to the file too."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in loggers:
        for handler in logger.handlers[:]:
            if getattr(handler, "baseFilename", None) == str(Path(log).resolve()):
                logger.removeHandler(handler)
                handler.close()


def losses_and_norms(log):
    """Return {update: (loss, gradient norm)} of a log, as logged."""
    return {row["num_updates"]: (row["loss"], row["gnorm"]) for row in log["train"]}


def assert_resumes_exactly(monkeypatch, folder, data, *options, stop=2, updates=4):
    """Check that a run that stops after `stop` updates and is resumed logs the same as an uninterrupted run.

    The runs are in folder/whole and folder/parts, with the same options and `updates` updates.

    Returns: the `losses_and_norms` of the uninterrupted run
    """

    def train_until(update, name):
        log = folder / f"{name}{update}.log"
        return losses_and_norms(train(monkeypatch, log, data, folder / name, *options, "--max-update", update))

    whole = train_until(updates, "whole")
    first_part = train_until(stop, "parts")
    second_part = train_until(updates, "parts")
    assert len(first_part) == stop
    assert len(second_part) == updates - stop
    assert first_part | second_part == whole
    return whole


def hydra_train(monkeypatch, *arguments, recipe="pretrain"):
    """Run fairseq-hydra-train with one of our recipes in this process, without the logging of Hydra."""
    command = ["fairseq-hydra-train", "--config-dir", str(CONFIGS), "--config-name", recipe, *map(str, arguments)]
    command += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    monkeypatch.setattr(sys, "argv", command)
    logging.getLogger().setLevel(logging.INFO)
    GlobalHydra.instance().clear()
    forget_previous_run()
    fairseq_cli.hydra_train.cli_main()


def parameters_of_2019(parameters):
    """Return the parameters of a RoBERTa with fairseq's names of 2019 and one matrix for q, k and v."""
    old = {}
    for name, value in parameters.items():
        if name.endswith("version") or ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        if ".self_attn.q_proj." in name:
            value = torch.cat([parameters[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
            name = name.replace("q_proj.", "in_proj_")
        name = name.replace("encoder.", "decoder.", 1).replace(".layernorm_embedding.", ".emb_layer_norm.")
        old[name] = value
    return old


def read_log(text):
    """Return the statistics of every update and every validation in a log in fairseq's JSON format.

    The result is {"train": [{"loss": ...}, ...], "valid": [{"valid_loss": ...}, ...]}.
    """
    rows = [json.loads(row) for row in re.findall(r"\{\"epoch\": .*\}", text)]
    return {"train": [row for row in rows if "loss" in row], "valid": [row for row in rows if "valid_loss" in row]}


def widen_attention(checkpoint):
    """Replace the projections of queries, keys and values and the head of a classifier by larger random numbers.

    The outputs of a model that was trained for a few updates hardly depend on its attention otherwise. The checkpoint
    is written again. Return its content.
    """
    state = torch.load(checkpoint, weights_only=False)
    generator = torch.Generator().manual_seed(4)
    for name, value in state["model"].items():
        if re.search(r"\.[qkv]_proj\.(weight|bias)|heads.*weight", name):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.5)
    torch.save(state, checkpoint)
    return state
