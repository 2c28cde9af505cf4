"""Build and read the content of tokenizer.json, the single-file format of Hugging Face's tokenizers library.

The functions work on the parsed JSON and do not need the library.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# For each of fairseq's special symbols, the tokens that tokenizers use for it. The first that exists is taken.
SPECIAL = {
    "<s>": ("<s>", "[CLS]"),
    "<pad>": ("<pad>", "[PAD]"),
    "</s>": ("</s>", "[SEP]"),
    "<unk>": ("<unk>", "[UNK]"),
    "<mask>": ("<mask>", "[MASK]"),
}


def token_ids(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of every token in the content of a tokenizer.json. Those of added tokens take precedence.

    Damaged content raises KeyError, TypeError or ValueError.
    """
    vocabulary = content["model"]["vocab"]
    ids = {}
    if isinstance(vocabulary, Mapping):
        for token, number in vocabulary.items():
            ids[str(token)] = int(number)
    else:  # a unigram model lists [piece, score] in the order of the ids
        for number, (piece, _) in enumerate(vocabulary):
            ids[str(piece)] = number
    for token in content.get("added_tokens") or ():
        ids[str(token["content"])] = int(token["id"])
    return ids


def special_token(ids: Mapping[str, int], name: str) -> str | None:
    """Return the token for one of fairseq's special symbols, such as "[CLS]" for "<s>"; None if there is none."""
    for token in SPECIAL[name]:
        if token in ids:
            return token
    return None


def byte_level_bpe(ids: Mapping[str, int], merges: Sequence[str]) -> dict[str, Any]:
    """Return the content of the tokenizer.json of a byte-level BPE, as GPT-2 and RoBERTa use it.

    It adds <s> and </s> to every text if `ids` has them, but no space in front of a text. `ids` are those of all
    tokens, spelled in GPT-2's alphabet, in which one character stands for one byte. `merges` are pairs "left right" in
    the order in which they are applied.
    """
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(ids),
        "merges": list(merges),
    }
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return document(
        ids,
        model,
        pre_tokenizer={**byte_level, "add_prefix_space": False},
        decoder={**byte_level, "add_prefix_space": True},
    )


def document(
    ids: Mapping[str, int],
    model: dict[str, Any],
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the complete content of a tokenizer.json, from its parts, which are not copied. None is null.

    `ids` are those of all tokens. Tokens for fairseq's special symbols are marked as special, and the post-processor is
    `sentence_processor`.
    """
    added_tokens = []
    for name in SPECIAL:
        token = special_token(ids, name)
        if token is not None:
            added_tokens.append(
                {
                    "id": ids[token],
                    "content": token,
                    "single_word": False,
                    "lstrip": name == "<mask>",
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added_tokens, key=lambda token: token["id"]),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": sentence_processor(ids),
        "decoder": decoder,
        "model": model,
    }


def prepend_normalizer(step: Mapping[str, Any], normalizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a normalizer that first takes a step, and then makes the changes of `normalizer`, none if it is None."""
    steps = [step]
    if normalizer is not None:
        if normalizer["type"] == "Sequence":
            steps += normalizer["normalizers"]
        else:
            steps.append(normalizer)
    return {"type": "Sequence", "normalizers": steps}


def sentence_processor(ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the post-processor, the part of tokenizer.json that adds special tokens to an encoded text.

    A text A becomes <s> A </s>. A pair of texts A and B becomes <s> A </s> </s> B </s>. The tasks of this project use
    the same format. The result is None if the tokenizer has no token for <s> or </s>.
    """
    first = special_token(ids, "<s>")
    last = special_token(ids, "</s>")
    if first is None or last is None:
        return None
    return {
        "type": "RobertaProcessing",
        "sep": [last, ids[last]],
        "cls": [first, ids[first]],
        "trim_offsets": True,
        "add_prefix_space": False,
    }


def single_separator_processor(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the post-processor for pairs `<s> A </s> B </s>`, in which B has the token type 1.

    `ids` are those of every token. Raises KeyError if there is none for <s> or </s>.
    """
    processor: dict[str, Any] = {"type": "BertProcessing"}
    for role, name in (("sep", "</s>"), ("cls", "<s>")):
        token = special_token(ids, name) or name
        processor[role] = [token, ids[token]]
    return processor


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """Return JSON content as the bytes of a file, indented, in UTF-8."""
    return json.dumps(content, ensure_ascii=False, indent=1).encode()
