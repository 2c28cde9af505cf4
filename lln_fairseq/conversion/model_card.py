"""Write the model card (README.md) of an exported model from its configuration, data manifest and scores."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lln_fairseq.checkpoints.pooling import Pooling
from lln_fairseq.conversion.to_hugging_face import SENTENCE_VECTORS, longest_exported_sequence
from lln_fairseq.errors import InputError

PAPER = "[arXiv 2311.13541](https://arxiv.org/abs/2311.13541)"
PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    SENTENCE_VECTORS: "sentence-similarity",
}
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
ATTENTION_OPTIONS = ("mix", "block_size", "global_tokens", "scope", "constants", "gain", "alpha", "beta")
MANIFEST = "manifest.json"  # of the data
SCORES = "valid.json"  # what `lln-fairseq evaluate --json` wrote
APPROXIMATE = (
    " - tokenizer: SentencePiece with a table that normalizes characters. `transformers` applies the table to whole\n"
    "   grapheme clusters, SentencePiece to single code points. The ids may differ if a text has combining marks\n"
    "   without a composed form, joiners, half-width kana with marks, or control characters."
)


def model_card(
    config: Mapping[str, Any],
    purpose: str,
    has_tokenizer: bool,
    is_approximate: bool,
    directories: list[Path],
    pooling: Pooling | None = None,
) -> str:
    """Return the text of the model card.

    Args:
        config: the content of the exported config.json.
        purpose: "ForMaskedLM", "ForSequenceClassification" or SENTENCE_VECTORS.
        has_tokenizer: whether the model is exported with a tokenizer.
        is_approximate: whether the exported tokenizer encodes some texts differently from the original one.
        directories: where to search for the data's manifest and the checkpoint's scores, in this order. A file that no
            directory has is left out of the card.
        pooling: the pooling of an encoder of sentence vectors.

    Raises:
        InputError: if the manifest or the scores are not JSON.
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
    lines += ["", "## Properties", ""]
    for key in SIZES:
        lines.append(f" - {key.replace('_', ' ')}: {config[key]}")
    lines.append(f" - longest sequence: {longest_exported_sequence(config)} tokens")
    if pooling is not None:
        lines.append(f" - sentence vectors: {config['hidden_size']} features, pooling: {pooling}")
    if config.get("id2label"):
        lines.append(f" - labels: {', '.join(config['id2label'].values())}")
    if is_approximate:
        lines.append(APPROXIMATE)
    lines += _describe_data(directories)
    lines += _describe_scores(directories)
    lines += ["", "## License", "", "To be stated by the publisher of this model.", ""]
    return "\n".join(lines)


def _describe_attention(config: Mapping[str, Any]) -> str:
    """Return one or two sentences about the model's attention and its options."""
    if "attention" not in config:
        return "Its attention is softmax: it is a stock RoBERTa and needs no code of its own."
    options = [f"{key} {config[key]}" for key in ATTENTION_OPTIONS if config.get(key) is not None]
    sentence = (
        f"Its attention is `{config['attention']}`, Linear Log-Normal attention ({PAPER}), whose cost is linear in the "
        f"length of the sequence: {', '.join(options)}."
    )
    if config.get("softmax_layers"):
        layers = ", ".join(str(layer) for layer in config["softmax_layers"])
        sentence += f" These layers, counted from 0, have softmax attention, whose cost is quadratic: {layers}."
    return sentence


def _usage(config: Mapping[str, Any], purpose: str, has_tokenizer: bool) -> list[str]:
    """Return the lines of code that load the model and its tokenizer."""
    model_class = f"AutoModel{purpose}"
    arguments = "DIRECTORY"
    if "auto_map" in config:
        arguments += ", trust_remote_code=True"
    imports = model_class
    if has_tokenizer:
        imports = f"AutoTokenizer, {model_class}"
    lines = [f"    from transformers import {imports}", ""]
    if has_tokenizer:
        lines.append(f"    tokenizer = AutoTokenizer.from_pretrained({arguments})")
    lines.append(f"    model = {model_class}.from_pretrained({arguments})")
    return lines


def _sentence_usage(config: Mapping[str, Any]) -> list[str]:
    """Return the lines of code that compute sentence vectors."""
    arguments = '"DIRECTORY"'
    if "auto_map" in config:
        arguments += ", trust_remote_code=True"
    return [
        "    from sentence_transformers import SentenceTransformer",
        "",
        f"    model = SentenceTransformer({arguments})",
        '    vectors = model.encode(["a text", "another text"])',
    ]


def _describe_data(directories: list[Path]) -> list[str]:
    """Return a line with the sources that the data's manifest names, or an empty list if it names none."""
    sources = _read_first(directories, MANIFEST).get("sources") or ()
    names = [str(source["name"]) for source in sources if isinstance(source, dict) and "name" in source]
    if not names:
        return []
    return [f" - data: {', '.join(names)}"]


def _describe_scores(directories: list[Path]) -> list[str]:
    """Return a line with the numbers in the file of scores, or an empty list if there are none."""
    scores = []
    for name, value in _read_first(directories, SCORES).items():
        if isinstance(value, int | float):
            scores.append(f"{name} {value:g}")
    if not scores:
        return []
    return [f" - on the validation set: {', '.join(scores)}"]


def _read_first(directories: list[Path], name: str) -> dict[str, Any]:
    """Return the JSON object in the first file of this name.

    Returns an empty dictionary if no directory has the file, or the file does not hold a JSON object. Raises InputError
    if the file is not JSON.
    """
    for directory in directories:
        path = directory / name
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"{path} cannot be read: {error}") from error
            if isinstance(content, dict):
                return content
            return {}
    return {}
