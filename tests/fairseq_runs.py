"""A tiny corpus and a tiny classification task, binarised on the spot, and fairseq-train in this process."""

import json
import logging
import random
import re
import sys
from pathlib import Path

import fairseq_cli.hydra_train
import fairseq_cli.train
from fairseq.data import Dictionary, indexed_dataset
from hydra.core.global_hydra import GlobalHydra

import lln_fairseq
from lln_fairseq.training.recipes import CONFIGS

lln_fairseq.register()
WORDS = [f"w{i}" for i in range(60)]
USER_DIR = ("--user-dir", Path(__file__).parents[1] / "lln_fairseq")
LLN = (*USER_DIR, "--arch", "lln_roberta_tiny")


def make_dictionary(path, symbols):
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol, n=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    dictionary.save(str(path))
    return path


def binarize(lines, dictionary, prefix):
    """What fairseq-preprocess writes."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = Dictionary.load(str(dictionary))
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=len(vocabulary))
    for line in lines:
        builder.add_item(vocabulary.encode_line(line, add_if_not_exist=False))
    builder.finalize(f"{prefix}.idx")


def sentences(count, seed):
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(3, 40))) for _ in range(count)]


def make_corpus(directory, sizes=(("train", 60), ("valid", 11)), words=WORDS):
    dictionary = make_dictionary(directory / "dict.txt", words)
    for seed, (split, count) in enumerate(sizes):
        binarize(sentences(count, seed), dictionary, directory / split)
    return directory


def make_classification(directory, sizes=(("train", 60), ("valid", 11)), names=("0", "1"), class_of=None):
    """The class of a sentence, class_of(row, sentence), is 1 where it contains w1 unless another rule is given."""
    class_of = class_of or (lambda row, line: "w1 " in line)
    words = make_dictionary(directory / "input0" / "dict.txt", WORDS)
    labels = make_dictionary(directory / "label" / "dict.txt", names)
    for seed, (split, count) in enumerate(sizes):
        lines = sentences(count, seed)
        binarize(lines, words, directory / "input0" / split)
        binarize([names[class_of(row, line)] for row, line in enumerate(lines)], labels, directory / "label" / split)
    return directory


def options(text):
    return text.split()


TRAINING = options("""
    --cpu --num-workers 0 --seed 3 --optimizer adam --lr 0.001 --lr-scheduler fixed --log-format json --log-interval 1
    --no-progress-bar --no-epoch-checkpoints --batch-size 8 --max-update 3 --encoder-layers 2 --encoder-embed-dim 32
    --encoder-ffn-embed-dim 64 --encoder-attention-heads 2
""")
MASKED_LM = options("--task lln_masked_lm --criterion masked_lm --tokens-per-sample 64 --sample-break-mode none")
CLASSIFICATION = options("""
    --task lln_sentence_prediction --criterion sentence_prediction --num-classes 2 --init-token 0 --max-positions 64
""")


def train(monkeypatch, log, data, save_dir, *options):
    """Runs fairseq-train in this process; returns the statistics of every update and of every validation."""
    arguments = [str(data), *TRAINING, "--save-dir", str(save_dir), "--log-file", str(log), *map(str, options)]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *arguments])
    logging.getLogger().setLevel(logging.INFO)  # as fairseq-train sets it, unless pytest came first
    try:
        fairseq_cli.train.cli_main()
    finally:
        close_log(log)
    return read_log(log.read_text())


def close_log(log):
    """fairseq leaves the handler of --log-file in its logger, where later trainings of this process write too."""
    for logger in [x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger)]:
        for handler in logger.handlers[:]:
            if getattr(handler, "baseFilename", None) == str(Path(log).resolve()):
                logger.removeHandler(handler)
                handler.close()


def hydra_train(monkeypatch, *arguments, recipe="pretrain"):
    """Runs fairseq-hydra-train with a recipe of ours in this process, without Hydra's logging."""
    monkeypatch.setattr(sys, "argv", ["fairseq-hydra-train", "--config-dir", str(CONFIGS), "--config-name", recipe,
        *map(str, arguments), f"common.user_dir={USER_DIR[1]}", "hydra/job_logging=none",
        "hydra/hydra_logging=none"])  # fmt: skip
    logging.getLogger().setLevel(logging.INFO)
    GlobalHydra.instance().clear()
    fairseq_cli.hydra_train.cli_main()


def read_log(text):
    """{"train": [{"loss": ...}, ...], "valid": [{"valid_loss": ...}, ...]} of a log in fairseq's JSON format."""
    rows = [json.loads(found) for found in re.findall(r"\{\"epoch\": .*\}", text)]
    return {"train": [row for row in rows if "loss" in row], "valid": [row for row in rows if "valid_loss" in row]}
