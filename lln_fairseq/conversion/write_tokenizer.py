"""The tokenizer of our data as files that transformers reads, with the ids of our dictionary.

Whatever the tokenizer is, it becomes a tokenizer.json: GPT-2's BPE, SentencePiece (BPE and unigram), and those that are
one already.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.conversion.read_tokenizer import TOKENIZER
from lln_fairseq.data.special_symbols import MASK, SPECIAL_SYMBOLS
from lln_fairseq.data.tokenizers import TOKENIZER_FILES
from lln_fairseq.errors import InputError, first_line

ROLES = {"<s>": ("bos_token", "cls_token"), "<pad>": ("pad_token",), "</s>": ("eos_token", "sep_token"),
         "<unk>": ("unk_token",), MASK: ("mask_token",)}  # fmt: skip
NEVER = -1e4  # the score of a piece that no text has
SPACES = "\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # what str.strip removes
UNIGRAM, BPE = 1, 2  # SentencePiece's numbers


def find_tokenizer(folders: Sequence[Path]) -> dict[str, bytes]:
    """The files of the first tokenizer in these directories; empty where there is none."""
    for folder in folders:
        for names in TOKENIZER_FILES.values():
            if all((folder / name).is_file() for name in names):
                return {name: (folder / name).read_bytes() for name in names}
    return {}


def exported(files: Mapping[str, bytes], symbols: Sequence[str], positions: int) -> dict[str, bytes]:
    """tokenizer.json and what AutoTokenizer wants beside it, for the dictionary with these symbols in this order.

    Raises: InputError for a tokenizer that is damaged or has a token that the dictionary lacks.
    """
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    try:
        if "spm.model" in files:
            content = _sentencepiece(files["spm.model"], ids)
        elif "encoder.json" in files:
            content = _gpt2(files, ids)
        else:
            content = _renumbered(json.loads(files[TOKENIZER]), ids)
        token = {name: tokenizer_json.special_token(tokenizer_json.token_ids(content), name) for name in ROLES}
    except KeyError as error:
        raise InputError(f"the tokenizer does not fit the dictionary, which lacks {error}") from error
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"the tokenizer is damaged: {first_line(error)}") from error
    special = {role: token[name] for name, roles in ROLES.items() for role in roles}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": bool((content.get("pre_tokenizer") or {}).get("add_prefix_space", False)),
        **special,
    }
    return {
        TOKENIZER: tokenizer_json.as_bytes(content),
        "tokenizer_config.json": tokenizer_json.as_bytes(config),
        "special_tokens_map.json": tokenizer_json.as_bytes(special),
    }


def is_approximate(files: Mapping[str, bytes]) -> bool:
    """Return True if Hugging Face's library normalizes some texts otherwise than the SentencePiece model in `files`."""
    return "spm.model" in files and bool(_model_proto(files["spm.model"]).normalizer_spec.precompiled_charsmap)


def _special(ids: Mapping[str, int]) -> dict[str, int]:
    return {name: ids[name] for name in (*SPECIAL_SYMBOLS, MASK)}


def _gpt2(files: Mapping[str, bytes], ids: Mapping[str, int]) -> dict[str, Any]:
    """The dictionary names a token by GPT-2's id."""
    tokens = {token: ids[str(number)] for token, number in json.loads(files["encoder.json"]).items()}
    merges = files["vocab.bpe"].decode().split("\n")[1:-1]
    return tokenizer_json.byte_level_bpe(tokens | _special(ids), merges)


def _renumbered(content: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """The same tokenizer; the dictionary names a token by its id before."""
    before = tokenizer_json.token_ids(content)
    names = {tokenizer_json.special_token(before, name): name for name in (*SPECIAL_SYMBOLS, MASK)}
    now = {token: ids[names[token]] if token in names else ids[str(number)] for token, number in before.items()}
    model = dict(content["model"])
    if "dropout" in model:
        model["dropout"] = None
    # Added tokens go into the vocabulary, else the library gives them the next free ids.
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = now
    else:
        scores = {number: [token, NEVER] for token, number in now.items()}
        scores |= {now[piece]: [piece, score] for piece, score in model["vocab"]}
        model["unk_id"] = now[str(tokenizer_json.special_token(before, "<unk>"))]
        model["vocab"] = [scores.get(row, [f"madeupword{row}", NEVER]) for row in range(max(scores) + 1)]
    added = [{**token, "id": now[token["content"]]} for token in content.get("added_tokens") or ()]
    parts = {"truncation": None, "padding": None, "added_tokens": sorted(added, key=lambda token: token["id"])}
    return {**content, **parts, "post_processor": tokenizer_json.sentence_form(now), "model": model}


def _model_proto(data: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf makes it on import
    try:
        proto.ParseFromString(data)
    except Exception as error:  # of protobuf, which is not ours
        raise InputError(f"spm.model is damaged: {first_line(error)}") from error
    return proto


def _sentencepiece(data: bytes, ids: Mapping[str, int]) -> dict[str, Any]:
    """A SentencePiece model in the library of Hugging Face."""
    proto = _model_proto(data)
    kinds = proto.SentencePiece
    control = (kinds.CONTROL, kinds.UNKNOWN)
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type not in control}
    now = {piece: ids[piece] for piece in scores} | _special(ids)
    normal = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
    bytes_too = bool(proto.trainer_spec.byte_fallback)
    if proto.trainer_spec.model_type == BPE:
        model: dict[str, Any] = {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": bytes_too, "ignore_merges": False,
            "vocab": now, "merges": _merges(normal),
        }  # fmt: skip
    elif proto.trainer_spec.model_type == UNIGRAM:
        rows = {number: [piece, scores.get(piece, 0.0)] for piece, number in now.items()}
        pieces = [rows.get(row, [f"madeupword{row}", NEVER]) for row in range(max(rows) + 1)]
        model = {"type": "Unigram", "unk_id": now["<unk>"], "vocab": pieces, "byte_fallback": bytes_too}
    else:
        raise InputError("spm.model is neither a BPE nor a unigram model")
    document = tokenizer_json.document(now, model, normalizer=_normalizer(proto), decoder=_decoder())
    if model["type"] == "Unigram" and bytes_too:  # a text that spells <0x41> is cut, else it becomes that byte's piece
        pattern = {"Regex": "<(?=0x[0-9A-F]{2}>)"}
        document["pre_tokenizer"] = {
            "type": "Split", "pattern": pattern, "behavior": "MergedWithPrevious", "invert": False
        }  # fmt: skip
    return document


def _merges(scores: Mapping[str, float]) -> list[list[str]]:
    """Every pair of pieces that make a piece, the best piece first."""
    best_first = sorted(scores, key=lambda piece: -scores[piece])
    pairs = ([piece[:cut], piece[cut:]] for piece in best_first for cut in range(1, len(piece)))
    return [pair for pair in pairs if pair[0] in scores and pair[1] in scores]


def _normalizer(proto: Any) -> dict[str, Any]:
    """Return what predict and then SentencePiece do to a text before it is cut; "▁" is SentencePiece's space."""
    spec = proto.normalizer_spec
    steps = [_replace({"String": "\n"}, " "), _replace({"Regex": rf"\A[{SPACES}]+|[{SPACES}]+\z"}, "")]
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        if "nfkc" in spec.name:  # a letter with its accents: Precompiled reads the letter alone
            steps.append({"type": "NFC"})
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"\A +"}, ""))
        steps.append(_replace({"Regex": " {2,}"}, " "))
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append(_replace({"String": " "}, "▁"))
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"▁+\z"}, ""))  # SentencePiece removes a "▁" of the text too
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _decoder() -> dict[str, Any]:
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "type": "Sequence",
        "decoders": [_replace({"String": "▁"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
    }
