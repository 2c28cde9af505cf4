"""Read the encoder of a fairseq RoBERTa checkpoint, even if its architecture is not registered.

The sizes of the model are read from its tensors. The options that tensors do not show (attention heads, activation,
dropout) are read from the checkpoint's configuration.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.compatibility import is_finetuned, require_roberta_layers
from lln_fairseq.checkpoints.config import POSITION_OFFSET, softmax_layers, stored_options
from lln_fairseq.checkpoints.pooling import stored_pooling
from lln_fairseq.checkpoints.reading import check_weights, load_checkpoint_lazily, verify_checksums
from lln_fairseq.checkpoints.run_tokenizer import DICTIONARIES, directories
from lln_fairseq.checkpoints.source_settings import stored_settings
from lln_fairseq.conversion.directory import as_float32
from lln_fairseq.conversion.imported_encoder import (
    DICTIONARY,
    HEAD,
    ImportedEncoder,
    choose_pooling,
    summarize_names,
)
from lln_fairseq.conversion.parameter_names import (
    ENCODER,
    HEAD_WEIGHT,
    ModelSizes,
    encoder_names,
    head_names,
    sizes_of_parameters,
)
from lln_fairseq.conversion.read_tokenizer import check_dictionary
from lln_fairseq.conversion.write_tokenizer import find_tokenizer
from lln_fairseq.errors import UserError
from lln_fairseq.models.adapt import ATTENTION_PARAMETERS, EMBEDDING, POSITIONS, SECOND_TEXT
from lln_fairseq.text.special_symbols import MASK, NUM_SPECIAL, parse_dictionary

# Options that the tensors do not show. The number of heads is another one; it has no default and must be known.
STORED_OPTIONS = (
    "activation_fn",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "layer_norm_eps",
    "rotary",
    "rotary_base",
)
CLASSIFIER_ADVICE = "to keep its head, convert the directory that `lln-fairseq export` writes"
BUFFERS = re.compile(r"(\.version|_float_tensor)$")  # entries of a state dict that are not parameters


def read_fairseq_checkpoint(path: Path, dictionary: Path | None = None, heads: int | None = None) -> ImportedEncoder:
    """Read the encoder in a fairseq checkpoint, with its masked-language-model head, dictionary and tokenizer.

    The head and the tokenizer are optional. All heads of a fine-tuned model are left out, with a note. Without
    `dictionary`, dict.txt is looked for in the run's tokenizer directory and next to the checkpoint. `heads` is for a
    checkpoint that does not state their number; otherwise it must agree. UserError is raised if a file cannot be read,
    the model is not a RoBERTa, or the dictionary does not fit the model.
    """
    state = load_checkpoint_lazily(str(path))
    verify_checksums(str(path))
    options_of_groups = stored_options(state)
    stored = options_of_groups["model"]
    require_roberta_layers(stored, path)
    check_weights(state["model"], path)
    tensors = _with_current_names(state["model"])
    if EMBEDDING not in tensors or POSITIONS not in tensors:
        architecture = stored.get("_name") or "unknown"
        raise UserError(f"{path} is not a RoBERTa: it has no {EMBEDDING} (architecture: {architecture})")
    # fairseq builds a language-model head for every task: in a classifier it is random, or older than the encoder.
    finetuned = is_finetuned(options_of_groups["task"].get("_name"))
    if finetuned:
        tensors = {name: value for name, value in tensors.items() if not name.startswith(HEAD)}
    sizes = _read_sizes(tensors, path)
    options = _read_options(stored, tensors, sizes, heads, path)
    parameters = _roberta_parameters(tensors, sizes, options, path)
    if HEAD_WEIGHT in parameters:
        options["untie_weights_roberta"] = not torch.equal(parameters[HEAD_WEIGHT], parameters[EMBEDDING])
    notes = _describe_unused_tensors(tensors, parameters, path)
    if finetuned:
        notes.append("left out: the masked-language-model head, which does not fit a fine-tuned encoder")
    attention = stored.get("attention")  # fairseq's own RoBERTa does not state it
    if attention is not None:
        options["attention"] = attention
        parameters |= {name: value for name, value in tensors.items() if ATTENTION_PARAMETERS in name}
        options |= {key: value for key, value in stored.items() if key.startswith(f"{attention}_")}
        options["softmax_layers"] = softmax_layers(stored)
    directory = _tokenizer_directory(path, dictionary)
    dictionary_path = _find_dictionary(dictionary, directory)
    symbols = _read_symbols(dictionary_path, sizes.vocabulary, path)
    files = find_tokenizer([directory])
    check_dictionary(files, dictionary_path)
    pooling = stored_pooling(state)
    settings = {}
    if pooling is not None:  # the settings of a classifier go with its head
        settings = stored_settings(state)
    pooling = choose_pooling(pooling, HEAD_WEIGHT in parameters, notes)
    return ImportedEncoder(as_float32(parameters), options, symbols, files, notes, pooling, settings=settings)


def _with_current_names(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters under the names that fairseq's RoBERTa has today.

    Prefixes of models that wrap the encoder become "encoder.". Of the names of 2019, `emb_layer_norm` is renamed, and
    the joint projection `in_proj` is split into `q_proj`, `k_proj` and `v_proj`.
    """
    renamed: dict[str, Tensor] = {}
    for name, value in parameters.items():
        name = re.sub(r"^.*?\b(?=(sentence_encoder|lm_head)\.)", "encoder.", name)
        name = name.replace(".emb_layer_norm.", ".layernorm_embedding.")
        in_projection = re.fullmatch(r"(.*\.self_attn)\.in_proj_(weight|bias)", name)
        if in_projection is None:
            renamed[name] = value
            continue
        module, kind = in_projection.groups()
        for projection, part in zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True):
            renamed[f"{module}.{projection}.{kind}"] = part
    return renamed


def _read_sizes(tensors: Mapping[str, Tensor], path: Path) -> ModelSizes:
    """Return the model's sizes. UserError is raised if a tensor that shows them is missing or no matrix."""
    for name in (EMBEDDING, POSITIONS, f"{ENCODER}layers.0.fc1.weight"):
        if name not in tensors or tensors[name].dim() != 2:
            raise UserError(f"{path} is not a RoBERTa: {name} must be a matrix")
    sizes = sizes_of_parameters(tensors)
    if sizes.positions <= POSITION_OFFSET:
        raise UserError(
            f"{path}: the positional table must have more than {POSITION_OFFSET} rows, got {sizes.positions}"
        )
    return sizes


def _read_options(
    stored: Mapping[str, Any], tensors: Mapping[str, Tensor], sizes: ModelSizes, heads: int | None, path: Path
) -> dict[str, Any]:
    """Return the model's options from its tensors and, for what tensors do not show, from the stored options.

    UserError is raised if the number of heads is unknown, or `heads` contradicts the stored number.
    """
    stored_heads = stored.get("encoder_attention_heads")
    if stored_heads is None and heads is None:
        raise UserError(f"{path} does not state the number of attention heads: give --heads")
    if stored_heads is None:
        stored_heads = heads
    if heads is not None and heads != stored_heads:
        raise UserError(f"--heads must be {stored_heads}, the number of heads of {path}, got {heads}")
    options = {
        "encoder_layers": sizes.layers,
        "encoder_embed_dim": sizes.features,
        "encoder_ffn_embed_dim": sizes.ffn_features,
        "encoder_attention_heads": stored_heads,
        "encoder_normalize_before": sizes.pre_norm,
        "layernorm_embedding": sizes.embedding_norm,
        "max_positions": sizes.positions - POSITION_OFFSET,
        "untie_weights_roberta": False,
    }
    for option in STORED_OPTIONS:
        if stored.get(option) is not None:
            options[option] = stored[option]
    return options


def _roberta_parameters(
    tensors: Mapping[str, Tensor], sizes: ModelSizes, options: Mapping[str, Any], path: Path
) -> dict[str, Tensor]:
    """Return the parameters of the encoder and, if there is one, of the masked-language-model head.

    The head's output matrix has the name HEAD_WEIGHT; if the checkpoint has none, it is the embedding.

    Raises UserError if a parameter is missing or has another shape.
    """
    has_head = any(name.startswith(HEAD) for name in tensors)
    names = list(encoder_names(sizes))
    if has_head:
        names += head_names(sizes)
    shapes = {name.fairseq: name.shape for name in names}
    available = dict(tensors)
    if has_head:
        available.setdefault(HEAD_WEIGHT, tensors[EMBEDDING])
        shapes[HEAD_WEIGHT] = (sizes.vocabulary, sizes.features)
    _require_shapes(available, shapes, path)
    return {name: available[name] for name in shapes}


def _require_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise UserError if one of the tensors that `shapes` names is missing or has another shape."""
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise UserError(f"{path} lacks {summarize_names(missing)}")
    for name, expected in shapes.items():
        actual = tuple(tensors[name].shape)
        if actual != expected:
            raise UserError(
                f"{path}: the shape of {name} must be {expected} according to its embeddings and first layer, got "
                f"{actual}"
            )


def _describe_unused_tensors(tensors: Mapping[str, Tensor], used: Mapping[str, Tensor], path: Path) -> list[str]:
    """Return notes about tensors that are not converted: their names, and advice if one is of a classification head.

    Buffers and parameters of an attention are not mentioned. Raises UserError for a parameter of the encoder or the
    language-model head that RoBERTa does not have, and for a classifier with BERT's form of pairs.
    """
    unused = []
    for name in tensors:
        if name not in used and ATTENTION_PARAMETERS not in name and not BUFFERS.search(name):
            unused.append(name)
    unknown = [name for name in unused if name.startswith((ENCODER, HEAD))]
    if SECOND_TEXT in unknown:
        raise UserError(f"{path} is a classifier with BERT's form of pairs: {CLASSIFIER_ADVICE}")
    if unknown:
        raise UserError(f"{path} is not a RoBERTa: unexpected parameters {summarize_names(unknown)}")
    if not unused:
        return []
    notes = [f"left out: {summarize_names(unused)}"]
    if any("classification_heads." in name for name in unused):
        notes.append(f"the classifier became an encoder: {CLASSIFIER_ADVICE}")
    return notes


def _tokenizer_directory(path: Path, dictionary: Path | None) -> Path:
    """Return the directory of dict.txt and the tokenizer.

    That is the directory of `dictionary` if it is given, or else the run's tokenizer directory if it has a dictionary,
    and otherwise the directory of the checkpoint.
    """
    if dictionary is not None:
        return dictionary.parent
    places = directories(str(path), None)
    if places:
        return places[0]
    return path.parent


def _find_dictionary(dictionary: Path | None, directory: Path) -> Path:
    """Return `dictionary` if given, or else dict.txt or input0/dict.txt (of a classification task) in `directory`.

    Raises UserError if the file does not exist.
    """
    if dictionary is not None:
        if not dictionary.is_file():
            raise UserError(f"no such dictionary: {dictionary}")
        return dictionary
    for name in DICTIONARIES[:2]:
        if (directory / name).is_file():
            return directory / name
    raise UserError(f"no {DICTIONARY} in {directory}: give --dictionary FILE")


def _read_symbols(dictionary: Path, rows: int, checkpoint: Path) -> list[str]:
    """Return the symbols in a dict.txt, including fairseq's fillers ("madeupword0000", ...).

    Raises UserError if the file is not a dict.txt, or the number of symbols, special symbols included, is not `rows`.
    """
    try:
        symbols = parse_dictionary(dictionary.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    except UnicodeDecodeError as error:
        raise UserError(f"{dictionary} is not UTF-8: {error}") from error
    except UserError as error:
        raise UserError(f"{dictionary}, {error}") from error
    count = NUM_SPECIAL + len(symbols)
    if MASK not in symbols:
        count += 1  # the task adds it
    if count != rows:
        raise UserError(
            f"{dictionary} does not fit {checkpoint}: it must have {rows} symbols, special symbols included, "
            f"got {count}"
        )
    return symbols
