"""Convert a model of this project to a Hugging Face configuration and tensors.

A model with softmax attention becomes a stock RoBERTa, unless it has rotary positions, other places of layer norms,
DistilBERT's classification head, or a language-model head with another activation than GELU. Such models, LLN, LLN+Diag
and blocks need code that is shipped with the exported model: modeling_lln_roberta.py, ops/formula.py, ops/rotary.py and
text/pairs.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.config import POSITION_OFFSET, STOCK_ATTENTION
from lln_fairseq.checkpoints.source_settings import IDENTITY, REGRESSION, activation_settings
from lln_fairseq.conversion.imported_encoder import HEAD
from lln_fairseq.conversion.parameter_names import (
    ATTENTION_PREFIX,
    ENCODER,
    HEAD_BIAS,
    HEAD_WEIGHT,
    TOKEN_TYPES,
    ModelSizes,
    classifier_names,
    encoder_names,
    head_names,
    sizes_of_parameters,
)
from lln_fairseq.errors import UserError
from lln_fairseq.models.adapt import EMBEDDING, SECOND_TEXT
from lln_fairseq.models.options import parse_softmax_layers
from lln_fairseq.ops import formula
from lln_fairseq.ops import rotary as rotary_positions
from lln_fairseq.ops.moment_matching import calibration_table
from lln_fairseq.text import pairs
from lln_fairseq.text.special_symbols import BOS, EOS, PAD

MODELING = "modeling_lln_roberta"
# The attentions and the values of their options that the modeling file implements.
MODELING_ATTENTIONS = ("lln", "lln_diag", "block_diag", "window")
MODELING_OPTIONS = {
    "mix": ("average", "joint_offset"),
    "constants": ("calibrated", "paper"),
    "gain": ("none", "learned"),
}
POOLER_ACTIVATIONS = ("tanh", "relu")  # of the classification head; stock RoBERTa's is the first
PURPOSES = ("ForMaskedLM", "ForSequenceClassification")  # suffixes of the class names in transformers
SENTENCE_VECTORS = ""  # the purpose of a model without a head
# Hugging Face's names of the activations of the layers, by fairseq's.
ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu"}
REQUIRED_OPTIONS = {  # the options of which Hugging Face's RoBERTa supports a single value
    "pooling": "first",
    "pooler_dim": None,
    "two_towers": False,
}


class NotExportableError(UserError):
    """A model has an attention or an option that an exported model cannot have."""


@dataclass(frozen=True)
class ExportedModel:
    """A model with Hugging Face's option and parameter names.

    Attributes:
        config: the content of config.json.
        tensors: float32 tensors by Hugging Face's parameter names.
        purpose: "ForMaskedLM", "ForSequenceClassification", or SENTENCE_VECTORS for a model without a head.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    purpose: str


def convert_to_hugging_face(
    state: Mapping[str, Tensor],
    args: Any,
    attention_options: Mapping[str, Any],
    head: str = "",
    labels: tuple[str, ...] = (),
    is_encoder: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> ExportedModel:
    """Convert the parameters and options of a model to Hugging Face's.

    UserError is raised for an attention or an option that Hugging Face's RoBERTa and the modeling file do not support,
    a parameter that they do not have, or labels that do not fit the classification head.

    Args:
        state: the model's state dict.
        args: the model's options, with those of STOCK_OPTIONS in export.py.
        attention_options: the options of the attention.
        head: name of the classification head to export; empty exports a masked language model or an encoder.
        labels: the name of each class of the head, in order; empty if it has one output.
        is_encoder: export only the encoder, without a head.
        settings: entries of config.json of the model that a classifier was converted from.
    """
    _check_options(args, attention_options)
    sizes = sizes_of_parameters(state)
    config = _roberta_config(args, sizes)
    rotary = getattr(args, "rotary", False)
    is_stock = args.attention == STOCK_ATTENTION and not rotary and not sizes.pre_norm and sizes.embedding_norm
    if head and args.pooler_activation_fn != POOLER_ACTIVATIONS[0]:
        is_stock = False
    if not head and not is_encoder and args.activation_fn != "gelu":  # stock RoBERTa's language-model head has gelu
        is_stock = False
    if not is_stock:
        config |= _code_config(args.attention)
        config |= _attention_config(args.attention, attention_options, sizes.features // args.encoder_attention_heads)
        config["softmax_layers"] = list(parse_softmax_layers(args.softmax_layers, sizes.layers))
        config["normalize_before"] = sizes.pre_norm
        config["normalize_embedding"] = sizes.embedding_norm
        config["rotary_base"] = args.rotary_base if rotary else None
        config["pair_form"] = args.pair_form
        config["classifier_activation"] = args.pooler_activation_fn
    tensors = {name.hugging_face: state[name.fairseq] for name in encoder_names(sizes)}
    tensors[TOKEN_TYPES] = torch.zeros(1, sizes.features)
    if SECOND_TEXT in state:
        tensors[TOKEN_TYPES] = torch.stack([torch.zeros(sizes.features), state[SECOND_TEXT].float()])
        config["type_vocab_size"] = 2
    tensors |= _attention_parameters(state, sizes.layers)
    prefix = "Roberta" if is_stock else "LLNRoberta"
    if head:
        purpose = "ForSequenceClassification"
    elif is_encoder:
        purpose = SENTENCE_VECTORS
    else:
        purpose = "ForMaskedLM"
    config["architectures"] = [prefix + (purpose or "Model")]
    if purpose != SENTENCE_VECTORS:
        tensors = {f"roberta.{name}": value for name, value in tensors.items()}
    elif is_stock:
        tensors |= _untrained_pooler(sizes.features)
    if head:
        tensors |= _classification_head_tensors(state, head, sizes.features)
        config |= _label_config(labels, len(tensors["classifier.out_proj.bias"]), settings or {})
    elif not is_encoder:
        tensors |= {name.hugging_face: state[name.fairseq] for name in head_names(sizes)}
        config["tie_word_embeddings"] = torch.equal(state[HEAD_WEIGHT], state[EMBEDDING])
        if not config["tie_word_embeddings"]:
            tensors["lm_head.decoder.weight"] = state[HEAD_WEIGHT]
            tensors["lm_head.decoder.bias"] = state[HEAD_BIAS].clone()  # transformers 5 does not tie it either
    _require_exported_parameters(state, sizes)
    tensors = {name: value.detach().float().contiguous() for name, value in tensors.items()}
    return ExportedModel(config, tensors, purpose)


def require_exportable_activation(activation: str) -> None:
    """Raise NotExportableError if the activation of the layers, by fairseq's name, cannot be exported."""
    if activation not in ACTIVATIONS:
        raise NotExportableError(f"activation_fn={activation} cannot be exported: choose from {', '.join(ACTIVATIONS)}")


def longest_exported_sequence(config: Mapping[str, Any]) -> int:
    """Return the length in tokens of the longest sequence that a model with this config.json accepts."""
    return config["max_position_embeddings"] - POSITION_OFFSET


def modeling_files() -> dict[str, bytes]:
    """Return the code that an exported model needs in transformers, by file name.

    transformers finds the files of the model's directory only with a relative import, and only those that the modeling
    file imports itself.
    """
    modeling = Path(__file__).with_name(f"{MODELING}.py").read_text(encoding="utf-8")
    files = {}
    for module in (formula, rotary_positions, pairs):
        assert module.__file__ is not None
        path = Path(module.__file__)
        modeling = modeling.replace(f"from {module.__name__} import", f"from .{path.stem} import")
        files[path.name] = path.read_bytes()
    files[f"{MODELING}.py"] = modeling.encode()
    return files


def _check_options(args: Any, attention_options: Mapping[str, Any]) -> None:
    """Raise NotExportableError for an attention or an option that cannot be exported.

    Only the options in REQUIRED_OPTIONS and MODELING_OPTIONS are checked. A missing option counts as supported.
    """
    exportable = (STOCK_ATTENTION, *MODELING_ATTENTIONS)
    if args.attention not in exportable:
        raise NotExportableError(
            f"the attention {args.attention} cannot be exported: choose from {', '.join(exportable)}"
        )
    for option, required in REQUIRED_OPTIONS.items():
        value = getattr(args, option, required)
        if value != required:
            raise NotExportableError(
                f"{option}={value} cannot be exported: Hugging Face's RoBERTa supports only {required}"
            )
    require_exportable_activation(args.activation_fn)
    activation = getattr(args, "pooler_activation_fn", POOLER_ACTIVATIONS[0])
    if activation not in POOLER_ACTIVATIONS:
        raise NotExportableError(
            f"pooler_activation_fn={activation} cannot be exported: choose from {', '.join(POOLER_ACTIVATIONS)}"
        )
    for option, supported in MODELING_OPTIONS.items():
        value = attention_options.get(option, supported[0])
        if value not in supported:
            raise NotExportableError(
                f"{option}={value} of {args.attention} cannot be exported: choose from {', '.join(supported)}"
            )


def _roberta_config(args: Any, sizes: ModelSizes) -> dict[str, Any]:
    """Return the part of config.json that every RoBERTa has."""
    return {
        "model_type": "roberta",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.features,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": args.encoder_attention_heads,
        "intermediate_size": sizes.ffn_features,
        "hidden_act": ACTIVATIONS[args.activation_fn],
        "hidden_dropout_prob": args.dropout,
        "attention_probs_dropout_prob": args.attention_dropout,
        "classifier_dropout": args.pooler_dropout,
        "max_position_embeddings": sizes.positions,
        "type_vocab_size": 1,
        "layer_norm_eps": args.layer_norm_eps,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def _code_config(attention: str) -> dict[str, Any]:
    """Return the part of config.json with which transformers finds the classes of the modeling file."""
    classes = {"AutoConfig": f"{MODELING}.LLNRobertaConfig", "AutoModel": f"{MODELING}.LLNRobertaModel"}
    for purpose in PURPOSES:
        classes[f"AutoModel{purpose}"] = f"{MODELING}.LLNRoberta{purpose}"
    return {"model_type": "lln_roberta", "auto_map": classes, "attention": attention}


def _attention_config(attention: str, options: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the options of the attention, and the calibration table if its constants are calibrated.

    The result is empty for softmax.
    """
    if attention == STOCK_ATTENTION:
        return {}
    config = dict(options)
    if config.get("constants") == "calibrated":
        config["moment_table"] = [numbers.tolist() for numbers in calibration_table(head_dim)]
    return config


def _attention_parameters(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the attention's own parameters of all layers, such as learned gains, by Hugging Face's names."""
    parameters: dict[str, Tensor] = {}
    for layer in range(layers):
        fairseq = f"{ENCODER}layers.{layer}.{ATTENTION_PREFIX}"
        hugging_face = f"encoder.layer.{layer}.attention.self."
        for name, value in state.items():
            if name.startswith(fairseq):
                parameters[name.replace(fairseq, hugging_face)] = value
    return parameters


def _untrained_pooler(features: int) -> dict[str, Tensor]:
    """Return the layer behind the first token that RobertaModel always has, with zeros, because none was trained.

    Without it, transformers would report missing parameters and draw them at random.
    """
    return {"pooler.dense.weight": torch.zeros(features, features), "pooler.dense.bias": torch.zeros(features)}


def _classification_head_tensors(state: Mapping[str, Tensor], head: str, features: int) -> dict[str, Tensor]:
    """Return the parameters of the classification head named `head`, by their names in Hugging Face.

    Raises UserError if its inner size is not `features`.
    """
    tensors = {hugging_face: state[fairseq] for fairseq, hugging_face in classifier_names(head).items()}
    inner = len(tensors["classifier.dense.bias"])
    if inner != features:
        raise UserError(f"the classification head must have {features} inner features to be exported, got {inner}")
    return tensors


def _label_config(labels: tuple[str, ...], outputs: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json about labels.

    `settings` are those that `lln-fairseq convert` stored, and empty for a model that was trained here. They override
    entries; for a single output they are all entries. A regression without settings names the identity as its
    activation, because CrossEncoder would apply the sigmoid. Raises UserError if the number of labels is not `outputs`.
    """
    if not labels and outputs == 1:
        if settings:
            return dict(settings)
        regression = {"id2label": {"0": "score"}, "label2id": {"score": 0}, "problem_type": REGRESSION}
        return regression | activation_settings(IDENTITY)
    if len(labels) != outputs:
        raise UserError(f"the classification head has {outputs} classes, but there are {len(labels)} labels")
    classification = {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }
    return classification | dict(settings)


def _require_exported_parameters(state: Mapping[str, Tensor], sizes: ModelSizes) -> None:
    """Raise UserError if the encoder has a parameter that Hugging Face's RoBERTa does not have.

    The heads, parameters of an attention and fairseq's `.version` buffers are not checked.
    """
    exported = {SECOND_TEXT, *(name.fairseq for name in encoder_names(sizes))}
    for name in state:
        is_attention = ATTENTION_PREFIX in name
        is_head = name.startswith(("classification_heads.", HEAD))
        is_buffer = name.endswith(".version")
        if name not in exported and not is_attention and not is_head and not is_buffer:
            raise UserError(f"the model cannot be exported: Hugging Face's RoBERTa has no parameter for {name}")
