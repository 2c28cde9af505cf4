"""One of our models as config.json and tensors of Hugging Face.

With softmax it is a RoBERTa as everybody has it. LLN and LLN+Diag come with modeling_lln_roberta.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.config import STOCK_ATTENTION
from lln_fairseq.conversion.encoder import HEAD, POSITIONS
from lln_fairseq.conversion.parameter_names import (
    EMBEDDINGS,
    ENCODER,
    HEAD_WEIGHT,
    TOKEN_TYPES,
    Sizes,
    encoder_names,
    head_names,
)
from lln_fairseq.errors import InputError
from lln_fairseq.ops.moment_matching import TABLES_FILES, calibration_table

MODELING = "modeling_lln_roberta"
OURS = ("lln", "lln_diag")  # what the modeling file knows; below, the values that it knows of its options
KNOWN = {
    "mix": ("average", "ratio", "scale", "joint", "joint_offset"),
    "constants": ("calibrated", "entropy", "paper"),
    "gain": ("none", "learned"),
}
PURPOSES = ("ForMaskedLM", "ForSequenceClassification")  # what transformers' class names end in
FIXED = {  # options of which Hugging Face's RoBERTa has one value
    "encoder_normalize_before": False, "layernorm_embedding": True, "activation_fn": "gelu",
    "pooler_activation_fn": "tanh", "spectral_norm_classification_head": False,
    "pooling": "first", "pooler_dim": None, "two_towers": False,
}  # fmt: skip
ATTENTION_PARAMETERS = "self_attn.attention."


@dataclass(frozen=True)
class Export:
    """config.json, the tensors by name, and what the model is for: "ForMaskedLM" or "ForSequenceClassification"."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    purpose: str


def export(
    state: Mapping[str, Tensor], args: Any, attention: Mapping[str, Any], head: str = "", labels: tuple[str, ...] = ()
) -> Export:
    """Parameters and options of a model of ours, and the options of its attention.

    `head`: the classification head of a fine-tuned model, with its labels (none for a regression).
    Raises: InputError for an attention or an option that Hugging Face's RoBERTa and our modeling file do not have.
    """
    _check(args, attention)
    embedding = state[EMBEDDINGS[0][0]]
    layers = len({name.split(".layers.")[1].split(".")[0] for name in state if name.startswith(f"{ENCODER}layers.")})
    width = len(state[f"{ENCODER}layers.0.fc1.weight"])
    sizes = Sizes(len(embedding), len(state[POSITIONS]), embedding.shape[1], width, layers)
    purpose = "ForSequenceClassification" if head else "ForMaskedLM"
    tensors = {f"roberta.{name.theirs}": state[name.ours] for name in encoder_names(sizes)}
    tensors[f"roberta.{TOKEN_TYPES}"] = torch.zeros(1, sizes.C)
    tensors |= _mechanism(state, layers)
    config = _config(args, sizes) | _attention(args.attention, attention, sizes.C // args.encoder_attention_heads)
    prefix = "Roberta" if args.attention == STOCK_ATTENTION else "LLNRoberta"
    config["architectures"] = [prefix + purpose]
    if head:
        tensors |= {
            f"classifier.{name}": state[f"classification_heads.{head}.{name}"]
            for name in ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias")
        }
        config |= _labels(labels, len(tensors["classifier.out_proj.bias"]))
        if len(tensors["classifier.dense.bias"]) != sizes.C:
            raise InputError(f"the classification head has {len(tensors['classifier.dense.bias'])} features inside, "
                             f"and Hugging Face's has {sizes.C}")  # fmt: skip
    else:
        tensors |= {name.theirs: state[name.ours] for name in head_names(sizes)}
        config["tie_word_embeddings"] = torch.equal(state[HEAD_WEIGHT], embedding)
        if not config["tie_word_embeddings"]:
            tensors["lm_head.decoder.weight"] = state[HEAD_WEIGHT]
    used = {name.ours for name in [*encoder_names(sizes), *head_names(sizes)]} | {HEAD_WEIGHT}
    others = [
        name
        for name in state
        if name not in used and ATTENTION_PARAMETERS not in name and not name.endswith(".version")
    ]
    others = [name for name in others if not name.startswith(("classification_heads.", HEAD))]
    if others:
        raise InputError(f"Hugging Face's RoBERTa has nothing for {others[0]}")
    return Export(config, {name: x.detach().float().contiguous() for name, x in tensors.items()}, purpose)


def _check(args: Any, attention: Mapping[str, Any]) -> None:
    known = (STOCK_ATTENTION, *OURS)
    if args.attention not in known:
        raise InputError(f"the attention {args.attention} cannot be exported, only {', '.join(known)}")
    for option, value in FIXED.items():
        if getattr(args, option, value) != value:
            raise InputError(f"{option} is {getattr(args, option)}, and Hugging Face's RoBERTa has {value} alone")
    for option, values in KNOWN.items():
        if attention.get(option, values[0]) not in values:
            raise InputError(f"{args.attention} with {option} {attention[option]} cannot be exported, only with "
                             f"{', '.join(values)}")  # fmt: skip


def _config(args: Any, sizes: Sizes) -> dict[str, Any]:
    return {
        "model_type": "roberta",
        "vocab_size": sizes.V,
        "hidden_size": sizes.C,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": args.encoder_attention_heads,
        "intermediate_size": sizes.F,
        "hidden_act": args.activation_fn,
        "hidden_dropout_prob": args.dropout,
        "attention_probs_dropout_prob": args.attention_dropout,
        "classifier_dropout": args.pooler_dropout,
        "max_position_embeddings": sizes.P,
        "type_vocab_size": 1,
        "layer_norm_eps": args.layer_norm_eps,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def _attention(name: str, options: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What the modeling file wants to know, and where transformers finds it."""
    if name == STOCK_ATTENTION:
        return {}
    found: dict[str, Any] = {"model_type": "lln_roberta", "attention": name, **options}
    if found["constants"] in TABLES_FILES:
        table = calibration_table(head_dim, constants=found["constants"])
        found["moment_table"] = [numbers.tolist() for numbers in table]
    places = {"AutoConfig": f"{MODELING}.LLNRobertaConfig", "AutoModel": f"{MODELING}.LLNRobertaModel"}
    for purpose in PURPOSES:
        places[f"AutoModel{purpose}"] = f"{MODELING}.LLNRoberta{purpose}"
    return {**found, "auto_map": places}


def _mechanism(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The attention's own parameters."""
    found: dict[str, Tensor] = {}
    for layer in range(layers):
        ours = f"{ENCODER}layers.{layer}.{ATTENTION_PARAMETERS}"
        theirs = f"roberta.encoder.layer.{layer}.attention.self."
        found |= {name.replace(ours, theirs): value for name, value in state.items() if name.startswith(ours)}
    return found


def _labels(labels: tuple[str, ...], outputs: int) -> dict[str, Any]:
    if not labels and outputs == 1:
        return {"id2label": {"0": "score"}, "label2id": {"score": 0}, "problem_type": "regression"}
    if len(labels) != outputs:
        raise InputError(f"the classification head has {outputs} classes, and there are {len(labels)} labels")
    numbered = {"id2label": {str(i): label for i, label in enumerate(labels)}}
    return numbered | {
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }
