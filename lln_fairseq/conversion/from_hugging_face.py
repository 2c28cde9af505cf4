"""Read the encoder of a Hugging Face RoBERTa, XLM-R or BERT directory.

All three apply layer norm after each sublayer. A BERT becomes a RoBERTa in two steps: the embedding of token type 0,
which every token has in this project, is added to the positional embeddings, and row p of their table moves to p + 2.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.config import POSITION_OFFSET
from lln_fairseq.checkpoints.reading import check_weights
from lln_fairseq.conversion.directory import CONFIG, as_float32, read_json, read_tensors
from lln_fairseq.conversion.encoder import (
    HEAD,
    ImportedEncoder,
    choose_pooling,
    require_shapes,
    summarize_names,
)
from lln_fairseq.conversion.parameter_names import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    TOKEN_TYPES,
    ModelSizes,
    ParameterName,
    encoder_names,
    head_names,
)
from lln_fairseq.conversion.read_tokenizer import SourceVocabulary, read_vocabulary
from lln_fairseq.conversion.sentence_pooling import check_prompts, locate_model, read_lower_case, read_pooling
from lln_fairseq.errors import UserError
from lln_fairseq.models.adapt import EMBEDDING, POSITIONS
from lln_fairseq.text.special_symbols import PAD

BERT = "bert"
MODEL_TYPES = ("roberta", "xlm-roberta", BERT)
ROTARY = "its positions are rotary, and this project's models add a learned embedding to each position"
RELATIVE = "its attention has relative positions, and this project's models add a learned embedding to each position"
CAUSAL = "it is a decoder, whose tokens see only the tokens before them"
PRE_NORM = "it applies layer norm before each sublayer, and only models that apply it after each are read"
WITH_DECODER = "it has an encoder and a decoder, and its positions are relative"
# The reasons why other well-known models cannot be converted, by their model_type.
UNSUPPORTED_TYPES = {
    "albert": "all its layers share their parameters, and its embeddings are narrower than its layers",
    "deberta": RELATIVE,
    "deberta-v2": RELATIVE,
    "distilbert": "its parameters have other names, which are not read",
    "electra": "its embeddings can be narrower than its layers, and its parameters have other names",
    "eurobert": ROTARY,
    "gemma3_text": CAUSAL,
    "gpt2": CAUSAL,
    "gte": ROTARY,
    "llama": CAUSAL,
    "mistral": CAUSAL,
    "modernbert": ROTARY,
    "mpnet": RELATIVE,
    "mt5": WITH_DECODER,
    "neobert": ROTARY,
    "new": ROTARY,  # GTE
    "nomic_bert": ROTARY,
    "qwen2": CAUSAL,
    "qwen3": CAUSAL,
    "roberta-prelayernorm": PRE_NORM,
    "t5": WITH_DECODER,
    "xlm-roberta-xl": PRE_NORM,
    "xlnet": RELATIVE,
}
# Hugging Face's activations by fairseq's names.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate", "relu": "relu"}
DECODER_OPTIONS = ("is_decoder", "add_cross_attention")  # true only for decoders

# The names that TensorFlow gives to the parameters of layer norms.
TENSORFLOW_NAMES = {
    re.compile(r"LayerNorm\.gamma$"): "LayerNorm.weight",
    re.compile(r"LayerNorm\.beta$"): "LayerNorm.bias",
}
# Buffers, and the output matrix, which usually is the embedding: they are not reported as left out.
IGNORED = re.compile(r"embeddings\.(position_ids|token_type_ids)$|(lm_head|cls\.predictions)\.decoder\.")
# Parts of the model in which every parameter must be known. Other parts are heads for other tasks.
CONVERTED_PARTS = re.compile(r"(embeddings|encoder|lm_head|cls\.predictions)\.")


def read_hugging_face_directory(directory: Path) -> ImportedEncoder:
    """Read the encoder in a Hugging Face directory, with its tokenizer and, if it has one, its language-model head.

    The rows of the embedding are put in the order of fairseq's ids. Heads for other tasks are left out, with a note.
    `directory` can also be a model of sentence-transformers, see `locate_model`.

    Raises:
        UserError: if the architecture is not supported, a tensor is missing, unknown or of the wrong shape, or the
            tokenizer does not fit the embedding.
    """
    root, directory = locate_model(directory)
    config_file = directory / CONFIG
    if not config_file.exists():
        raise UserError(
            f"{directory} is not a Hugging Face directory: it has no {CONFIG}{_checkpoint_advice(directory)}"
        )
    config = read_json(config_file)
    _check_architecture(config, config_file)
    bert = config["model_type"] == BERT
    sizes = _read_sizes(config, config_file)
    options = _read_options(config, sizes, config_file)
    pooling = read_pooling(root, sizes.features)
    prompt_notes = check_prompts(root)
    lower_case = read_lower_case(directory)

    tensors = _with_current_names(read_tensors(directory))
    _check_converted_weights(tensors, directory)
    if sizes.layers > len(tensors):  # checked before the names of so many layers are made
        raise UserError(f"{directory}: num_hidden_layers is {sizes.layers}, but there are only {len(tensors)} tensors")

    names = list(encoder_names(sizes))
    head = list(head_names(sizes, bert))
    has_head = any(name.hugging_face in tensors for name in head)
    if has_head:
        names += head
    require_shapes(tensors, {name.hugging_face: name.shape for name in names}, directory, CONFIG)
    notes = _note_unused_tensors(tensors, names, directory)
    notes += prompt_notes
    pooling = choose_pooling(pooling, has_head, notes)

    vocabulary = read_vocabulary(directory, sizes.vocabulary, lower_case)
    if lower_case:
        notes.append("texts are put into lower case, as do_lower_case says")

    parameters = as_float32({name.fairseq: tensors[name.hugging_face] for name in names})
    unused_rows = 0
    if not bert:  # RoBERTa counts positions from the id of the padding
        _check_padding(config, vocabulary.order[PAD], directory)
        unused_rows = vocabulary.order[PAD] + 1
    _convert_positions(parameters, tensors, unused_rows, sizes, directory)
    if has_head and not config.get("tie_word_embeddings", True):
        options["untie_weights_roberta"] = True
        parameters |= _read_output_layer(tensors, bert, sizes, directory)
    options["max_positions"] = len(parameters[POSITIONS]) - POSITION_OFFSET
    _reorder_symbols(parameters, vocabulary)
    return ImportedEncoder(parameters, options, vocabulary.symbols, vocabulary.files, notes, pooling)


def _check_padding(config: dict[str, Any], padding: int, directory: Path) -> None:
    """Raise UserError if config.json has another id for the padding than the tokenizer, whose id is `padding`."""
    stated = config.get("pad_token_id")
    if stated is not None and stated != padding:
        raise UserError(
            f"{directory}: pad_token_id in {CONFIG} must be {padding}, the tokenizer's padding, got {stated}"
        )


def _checkpoint_advice(directory: Path) -> str:
    """Return a hint to name a fairseq checkpoint in `directory` itself; empty if there is none."""
    checkpoints = sorted(directory.glob("*.pt"))
    if not checkpoints:
        return ""
    return f". To convert a fairseq checkpoint, name the file, such as {checkpoints[0]}"


def _read_output_layer(tensors: dict[str, Tensor], bert: bool, sizes: ModelSizes, directory: Path) -> dict[str, Tensor]:
    """Return the output matrix of an untied head, and its bias if it has one of its own, under fairseq's names.

    Raises UserError if the matrix is missing or a shape is wrong.
    """
    layer = "lm_head.decoder."
    if bert:
        layer = "cls.predictions.decoder."
    shapes: dict[str, tuple[int, ...]] = {f"{layer}weight": (sizes.vocabulary, sizes.features)}
    if f"{layer}bias" in tensors:  # transformers 5 saves it beside the head's bias, which such a model does not use
        shapes[f"{layer}bias"] = (sizes.vocabulary,)
    require_shapes(tensors, shapes, directory, CONFIG)
    parameters = {HEAD_WEIGHT: tensors[f"{layer}weight"]}
    if f"{layer}bias" in tensors:
        parameters[HEAD_BIAS] = tensors[f"{layer}bias"]
    return as_float32(parameters)


def _check_architecture(config: dict[str, Any], path: Path) -> None:
    """Raise UserError if config.json, read from `path`, describes a model that fairseq's RoBERTa cannot represent."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        reason = ""
        if isinstance(model_type, str) and model_type in UNSUPPORTED_TYPES:
            reason = f": {UNSUPPORTED_TYPES[model_type]}"
        raise UserError(f"{path}: model_type must be {' or '.join(MODEL_TYPES)}, got {model_type}{reason}")
    for option in DECODER_OPTIONS:
        if config.get(option):
            raise UserError(f"{path}: only encoders can be converted, but {option} is {config[option]}")
    position_type = config.get("position_embedding_type", "absolute")
    if position_type != "absolute":
        raise UserError(f"{path}: position_embedding_type must be absolute, got {position_type}")
    activations = ["gelu"]  # fairseq's head uses the model's activation; Hugging Face's always uses gelu
    if model_type == BERT:
        activations = list(ACTIVATIONS)
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in activations:
        raise UserError(f"{path}: hidden_act must be {' or '.join(activations)}, got {activation}")


def _read_sizes(config: dict[str, Any], path: Path) -> ModelSizes:
    """Return the sizes that config.json states."""
    return ModelSizes(
        vocabulary=_positive_number(config, "vocab_size", path),
        positions=_positive_number(config, "max_position_embeddings", path),
        features=_positive_number(config, "hidden_size", path),
        ffn_features=_positive_number(config, "intermediate_size", path),
        layers=_positive_number(config, "num_hidden_layers", path),
    )


def _read_options(config: dict[str, Any], sizes: ModelSizes, path: Path) -> dict[str, Any]:
    """Return the options of LLNRobertaModel that config.json states, with the defaults of transformers."""
    return {
        "encoder_layers": sizes.layers,
        "encoder_embed_dim": sizes.features,
        "encoder_ffn_embed_dim": sizes.ffn_features,
        "encoder_attention_heads": _positive_number(config, "num_attention_heads", path),
        "activation_fn": ACTIVATIONS[str(config.get("hidden_act", "gelu"))],
        "dropout": _fraction(config, "hidden_dropout_prob", 0.1, path),
        "attention_dropout": _fraction(config, "attention_probs_dropout_prob", 0.1, path),
        "layer_norm_eps": _fraction(config, "layer_norm_eps", 1e-12, path),
    }


def _positive_number(config: dict[str, Any], key: str, path: Path) -> int:
    """Return an option of config.json. Raises UserError if it is missing or not a positive integer."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{path}: {key} must be a positive integer, got {value!r}")
    return value


def _fraction(config: dict[str, Any], key: str, default: float, path: Path) -> float:
    """Return an option of config.json, or `default` if it is missing. Raises UserError if it is not in [0, 1)."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise UserError(f"{path}: {key} must be a number of at least 0 and below 1, got {value!r}")
    return float(value)


def _with_current_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that transformers uses today, without the prefix of the model.

    A head stores the bias of its output matrix as "bias" and, in some versions, also as "decoder.bias". If a file has
    only the latter, the result has both.
    """
    renamed = {}
    for name, value in tensors.items():
        name = re.sub(r"^(roberta|bert)\.", "", name)
        for pattern, current in TENSORFLOW_NAMES.items():
            name = pattern.sub(current, name)
        renamed[name] = value
    for head in ("lm_head.", "cls.predictions."):
        if f"{head}decoder.bias" in renamed:
            renamed.setdefault(f"{head}bias", renamed[f"{head}decoder.bias"])
    return renamed


def _check_converted_weights(tensors: dict[str, Tensor], directory: Path) -> None:
    """Raise UserError for weights of the converted parts that are not finite floating-point numbers."""
    weights = {}
    for name, value in tensors.items():
        if CONVERTED_PARTS.match(name) and not name.endswith("_ids"):
            weights[name] = value
    check_weights(weights, directory)


def _note_unused_tensors(tensors: dict[str, Tensor], names: list[ParameterName], directory: Path) -> list[str]:
    """Return a note that lists the heads for other tasks, or an empty list if there are none.

    Raises UserError for a parameter of the encoder or the language-model head that is not in `names`.
    """
    known = {name.hugging_face for name in names}
    known.add(TOKEN_TYPES)
    unused = [name for name in tensors if name not in known and not IGNORED.match(name)]
    unknown = [name for name in unused if CONVERTED_PARTS.match(name)]
    if unknown:
        raise UserError(f"{directory} is not a RoBERTa or BERT: unexpected parameters {summarize_names(unknown)}")
    heads = set()
    for name in unused:
        parts = name.split(".")
        if parts[0] == "cls":  # all heads of BERT are in `cls`
            heads.add(".".join(parts[:2]))
        else:
            heads.add(parts[0])
    if not heads:
        return []
    return [f"left out: {', '.join(sorted(heads))}"]


def _convert_positions(
    parameters: dict[str, Tensor], tensors: dict[str, Tensor], unused_rows: int, sizes: ModelSizes, directory: Path
) -> None:
    """Add the embedding of token type 0 to all positions and move position p to row p + POSITION_OFFSET.

    The positional table in `parameters` is replaced; if neither step is necessary, its values stay exactly the same.
    `unused_rows` is the row of position 0 in the source. `tensors`, the source's, can be without token types.
    """
    table = parameters[POSITIONS]
    if len(table) <= unused_rows:
        raise UserError(f"{directory}: the positional table must have more than {unused_rows} rows, got {len(table)}")
    if TOKEN_TYPES in tensors:
        token_types = tensors[TOKEN_TYPES]
        require_shapes(tensors, {TOKEN_TYPES: (token_types.shape[0], sizes.features)}, directory, CONFIG)
        if token_types[0].any():
            positions = table[unused_rows:] + token_types[0].to(table.dtype)
            table = torch.cat([table[:unused_rows], positions])
    if unused_rows != POSITION_OFFSET:
        table = torch.cat([table.new_zeros(POSITION_OFFSET, sizes.features), table[unused_rows:]])
    parameters[POSITIONS] = table


def _reorder_symbols(parameters: dict[str, Tensor], vocabulary: SourceVocabulary) -> None:
    """Put the rows of all parameters that have one row per symbol into the order of fairseq's ids, in place.

    A head without an output matrix of its own gets the embedding.
    """
    order = torch.tensor(vocabulary.order)
    for name in (EMBEDDING, HEAD_BIAS, HEAD_WEIGHT):
        if name in parameters:
            parameters[name] = parameters[name][order]
    if any(name.startswith(HEAD) for name in parameters):
        parameters.setdefault(HEAD_WEIGHT, parameters[EMBEDDING])
