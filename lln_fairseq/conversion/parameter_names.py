"""The parameters of RoBERTa and BERT: their names in fairseq, their names in Hugging Face, and their shapes.

In both libraries, a module's parameters are its name with ".weight" and ".bias". Hugging Face's names are listed
without the prefix of the model ("roberta.", "bert.").
"""

from collections.abc import Iterator
from typing import NamedTuple

ENCODER = "encoder.sentence_encoder."

# Each row is (fairseq's name, Hugging Face's name, shape of the weight). ModelSizes.shape translates the letters of a
# shape. A bias has the first dimension of its weight.
EMBEDDINGS = (
    (ENCODER + "embed_tokens.weight", "embeddings.word_embeddings.weight", "VC"),
    (ENCODER + "embed_positions.weight", "embeddings.position_embeddings.weight", "PC"),
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
HEAD_ROBERTA = (
    ("encoder.lm_head.dense", "lm_head.dense", "CC"),
    ("encoder.lm_head.layer_norm", "lm_head.layer_norm", "C"),
)
HEAD_BERT = (
    ("encoder.lm_head.dense", "cls.predictions.transform.dense", "CC"),
    ("encoder.lm_head.layer_norm", "cls.predictions.transform.LayerNorm", "C"),
)
HEAD_BIAS = "encoder.lm_head.bias"
HEAD_WEIGHT = "encoder.lm_head.weight"  # the output matrix; the embedding itself unless the two are untied


class ModelSizes(NamedTuple):
    """The sizes that determine the shape of every parameter."""

    vocabulary: int  # V: symbols
    positions: int  # P: rows of the positional table
    features: int  # C: features of a token
    ffn_features: int  # F: features of the hidden layer between fc1 and fc2
    layers: int

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the shape for letters among V, P, C and F, for example (vocabulary, features) for "VC"."""
        sizes = {"V": self.vocabulary, "P": self.positions, "C": self.features, "F": self.ffn_features}
        return tuple(sizes[letter] for letter in letters)


class ParameterName(NamedTuple):
    """The names of a parameter in both libraries, and its shape."""

    fairseq: str
    hugging_face: str
    shape: tuple[int, ...]


def encoder_names(sizes: ModelSizes) -> Iterator[ParameterName]:
    """Yield every parameter of the encoder, except Hugging Face's token types: embeddings first, then the layers."""
    for fairseq, hugging_face, letters in EMBEDDINGS:
        yield ParameterName(fairseq, hugging_face, sizes.shape(letters))
    yield from _module_names(*EMBEDDING_NORM, sizes)
    for layer in range(sizes.layers):
        for fairseq, hugging_face, letters in LAYER:
            yield from _module_names(
                f"{ENCODER}layers.{layer}.{fairseq}", f"encoder.layer.{layer}.{hugging_face}", letters, sizes
            )


def head_names(sizes: ModelSizes, bert: bool = False) -> Iterator[ParameterName]:
    """Yield every parameter of the masked-language-model head, except the output matrix, which can be tied.

    With `bert`, Hugging Face's names are those of BERT instead of RoBERTa.
    """
    modules = HEAD_ROBERTA
    bias = "lm_head.bias"
    if bert:
        modules = HEAD_BERT
        bias = "cls.predictions.bias"
    for fairseq, hugging_face, letters in modules:
        yield from _module_names(fairseq, hugging_face, letters, sizes)
    yield ParameterName(HEAD_BIAS, bias, (sizes.vocabulary,))


def _module_names(fairseq: str, hugging_face: str, letters: str, sizes: ModelSizes) -> Iterator[ParameterName]:
    """Yield the weight, whose shape the letters give, and the bias of a module."""
    yield ParameterName(f"{fairseq}.weight", f"{hugging_face}.weight", sizes.shape(letters))
    yield ParameterName(f"{fairseq}.bias", f"{hugging_face}.bias", sizes.shape(letters[0]))
