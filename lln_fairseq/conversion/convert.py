"""Turns an encoder of Hugging Face or fairseq into a checkpoint of ours, with its dictionary and tokenizer.

    python -m lln_fairseq convert SOURCE OUT --attention lln_diag --positions 4096

SOURCE is a directory of Hugging Face (RoBERTa, XLM-R, BERT) or a checkpoint of fairseq's RoBERTa with dict.txt beside
it. `checkpoint.finetune_from_model=OUT/model.pt` fine-tunes the result; data_prep's `--tokenizer OUT` encodes for it.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from lln_fairseq.attention import MECHANISMS, require_attention
from lln_fairseq.checkpoints.compatibility import dictionary_hash
from lln_fairseq.checkpoints.reading import PLUGIN_STATE
from lln_fairseq.conversion import from_fairseq
from lln_fairseq.conversion import from_hugging_face as from_hf
from lln_fairseq.conversion.directory import new_directory, write_large
from lln_fairseq.conversion.encoder import DICTIONARY, HEAD, OFFSET, POSITIONS, Encoder
from lln_fairseq.data.special_symbols import PAD
from lln_fairseq.errors import InputError, input_errors
from lln_fairseq.models.adapt import ATTENTION_PARAMETERS, resize_positions
from lln_fairseq.models.lln_roberta import LLNRobertaConfig, LLNRobertaModel, RobertaConfig
from lln_fairseq.tasks.masked_lm import LLNMaskedLMConfig, LLNMaskedLMTask

CHECKPOINT = "model.pt"
SEED = 1  # of what the source does not have
MOST_POSITIONS = 1 << 20  # a table of 4 GB for 1,024 features
NOT_OF_A_TRAINING = ("max_positions", "dropout", "attention_dropout", "activation_dropout")


def convert(
    source: Path, out: Path, attention: str, positions: int | None = None, dictionary: Path | None = None,
    heads: int | None = None,
) -> Encoder:  # fmt: skip
    """Writes OUT whole or not at all; returns what is in it. Raises: InputError."""
    with input_errors():
        require_attention(attention, "takes no parameters of another encoder")
    if not source.exists():
        raise InputError(f"no such directory or checkpoint: {source}")
    if source.is_dir() and (heads is not None or dictionary is not None):
        option = "--dictionary" if heads is None else "--heads"
        raise InputError(f"{option} is for a checkpoint of fairseq, and {source} is a directory: leave it out")
    with new_directory(out) as folder:
        encoder = from_hf.read(source) if source.is_dir() else from_fairseq.read(source, dictionary, heads, attention)
        if positions is not None:
            encoder.notes += resize(encoder, positions)
        write(encoder, attention, folder)
    return encoder


def write(encoder: Encoder, attention: str, folder: Path) -> None:
    """dict.txt, the tokenizer's files and, last, the checkpoint."""
    text = "".join(f"{symbol} 0\n" for symbol in encoder.symbols)
    (folder / DICTIONARY).write_text(text, encoding="utf-8")
    for name, data in encoder.files.items():
        (folder / name).write_bytes(data)
    state = checkpoint(encoder, attention, folder)
    write_large(folder / CHECKPOINT, lambda path: torch.save(state, path))


def resize(encoder: Encoder, positions: int) -> list[str]:
    """Cuts the positional table, or repeats it from its start as Longformer does; returns what to say about it."""
    if not 1 <= positions <= MOST_POSITIONS:
        raise InputError(f"--positions is {positions}, and must be from 1 to {MOST_POSITIONS}")
    before = encoder.options["max_positions"]
    if positions == before:
        return []
    encoder.parameters[POSITIONS] = resize_positions(encoder.parameters[POSITIONS], positions + OFFSET, PAD)
    encoder.options["max_positions"] = positions
    how = "repeats" if positions > before else "cut from"
    return [f"{positions} positions, {how} the {before} that were learned"]


def checkpoint(encoder: Encoder, attention: str, data: Path) -> dict[str, Any]:
    """The state of a training of ours that has made no update; `data` is a directory with its dict.txt."""
    positions = encoder.options["max_positions"]
    config = LLNMaskedLMConfig(data=str(data), tokens_per_sample=positions, seed=SEED)
    task = LLNMaskedLMTask.setup_task(config)
    options = {**encoder.options, "attention": attention}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LLNRobertaModel.build_model(OmegaConf.create(options), task)
    load(model, encoder)
    return {
        "args": None,
        "cfg": {
            "model": {"_name": "lln_roberta", **options},
            "task": {"_name": "lln_masked_lm", "data": ".", "tokens_per_sample": positions},
        },
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 0, "optimizer_name": "", "lr_scheduler_state": {}}],
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 0},
            PLUGIN_STATE: {"dictionary": dictionary_hash(task.source_dictionary)},
        },
    }


def load(model: nn.Module, encoder: Encoder) -> None:
    """Puts the parameters into the model; what it has beside them keeps its initial value. Adds to the notes."""
    own = model.state_dict()
    for name in [name for name in encoder.parameters if name not in own]:
        encoder.notes.append(f"left out, since this attention has no such parameter: {name}")
        del encoder.parameters[name]
    for name, value in encoder.parameters.items():
        if value.shape != own[name].shape:  # of a mechanism, whose parameters depend on its options or the length
            raise InputError(f"{name} is {tuple(value.shape)} in the source, and {tuple(own[name].shape)} here")
    fresh = [name for name in own if ATTENTION_PARAMETERS in name and name not in encoder.parameters]
    if fresh:
        encoder.notes.append(f"new in this attention, at their initial values: {len(fresh)} parameters")
    if not any(name.startswith(HEAD) for name in encoder.parameters):
        encoder.notes.append("no masked LM's head in the source: a new one, untrained")
    nn.Module.load_state_dict(model, own | encoder.parameters)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a directory of Hugging Face, or a checkpoint of fairseq")
    parser.add_argument("out", type=Path, help="a new directory, for model.pt, dict.txt and the tokenizer")
    default = RobertaConfig.attention
    parser.add_argument("--attention", choices=sorted(MECHANISMS), default=default, help="(%(default)s)")
    parser.add_argument("--positions", type=int, help="the longest sequence (default: that of the source)")
    parser.add_argument("--dictionary", type=Path, help="dict.txt of a checkpoint of fairseq (default: beside it)")
    parser.add_argument("--heads", type=int, help="attention heads, where a checkpoint of fairseq does not say")
    args = parser.parse_args(argv)
    encoder = convert(args.source, args.out, args.attention, args.positions, args.dictionary, args.heads)
    for note in encoder.notes:
        print(note)
    print(f"{args.out / CHECKPOINT} is written; to fine-tune it:")
    print(" ".join([f"checkpoint.finetune_from_model={args.out / CHECKPOINT}", *overrides(encoder, args.attention)]))


def overrides(encoder: Encoder, attention: str) -> list[str]:
    """What a recipe needs to build this model: Hydra's overrides."""
    known = {field.name: field.default for field in dataclasses.fields(LLNRobertaConfig)}
    given = {key: value for key, value in encoder.options.items() if key not in NOT_OF_A_TRAINING}
    unlike = {key: value for key, value in given.items() if key in known and value != known[key]}
    if unlike.get("layernorm_embedding") is not encoder.options.get("encoder_normalize_before"):
        unlike.pop("layernorm_embedding", None)  # as it would be anyway
    length = f"task.max_positions={encoder.options['max_positions']}"
    return [f"attention={attention}", length, *(f"model.{key}={value}" for key, value in unlike.items())]
