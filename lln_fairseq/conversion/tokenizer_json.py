"""tokenizer.json, the one file of Hugging Face's tokenizers: read, written from older files, renumbered. JSON alone."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# fairseq's special symbols and what else they are called.
SPECIAL = {
    "<s>": ("<s>", "[CLS]"), "<pad>": ("<pad>", "[PAD]"), "</s>": ("</s>", "[SEP]"), "<unk>": ("<unk>", "[UNK]"),
    "<mask>": ("<mask>", "[MASK]"),
}  # fmt: skip


def token_ids(content: Mapping[str, Any]) -> dict[str, int]:
    """The id of every token, the added ones included. Raises: KeyError, TypeError, ValueError where it is damaged."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, Mapping):
        ids = {str(token): int(number) for token, number in vocabulary.items()}
    else:  # Unigram: [[piece, score], ...] in the order of the ids
        ids = {str(piece): number for number, (piece, _) in enumerate(vocabulary)}
    return ids | {str(token["content"]): int(token["id"]) for token in content.get("added_tokens") or ()}


def special_token(ids: Mapping[str, int], name: str) -> str | None:
    """What this tokenizer calls fairseq's `name`; None if it has no such token."""
    return next((token for token in SPECIAL[name] if token in ids), None)


def byte_level_bpe(ids: Mapping[str, int], merges: Sequence[str]) -> dict[str, Any]:
    """That of GPT-2 and RoBERTa. ids: token, in GPT-2's letters, to id; merges: "left right", in their order."""
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": dict(ids), "merges": list(merges),
    }  # fmt: skip
    bytes_to_letters = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return document(
        ids,
        model,
        pre_tokenizer={**bytes_to_letters, "add_prefix_space": False},
        decoder={**bytes_to_letters, "add_prefix_space": True},
    )


def word_piece(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the tokenizer of BERT, which takes case and accents away."""
    unknown = special_token(ids, "<unk>")
    model = {
        "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": dict(ids),
    }  # fmt: skip
    normalizer = {
        "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
        "lowercase": True,
    }  # fmt: skip
    return document(
        ids,
        model,
        normalizer=normalizer,
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def document(ids: Mapping[str, int], model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """A whole tokenizer.json; the special tokens are those of SPECIAL that there are ids for."""
    tokens = {name: token for name in SPECIAL if (token := special_token(ids, name))}
    added = [
        {"id": ids[token], "content": token, "single_word": False, "lstrip": name == "<mask>", "rstrip": False,
         "normalized": False, "special": True}
        for name, token in tokens.items()
    ]  # fmt: skip
    document: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None}
    document["added_tokens"] = sorted(added, key=lambda token: token["id"])
    document |= {"normalizer": None, "pre_tokenizer": None, "post_processor": sentence_form(ids), "decoder": None}
    return document | parts | {"model": model}


def sentence_form(ids: Mapping[str, int]) -> dict[str, Any] | None:
    """<s> a </s>, and <s> a </s> </s> b </s> for a pair, as our tasks have it; None without these tokens."""
    first, last = special_token(ids, "<s>"), special_token(ids, "</s>")
    if first is None or last is None:
        return None
    return {
        "type": "RobertaProcessing", "sep": [last, ids[last]], "cls": [first, ids[first]], "trim_offsets": True,
        "add_prefix_space": False,
    }  # fmt: skip


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """The file's bytes."""
    return json.dumps(content, ensure_ascii=False, indent=1).encode()
