"""The parameters of RoBERTa, BERT and DistilBERT: names in fairseq, names in Hugging Face, and shapes.

In both libraries, a module NAME has the parameters NAME.weight and NAME.bias. The names in Hugging Face are listed
without the prefix of the model ("roberta.", "bert.", "distilbert.").
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from lln_fairseq.checkpoints.config import parameter_sizes
from lln_fairseq.models.adapt import EMBEDDING, POSITIONS

ENCODER = "encoder.sentence_encoder."
# The families of models, whose names in Hugging Face differ.
ROBERTA = "roberta"
BERT = "bert"
DISTILBERT = "distilbert"
ATTENTION_PREFIX = "self_attn.attention."  # of the attention's own parameters in a layer

# Each row is (name in fairseq, name in Hugging Face, shape of the weight). ModelSizes.shape translates the letters of a
# shape. The length of a bias is the first dimension of its module's weight.
EMBEDDINGS = (
    (EMBEDDING, "embeddings.word_embeddings.weight", "VC"),
    (POSITIONS, "embeddings.position_embeddings.weight", "PC"),
)
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
EMBEDDING_NORM = (ENCODER + "layernorm_embedding", "embeddings.LayerNorm", "C")
LAYER = (
    ("self_attn.q_proj", "attention.self.query", "CC"),
    ("self_attn.k_proj", "attention.self.key", "CC"),
    ("self_attn.v_proj", "attention.self.value", "CC"),
    ("self_attn.out_proj", "attention.output.dense", "CC"),
    ("self_attn_layer_norm", "attention.output.LayerNorm", "C"),
    ("fc1", "intermediate.dense", "FC"),
    ("fc2", "output.dense", "CF"),
    ("final_layer_norm", "output.LayerNorm", "C"),
)
# A pre-norm encoder has the names of Hugging Face's RoBERTa-PreLayerNorm, where a norm belongs to the module behind it.
# Its last layer has one norm more, which is that of the encoder.
PRE_NORM_NAMES = {
    "self_attn_layer_norm": "attention.LayerNorm",
    "final_layer_norm": "intermediate.LayerNorm",
}
FINAL_NORM = ENCODER + "layer_norm"
# DistilBERT's names of the modules of a layer, by fairseq's.
DISTILBERT_NAMES = {
    "self_attn.q_proj": "attention.q_lin",
    "self_attn.k_proj": "attention.k_lin",
    "self_attn.v_proj": "attention.v_lin",
    "self_attn.out_proj": "attention.out_lin",
    "self_attn_layer_norm": "sa_layer_norm",
    "fc1": "ffn.lin1",
    "fc2": "ffn.lin2",
    "final_layer_norm": "output_layer_norm",
}
# For each family: the names in Hugging Face of the language-model head's dense layer, layer norm and bias.
LANGUAGE_HEADS = {
    ROBERTA: ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    BERT: ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    DISTILBERT: ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
}
# For each family: the names in Hugging Face of the two layers of the classification head.
CLASSIFICATION_HEADS = {
    ROBERTA: ("classifier.dense", "classifier.out_proj"),
    BERT: ("pooler.dense", "classifier"),
    DISTILBERT: ("pre_classifier", "classifier"),
}
CLASSIFICATION_HEAD = "sentence_classification_head"  # fairseq's default name
HEAD_BIAS = "encoder.lm_head.bias"
HEAD_WEIGHT = "encoder.lm_head.weight"  # the output matrix; the same tensor as the token embedding if they are tied


class ModelSizes(NamedTuple):
    """The sizes that determine the shape of every parameter, and the norms that determine the names."""

    vocabulary: int  # V: number of symbols
    positions: int  # P: number of rows in the positional table
    features: int  # C: number of features of a token
    ffn_features: int  # F: number of features between fc1 and fc2
    layers: int  # number of layers
    pre_norm: bool = False  # layer norm before each block, and after the last layer
    embedding_norm: bool = True  # layer norm after the embeddings

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the shape that the letters V, P, C and F stand for: (vocabulary, features) for "VC"."""
        sizes = {"V": self.vocabulary, "P": self.positions, "C": self.features, "F": self.ffn_features}
        return tuple(sizes[letter] for letter in letters)


class ParameterName(NamedTuple):
    """The names of a parameter in both libraries, and its shape."""

    fairseq: str
    hugging_face: str
    shape: tuple[int, ...]


def sizes_of_parameters(parameters: Mapping[str, Tensor]) -> ModelSizes:
    """Return the sizes that the parameters of a RoBERTa have, by fairseq's names.

    The layers are counted. Raises KeyError if the embedding, the positional table or the first layer is missing.
    """
    sizes = parameter_sizes(parameters)
    return ModelSizes(
        vocabulary=len(parameters[EMBEDDING]),
        positions=len(parameters[POSITIONS]),
        features=sizes["encoder_embed_dim"],
        ffn_features=sizes["encoder_ffn_embed_dim"],
        layers=sizes["encoder_layers"],
        pre_norm=f"{FINAL_NORM}.weight" in parameters,
        embedding_norm=f"{EMBEDDING_NORM[0]}.weight" in parameters,
    )


def encoder_names(sizes: ModelSizes, family: str = ROBERTA) -> Iterator[ParameterName]:
    """Yield every parameter of the encoder that exists in both libraries: first the embeddings, then the layers.

    Hugging Face's token type embeddings are not among them.
    """
    layers = "encoder.layer"
    names = {}
    if family == DISTILBERT:
        layers = "transformer.layer"
        names = DISTILBERT_NAMES
    elif sizes.pre_norm:
        names = PRE_NORM_NAMES
    for fairseq, hugging_face, letters in EMBEDDINGS:
        yield ParameterName(fairseq, hugging_face, sizes.shape(letters))
    if sizes.embedding_norm:
        yield from _module_names(*EMBEDDING_NORM, sizes)
    for layer in range(sizes.layers):
        for fairseq, hugging_face, letters in LAYER:
            hugging_face = names.get(fairseq, hugging_face)
            yield from _module_names(
                f"{ENCODER}layers.{layer}.{fairseq}", f"{layers}.{layer}.{hugging_face}", letters, sizes
            )
    if sizes.pre_norm:
        yield from _module_names(FINAL_NORM, f"encoder.layer.{sizes.layers - 1}.output.LayerNorm", "C", sizes)


def head_names(sizes: ModelSizes, family: str = ROBERTA) -> Iterator[ParameterName]:
    """Yield the parameters of the masked-language-model head, without the output matrix.

    The output matrix (HEAD_WEIGHT) is left out because it can be tied to the token embedding.
    """
    dense, layer_norm, bias = LANGUAGE_HEADS[family]
    yield from _module_names("encoder.lm_head.dense", dense, "CC", sizes)
    yield from _module_names("encoder.lm_head.layer_norm", layer_norm, "C", sizes)
    yield ParameterName(HEAD_BIAS, bias, (sizes.vocabulary,))


def classifier_names(head: str = CLASSIFICATION_HEAD, family: str = ROBERTA) -> dict[str, str]:
    """Return the names in Hugging Face of the parameters of a classification head, by their names in fairseq."""
    dense, out_proj = CLASSIFICATION_HEADS[family]
    names = {}
    for kind in ("weight", "bias"):
        names[f"classification_heads.{head}.dense.{kind}"] = f"{dense}.{kind}"
        names[f"classification_heads.{head}.out_proj.{kind}"] = f"{out_proj}.{kind}"
    return names


def _module_names(fairseq: str, hugging_face: str, letters: str, sizes: ModelSizes) -> Iterator[ParameterName]:
    """Yield the weight and the bias of a module. `letters` is the shape of the weight."""
    yield ParameterName(f"{fairseq}.weight", f"{hugging_face}.weight", sizes.shape(letters))
    yield ParameterName(f"{fairseq}.bias", f"{hugging_face}.bias", sizes.shape(letters[0]))
