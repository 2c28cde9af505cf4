"""README.md of an exported model, of what the files say."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lln_fairseq.errors import InputError

PAPER = "[arXiv 2311.13541](https://arxiv.org/abs/2311.13541)"
PIPELINES = {"ForMaskedLM": "fill-mask", "ForSequenceClassification": "text-classification"}
MANIFEST, SCORES = "manifest.json", "valid.json"
APPROXIMATE = (
    " - tokenizer: SentencePiece with a table of normalized characters. `transformers` applies the table to whole\n"
    "   characters as a reader sees them, SentencePiece to their parts: the ids may differ where a text has combining\n"
    "   marks without a composed form, joiners, half-width kana with marks, or control characters."
)


def model_card(
    config: Mapping[str, Any],
    purpose: str,
    tokenizer: bool,
    is_approximate: bool,
    folders: list[Path],
) -> str:
    """The text; `folders` are where the data's manifest and the scores of the checkpoint may lie.

    `is_approximate`: the tokenizer gives some texts other ids than lln_fairseq does.
    """
    auto = f"AutoModel{purpose}"
    trusted = ", trust_remote_code=True" if "auto_map" in config else ""
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {PIPELINES[purpose]}",
        "tags: [lln_fairseq, roberta]",
        "---",
        "",
    ]
    lines += ["# A RoBERTa of lln_fairseq", "", _about(config), "", "## Use", ""]
    lines += [f"    from transformers import {'AutoTokenizer, ' if tokenizer else ''}{auto}", ""]
    lines += [f"    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY{trusted})"] if tokenizer else []
    lines += [f"    model = {auto}.from_pretrained(DIRECTORY{trusted})", ""]
    lines += ["## What it is", ""]
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    lines += [f" - {key.replace('_', ' ')}: {config[key]}" for key in sizes]
    lines += [f" - longest sequence: {config['max_position_embeddings'] - 2} tokens"]
    if labels := config.get("id2label"):
        lines += [f" - labels: {', '.join(labels.values())}"]
    lines += [APPROXIMATE] if is_approximate else []
    lines += _data(folders) + _scores(folders)
    lines += ["", "## Licence", "", "To be stated by whoever publishes this model.", ""]
    return "\n".join(lines)


def _about(config: Mapping[str, Any]) -> str:
    if "attention" not in config:
        return "Its attention is softmax: it is a RoBERTa like any other and needs no code of its own."
    keys = ("mix", "block_size", "scope", "constants", "gain", "alpha", "beta")
    options = ", ".join(f"{key} {config[key]}" for key in keys if config.get(key) is not None)
    name = config["attention"]
    return f"Its attention is `{name}`, Linear Log-Normal attention ({PAPER}), at linear cost: {options}."


def _data(folders: list[Path]) -> list[str]:
    """What the data's manifest says of its sources."""
    content = _first(folders, MANIFEST)
    sources = content.get("sources")
    names = [str(source["name"]) for source in sources or () if isinstance(source, dict) and "name" in source]
    return [f" - data: {', '.join(names)}"] if names else []


def _scores(folders: list[Path]) -> list[str]:
    numbers = {key: value for key, value in _first(folders, SCORES).items() if isinstance(value, int | float)}
    return [f" - on the validation set: {', '.join(f'{k} {v:g}' for k, v in numbers.items())}"] if numbers else []


def _first(folders: list[Path], name: str) -> dict[str, Any]:
    for folder in folders:
        if (folder / name).is_file():
            try:
                content = json.loads((folder / name).read_text(encoding="utf-8"))
            except ValueError as error:
                raise InputError(f"{folder / name} cannot be read: {error}") from error
            return content if isinstance(content, dict) else {}
    return {}
