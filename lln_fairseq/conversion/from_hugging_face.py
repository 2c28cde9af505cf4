"""A RoBERTa, XLM-R or BERT of Hugging Face as our encoder.

A BERT is a RoBERTa with layer norms after each part: the embedding of token type 0, which every token of ours has, is
added to the positions, and position p becomes row p + 2 of the table.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.reading import check_weights
from lln_fairseq.conversion.directory import CONFIG, as_float32, read_json, read_tensors
from lln_fairseq.conversion.encoder import EMBEDDING, HEAD, OFFSET, POSITIONS, Encoder, first_few, require_shapes
from lln_fairseq.conversion.parameter_names import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    TOKEN_TYPES,
    Name,
    Sizes,
    encoder_names,
    head_names,
)
from lln_fairseq.conversion.read_tokenizer import PIECES, SourceVocabulary, read_vocabulary
from lln_fairseq.data.special_symbols import PAD
from lln_fairseq.errors import InputError

STATED = f"{CONFIG} says"
BERT, XLM_R = "bert", "xlm-roberta"
MODEL_TYPES = ("roberta", XLM_R, BERT)
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate", "relu": "relu"}
SIZES = ("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers")
REFUSED = {"is_decoder": True, "add_cross_attention": True}  # what no encoder of ours can be

OLD_NAMES = {re.compile(r"LayerNorm\.gamma$"): "LayerNorm.weight", re.compile(r"LayerNorm\.beta$"): "LayerNorm.bias"}
# Names of other parts: what they hold is not used, and said, if it is more than a buffer.
# What is no parameter, or the embedding again; and where every parameter must be known: heads for other tasks are not.
IGNORED = re.compile(r"embeddings\.(position_ids|token_type_ids)$|(lm_head|cls\.predictions)\.decoder\.")
OF_THE_MODEL = re.compile(r"(embeddings|encoder|lm_head|cls\.predictions)\.")


def read(folder: Path) -> Encoder:
    """The encoder in a directory of Hugging Face with its tokenizer, and its masked LM's head if there is one.

    Raises: InputError for other architectures, tensors that are missing, of another shape or unknown, and a tokenizer
    that does not fit the embedding.
    """
    config = read_json(folder / CONFIG)
    bert, sizes, options = _options(config, folder / CONFIG)
    tensors = _plain_names(read_tensors(folder))
    used = {name: value for name, value in tensors.items() if OF_THE_MODEL.match(name) and not name.endswith("_ids")}
    check_weights(used, folder)
    if sizes.layers > len(tensors):  # a number may be anything, and a name is made for every layer
        raise InputError(f"{folder}: num_hidden_layers is {sizes.layers}, but it holds {len(tensors)} tensors")
    names = list(encoder_names(sizes))
    head = list(head_names(sizes, bert))
    has_head = any(name.theirs in tensors for name in head)
    wanted = {name.theirs: name.shape for name in [*names, *(head if has_head else [])]}
    require_shapes(tensors, wanted, folder, STATED)
    notes = _left_out(tensors, names + head, folder)
    if (folder / PIECES).is_file() and config["model_type"] != XLM_R:
        raise InputError(f"{folder}: {PIECES} is XLM-R's, and this is a {config['model_type']}")
    vocabulary = read_vocabulary(folder, sizes.V, config)
    parameters = as_float32({name.ours: tensors[name.theirs] for name in [*names, *(head if has_head else [])]})
    _positions(parameters, tensors, bert, vocabulary.order[PAD], sizes, folder)
    if has_head and not config.get("tie_word_embeddings", True):
        options["untie_weights_roberta"] = True
        output = "cls.predictions.decoder.weight" if bert else "lm_head.decoder.weight"
        require_shapes(tensors, {output: (sizes.V, sizes.C)}, folder, STATED)
        parameters |= as_float32({HEAD_WEIGHT: tensors[output]})
    options["max_positions"] = len(parameters[POSITIONS]) - OFFSET
    _reorder(parameters, vocabulary)
    return Encoder(parameters, options, vocabulary.symbols, vocabulary.files, notes)


def _options(config: dict[str, Any], path: Path) -> tuple[bool, Sizes, dict[str, Any]]:
    """Whether it is a BERT, its sizes, and the options of our model."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise InputError(f"{path}: this is a {kind or 'model of no known type'}, and may be {', '.join(MODEL_TYPES)}")
    for option, value in REFUSED.items():
        if config.get(option) == value:
            raise InputError(f"{path}: {option} is {value}: this is no encoder")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(f"{path}: its positions are {config['position_embedding_type']}, not absolute")
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in (ACTIVATIONS if kind == BERT else ("gelu",)):  # RoBERTa's head has gelu, whatever this says
        raise InputError(f"{path}: its activation is {activation}, which fairseq's RoBERTa does not have")
    sizes = Sizes(*(_number(config, key, path) for key in SIZES))
    options: dict[str, Any] = {
        "encoder_layers": sizes.layers,
        "encoder_embed_dim": sizes.C,
        "encoder_ffn_embed_dim": sizes.F,
        "encoder_attention_heads": _number(config, "num_attention_heads", path),
        "activation_fn": ACTIVATIONS[activation],
        "dropout": _share(config, "hidden_dropout_prob", 0.1, path),
        "attention_dropout": _share(config, "attention_probs_dropout_prob", 0.1, path),
        "layer_norm_eps": _share(config, "layer_norm_eps", 1e-12, path),  # transformers' own default
    }
    return kind == BERT, sizes, options


def _number(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{path}: {key} is {value!r}, not a positive number")
    return value


def _share(config: dict[str, Any], key: str, default: float, path: Path) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{path}: {key} is {value!r}, not a number from 0 to 1")
    return float(value)


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the model's prefix; names of TensorFlow's layer norms as torch has them; the head's bias by one name."""
    renamed = {re.sub(r"^(roberta|bert)\.", "", name): value for name, value in tensors.items()}
    for pattern, name in OLD_NAMES.items():
        renamed = {pattern.sub(name, key): value for key, value in renamed.items()}
    for head in ("lm_head.", "cls.predictions."):
        if f"{head}decoder.bias" in renamed:
            renamed.setdefault(f"{head}bias", renamed[f"{head}decoder.bias"])
    return renamed


def _left_out(tensors: dict[str, Tensor], names: list[Name], folder: Path) -> list[str]:
    """A note about the heads that are not used. Raises: InputError for what no encoder of a RoBERTa or BERT has."""
    known = {name.theirs for name in names} | {TOKEN_TYPES}
    others = [name for name in tensors if name not in known and not IGNORED.match(name)]
    if unknown := [name for name in others if OF_THE_MODEL.match(name)]:
        raise InputError(f"{folder} has what no RoBERTa or BERT has: {first_few(unknown)}")
    heads = {".".join(name.split(".")[: 2 if name.startswith("cls.") else 1]) for name in others}
    return [f"left out: {', '.join(sorted(heads))}"] if heads else []


def _positions(parameters: dict[str, Tensor], tensors: dict[str, Tensor], bert: bool, padding: int,
               sizes: Sizes, folder: Path) -> None:  # fmt: skip
    """Puts position p into row p + 2 and the token type into the positions, in place."""
    table, skipped = parameters[POSITIONS], 0 if bert else padding + 1
    if len(table) <= skipped:
        raise InputError(f"{folder}: the positional table has {len(table)} rows, and {skipped} are no positions")
    if TOKEN_TYPES in tensors:
        kinds = tensors[TOKEN_TYPES]
        require_shapes(tensors, {TOKEN_TYPES: (kinds.shape[0], sizes.C)}, folder, STATED)
        if kinds[0].any():  # else the table stays as it is to the bit, with the rows that are no positions
            table = torch.cat([table[:skipped], table[skipped:] + kinds[0].to(table.dtype)])
    if skipped != OFFSET:
        table = torch.cat([table.new_zeros(OFFSET, sizes.C), table[skipped:]])
    parameters[POSITIONS] = table


def _reorder(parameters: dict[str, Tensor], vocabulary: SourceVocabulary) -> None:
    """Puts everything that has a row a symbol into fairseq's order, in place."""
    order = torch.tensor(vocabulary.order)
    for name in (EMBEDDING, HEAD_BIAS, HEAD_WEIGHT):
        if name in parameters:
            parameters[name] = parameters[name][order]
    if any(name.startswith(HEAD) for name in parameters):
        parameters.setdefault(HEAD_WEIGHT, parameters[EMBEDDING])
