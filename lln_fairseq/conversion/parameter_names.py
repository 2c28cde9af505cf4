"""The parameters of RoBERTa and BERT: what they are called in fairseq and in Hugging Face, and their shapes.

Names of modules end in `.weight` and `.bias` on both sides. Hugging Face's are those without the model's own prefix
("roberta.", "bert.").
"""

from collections.abc import Iterator
from typing import NamedTuple

ENCODER = "encoder.sentence_encoder."

# (fairseq, Hugging Face, shape of the weight by the letters of Sizes); the bias has the first dimension.
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
HEAD_BIAS = "encoder.lm_head.bias"  # lm_head.bias, cls.predictions.bias
HEAD_WEIGHT = "encoder.lm_head.weight"  # ....decoder.weight; the embedding, unless it is untied


class Sizes(NamedTuple):
    """V symbols, P rows of the positional table, C features, F of the feed-forward part, and the layers."""

    V: int
    P: int
    C: int
    F: int
    layers: int

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(getattr(self, letter) for letter in letters)


class Name(NamedTuple):
    """A parameter in fairseq and in Hugging Face, and its shape."""

    ours: str
    theirs: str
    shape: tuple[int, ...]


def encoder_names(sizes: Sizes) -> Iterator[Name]:
    """Every parameter of the encoder itself, Hugging Face's token types excepted."""
    for ours, theirs, letters in EMBEDDINGS:
        yield Name(ours, theirs, sizes.shape(letters))
    yield from _module(*EMBEDDING_NORM, sizes)
    for layer in range(sizes.layers):
        for ours, theirs, letters in LAYER:
            yield from _module(f"{ENCODER}layers.{layer}.{ours}", f"encoder.layer.{layer}.{theirs}", letters, sizes)


def head_names(sizes: Sizes, bert: bool = False) -> Iterator[Name]:
    """Every parameter of the masked LM's head, the (tied) output matrix excepted."""
    for ours, theirs, letters in HEAD_BERT if bert else HEAD_ROBERTA:
        yield from _module(ours, theirs, letters, sizes)
    yield Name(HEAD_BIAS, "cls.predictions.bias" if bert else "lm_head.bias", (sizes.V,))


def _module(ours: str, theirs: str, letters: str, sizes: Sizes) -> Iterator[Name]:
    yield Name(f"{ours}.weight", f"{theirs}.weight", sizes.shape(letters))
    yield Name(f"{ours}.bias", f"{theirs}.bias", sizes.shape(letters[0]))
