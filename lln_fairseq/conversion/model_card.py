"""Write the model card (README.md) of an exported model from its configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lln_fairseq.attention.global_tokens import FIRST_SEGMENT
from lln_fairseq.checkpoints.config import STOCK_ATTENTION
from lln_fairseq.checkpoints.pooling import Pooling
from lln_fairseq.checkpoints.source_settings import REGRESSION, activation_name, score_activation
from lln_fairseq.conversion.to_hugging_face import SENTENCE_VECTORS, longest_exported_sequence

PAPER = "[arXiv 2311.13541](https://arxiv.org/abs/2311.13541)"
PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    SENTENCE_VECTORS: "sentence-similarity",
}
SCORES = {nn.Sigmoid: "the sigmoid of `logits`", nn.Identity: "`logits` as they are"}  # by activation
SEGMENTS = (
    " - pairs: the first text ends with its first `</s>`, and its tokens are global. Cut pairs with the tokenizer\n"
    "   (`truncation=True`), which keeps it. If you cut off the end of its result, only one token may be global."
)


def model_card(
    config: Mapping[str, Any],
    purpose: str,
    longest: int,
    has_tokenizer: bool,
    tokenizer_notes: Sequence[str],
    pooling: Pooling | None = None,
    has_onnx: bool = False,
) -> str:
    """Return the text of the model card.

    Args:
        config: the content of the exported config.json.
        purpose: "ForMaskedLM", "ForSequenceClassification" or SENTENCE_VECTORS.
        longest: tokens of the longest sequence.
        has_tokenizer: whether the model is exported with a tokenizer.
        tokenizer_notes: lines about texts that get other ids from the exported tokenizer than from the original one.
        pooling: the pooling of an encoder of sentence vectors.
        has_onnx: whether the model is also exported as onnx/model.onnx.
    """
    if pooling is None:
        library = "transformers"
        tags = "lln_fairseq, roberta"
        title = "A RoBERTa trained with lln_fairseq"
    else:
        library = "sentence-transformers"
        tags = "lln_fairseq, roberta, sentence-transformers, feature-extraction"
        title = "Sentence vectors of a RoBERTa converted with lln_fairseq"
    lines = ["---", f"library_name: {library}", f"pipeline_tag: {PIPELINES[purpose]}", f"tags: [{tags}]", "---", ""]
    lines += [f"# {title}", "", _describe_attention(config), "", "## Use", ""]
    if pooling is not None and has_tokenizer:
        lines += _sentence_usage(config)
    else:
        lines += _usage(config, purpose, has_tokenizer)
    if _is_cross_encoder(config) and has_tokenizer:
        lines += _score_usage(config)
    lines += ["", "## Properties", ""]
    lines.append(f" - longest sequence: {longest} tokens")
    if "auto_map" in config:
        lines.append(" - code: for `torch` 2.7 or later")  # which has torch.compiler.is_exporting
    if has_onnx:
        lines.append(
            " - onnx/model.onnx: for batches of at least one sequence, each of 1 to "
            f"{longest_exported_sequence(config)} tokens with its padding"
        )
    has_blocks = config.get("attention") in ("lln_diag", "block_diag", "window")
    if has_blocks or (pooling is not None and pooling.mode == "cls"):
        lines.append(" - padding: at the right only")
    if config.get("global_tokens") == FIRST_SEGMENT:
        lines.append(SEGMENTS)
    if pooling is not None:
        lines.append(f" - sentence vectors: {config['hidden_size']} features, pooling: {pooling}")
    if config.get("id2label"):
        lines.append(f" - labels: {', '.join(config['id2label'].values())}")
    if _has_one_output(config):
        lines.append(f" - score: {SCORES[type(score_activation(config))]}")
    lines += tokenizer_notes
    lines += ["", "## License", "", "To be stated by the publisher of this model.", ""]
    return "\n".join(lines)


def _describe_attention(config: Mapping[str, Any]) -> str:
    """Return one or two sentences about the model's attention."""
    if "attention" not in config:
        return "Its attention is softmax: it is a stock RoBERTa and needs no code of its own."
    if config["attention"] == STOCK_ATTENTION:
        return "Its attention is softmax. It needs code of its own for rotary positions, its layer norms or its head."
    name = f"Linear Log-Normal attention ({PAPER})"
    if config["attention"] == "block_diag":
        name = "softmax inside blocks of tokens"
    if config["attention"] == "window":
        name = "softmax over the own and neighboring blocks of tokens"
    sentence = f"Its attention is `{config['attention']}`, {name}, whose cost is linear in the length of the sequence."
    if config.get("softmax_layers"):
        layers = ", ".join(str(layer) for layer in config["softmax_layers"])
        sentence += f" These layers, counted from 0, have softmax attention, whose cost is quadratic: {layers}."
    return sentence


def _usage(config: Mapping[str, Any], purpose: str, has_tokenizer: bool) -> list[str]:
    """Return the lines of code that load the model and its tokenizer."""
    model_class = f"AutoModel{purpose}"
    arguments = _arguments(config)
    imports = model_class
    if has_tokenizer:
        imports = f"AutoTokenizer, {model_class}"
    lines = [f"    from transformers import {imports}", ""]
    if has_tokenizer:
        lines.append(f"    tokenizer = AutoTokenizer.from_pretrained({arguments})")
    lines.append(f"    model = {model_class}.from_pretrained({arguments})")
    return lines


def _score_usage(config: Mapping[str, Any]) -> list[str]:
    """Return the lines of code that compute the scores of pairs."""
    return [
        "",
        "    from sentence_transformers import CrossEncoder",
        "",
        f"    model = CrossEncoder({_arguments(config)})",
        '    scores = model.predict([("a query", "a passage"), ("a query", "another passage")])',
    ]


def _has_one_output(config: Mapping[str, Any]) -> bool:
    """Return True for a classifier with one output, such as a reranker or a regression."""
    return len(config.get("id2label", ())) == 1


def _is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Return True for a classifier with one output whose score is that of CrossEncoder of sentence-transformers.

    CrossEncoder applies the sigmoid to a regression that names no activation.
    """
    is_plain_regression = config.get("problem_type") == REGRESSION and activation_name(config) is None
    return _has_one_output(config) and not is_plain_regression


def _sentence_usage(config: Mapping[str, Any]) -> list[str]:
    """Return the lines of code that compute sentence vectors."""
    return [
        "    from sentence_transformers import SentenceTransformer",
        "",
        f"    model = SentenceTransformer({_arguments(config)})",
        '    vectors = model.encode(["a text", "another text"])',
    ]


def _arguments(config: Mapping[str, Any]) -> str:
    """Return the arguments of the functions that open the model."""
    arguments = '"DIRECTORY"'
    if "auto_map" in config:
        arguments += ", trust_remote_code=True"
    return arguments
