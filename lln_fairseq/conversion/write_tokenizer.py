"""Convert the tokenizer of the training data to files that transformers reads, with the ids of the dictionary.

GPT-2's byte-level BPE and SentencePiece models (BPE, unigram and characters) become a tokenizer.json. An existing
tokenizer.json gets new ids.
"""

import base64
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any

from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.conversion.read_tokenizer import PROBES, TOKENIZER
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.text.pairs import BERT_PAIRS, ROBERTA_PAIRS
from lln_fairseq.text.read_lines import LINE_BREAKS
from lln_fairseq.text.samples import as_line
from lln_fairseq.text.special_symbols import BOS, EOS, MASK, NUM_SPECIAL, SPECIAL_SYMBOLS, UNKNOWN
from lln_fairseq.text.tokenizers import TOKENIZER_FILES, SentencePieceTokenizer
from lln_fairseq.text.vocabulary import Vocabulary

# The roles that fairseq's special symbols have in transformers.
ROLES = {
    "<s>": ("bos_token", "cls_token"),
    "<pad>": ("pad_token",),
    "</s>": ("eos_token", "sep_token"),
    "<unk>": ("unk_token",),
    MASK: ("mask_token",),
}
NEVER = -1e4  # the unigram score of a piece that must never be chosen
# The characters that str.strip removes, for use inside the brackets of a regular expression.
SPACES = "\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
UNKNOWN_TEXT = "\U0010fffd"  # a private-use character, which becomes <unk>
SENTENCEPIECE_UNIGRAM = 1
SENTENCEPIECE_BPE = 2
SENTENCEPIECE_CHAR = 4
# SentencePiece adds the scores of pieces in float32, and transformers in float64.
FLOAT32_ROUNDING = 1e-6

# Lines of the model card about texts that get other ids from transformers.
NORMALIZATION = (
    " - tokenizer: SentencePiece with a table that normalizes characters. `transformers` applies the table to whole\n"
    "   grapheme clusters, SentencePiece to single code points. The ids may differ if a text has combining marks\n"
    "   without a composed form, joiners, half-width kana with marks, or control characters."
)
TIES = (
    " - tokenizer: SentencePiece unigram. If a word can be split in two ways whose scores differ only by rounding,\n"
    "   `transformers` may choose the other one (at most 7 in a million tokens of English Wikipedia)."
)


def find_tokenizer(directories: Sequence[Path]) -> dict[str, bytes]:
    """Return the contents of the files, by name, of the first tokenizer in these directories, if any."""
    for directory in directories:
        for names in TOKENIZER_FILES.values():
            if all((directory / name).is_file() for name in names):
                return {name: (directory / name).read_bytes() for name in names}
    return {}


def convert_tokenizer(vocabulary: Vocabulary, positions: int, pair_form: str = ROBERTA_PAIRS) -> dict[str, bytes]:
    """Convert a tokenizer to the files that AutoTokenizer needs, by name. Its tokens get the dictionary's ids.

    A token that the dictionary lacks gets an id behind the dictionary's, which must have the embedding of <unk>: the
    library cannot give several tokens the same id. `positions` is the longest sequence of the model, and `pair_form`
    one of PAIR_FORMS. UserError is raised if the tokenizer is damaged, or the result gives some texts other ids than
    `vocabulary`.
    """
    files = vocabulary.tokenizer.files
    ids = {symbol: NUM_SPECIAL + number for number, symbol in enumerate(vocabulary.symbols)}
    ids |= {symbol: number for number, symbol in enumerate(SPECIAL_SYMBOLS)}
    ids |= {symbol: vocabulary.size + number for number, symbol in enumerate(vocabulary.missing)}
    try:
        if isinstance(vocabulary.tokenizer, SentencePieceTokenizer):
            content = _convert_sentencepiece(vocabulary.tokenizer, ids)
        elif "encoder.json" in files:
            content = _convert_gpt2(files, ids)
        else:
            content = _renumber_tokens(json.loads(files[TOKENIZER]), ids)
        join_lines = _replace({"Regex": LINE_BREAKS.pattern}, " ")  # as `lln-fairseq predict` does
        content["normalizer"] = tokenizer_json.prepend_normalizer(join_lines, content.get("normalizer"))
        new_ids = tokenizer_json.token_ids(content)
        if pair_form != ROBERTA_PAIRS:
            content["post_processor"] = tokenizer_json.single_separator_processor(new_ids)
    except KeyError as error:
        raise UserError(f"the tokenizer does not fit the dictionary, which lacks {error}") from error
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"the tokenizer is damaged: {first_line(error)}") from error
    special_tokens = {}
    for name, roles in ROLES.items():
        for role in roles:
            special_tokens[role] = tokenizer_json.special_token(new_ids, name)
    converted = tokenizer_json.as_bytes(content)
    _check_same_ids(converted, vocabulary)
    pre_tokenizer = content.get("pre_tokenizer") or {}
    input_names = ["input_ids", "attention_mask"]
    if pair_form == BERT_PAIRS:
        input_names.append("token_type_ids")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "model_input_names": input_names,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": bool(pre_tokenizer.get("add_prefix_space", False)),
        **special_tokens,
    }
    return {
        TOKENIZER: converted,
        "tokenizer_config.json": tokenizer_json.as_bytes(config),
        "special_tokens_map.json": tokenizer_json.as_bytes(special_tokens),
    }


def count_ids(files: Mapping[str, bytes]) -> int:
    """Return the number of ids, from 0 to the largest, of a tokenizer that `convert_tokenizer` returned."""
    return max(tokenizer_json.token_ids(json.loads(files[TOKENIZER])).values()) + 1


def _check_same_ids(converted: bytes, vocabulary: Vocabulary) -> None:
    """Raise UserError if a tokenizer.json gives PROBES, or texts of the dictionary's symbols, other ids.

    The texts may contain line feeds, which the piece of a byte can stand for.
    """
    from tokenizers import Tokenizer  # an optional dependency

    tokenizer = vocabulary.tokenizer
    symbols = [symbol for symbol in vocabulary.symbols if symbol != MASK and tokenizer.can_give(symbol)]
    parts = [tokenizer.symbol_text(symbol) for symbol in symbols]
    # AutoTokenizer reads the name of a special token inside a text. CamemBERT has symbols such as <s>NOTUSED.
    names = [*chain.from_iterable(tokenizer_json.SPECIAL.values())]
    parts = [part for part in parts if not any(name in part for name in names)]
    if _has_normalization_table(tokenizer.files):
        parts = [part for part in parts if not any(unicodedata.category(char)[0] in "MC" for char in part)]
    texts = [*PROBES]
    for first in range(0, len(parts), 10):
        texts.append("".join(parts[first : first + 10]).strip())
        texts.append(" ".join(parts[first : first + 10]).strip())
    library = Tokenizer.from_str(converted.decode())
    lines = [as_line(text) for text in texts]  # as `lln-fairseq predict` does; tokenizer.json does it itself
    for text, encoding, ids in zip(texts, library.encode_batch(texts), vocabulary.encode(lines), strict=True):
        actual = [UNKNOWN if number >= vocabulary.size else number for number in encoding.ids]
        expected = [BOS, *ids.tolist(), EOS]
        if actual != expected and not _is_tie(vocabulary, actual, expected):
            raise UserError(
                f"the tokenizer cannot be exported: AutoTokenizer would give {text!r} the ids {actual}, but the "
                f"training data has {expected}"
            )


def _is_tie(vocabulary: Vocabulary, first: Sequence[int], second: Sequence[int]) -> bool:
    """Return True if a unigram model gives two splits of a text into pieces the same score, but for rounding."""
    tokenizer = vocabulary.tokenizer
    if not isinstance(tokenizer, SentencePieceTokenizer) or not _is_unigram(tokenizer.files):
        return False
    texts = []
    scores = []
    for ids in (first, second):
        pieces = [vocabulary.symbols[number - NUM_SPECIAL] for number in ids if number >= NUM_SPECIAL]
        texts.append("".join(pieces))
        scores.append(sum(tokenizer.processor.get_score(tokenizer.processor.piece_to_id(piece)) for piece in pieces))
    return texts[0] == texts[1] and math.isclose(scores[0], scores[1], rel_tol=FLOAT32_ROUNDING)


def describe_differences(files: Mapping[str, bytes]) -> list[str]:
    """Return lines for the model card: which texts get other ids from the exported tokenizer than from the original.

    `files` are those of the original. Only SentencePiece models have such texts. Raises UserError if spm.model is
    damaged.
    """
    lines = []
    if _has_normalization_table(files):
        lines.append(NORMALIZATION)
    if _is_unigram(files):
        lines.append(TIES)
    return lines


def _has_normalization_table(files: Mapping[str, bytes]) -> bool:
    if "spm.model" not in files:
        return False
    return bool(_parse_sentencepiece(files["spm.model"]).normalizer_spec.precompiled_charsmap)


def _is_unigram(files: Mapping[str, bytes]) -> bool:
    if "spm.model" not in files:
        return False
    return _parse_sentencepiece(files["spm.model"]).trainer_spec.model_type == SENTENCEPIECE_UNIGRAM


def _special_ids(ids: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of fairseq's special symbols and <mask>. Raises KeyError if the dictionary lacks <mask>."""
    return {name: ids[name] for name in (*SPECIAL_SYMBOLS, MASK)}


def _convert_gpt2(files: Mapping[str, bytes], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of tokenizer.json for GPT-2's BPE.

    `ids` maps the symbols of the dictionary to their ids. The symbol of a token is its GPT-2 id in decimal. Raises
    KeyError if the dictionary lacks a token or a special symbol.
    """
    new_ids = {token: ids[str(number)] for token, number in json.loads(files["encoder.json"]).items()}
    merges = files["vocab.bpe"].decode().split("\n")[1:-1]  # the first line is the version
    return tokenizer_json.byte_level_bpe(new_ids | _special_ids(ids), merges)


def _renumber_tokens(content: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of a tokenizer.json with the ids of the dictionary, without truncation, padding and dropout.

    `ids` maps the symbols of the dictionary to their ids. The symbol of a token is its id in `content` in decimal,
    except for fairseq's special symbols. `content` is not changed. Raises KeyError if the dictionary lacks a token.
    """
    old_ids = tokenizer_json.token_ids(content)
    special_names = {tokenizer_json.special_token(old_ids, name): name for name in (*SPECIAL_SYMBOLS, MASK)}
    new_ids = {}
    for token, number in old_ids.items():
        if token in special_names:
            new_ids[token] = ids[special_names[token]]
        else:
            new_ids[token] = ids[str(number)]
    model = dict(content["model"])
    if "dropout" in model:
        model["dropout"] = None
    # The vocabulary gets the added tokens too: the tokenizers library would give them the next free ids.
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = new_ids
    else:
        rows = {number: [token, NEVER] for token, number in new_ids.items()}
        rows |= {new_ids[piece]: [piece, score] for piece, score in model["vocab"]}
        model["unk_id"] = new_ids[str(tokenizer_json.special_token(old_ids, "<unk>"))]
        model["vocab"] = _fill_unigram_rows(rows)
    added_tokens = [{**token, "id": new_ids[token["content"]]} for token in content.get("added_tokens") or ()]
    return {
        **content,
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added_tokens, key=lambda token: token["id"]),
        "post_processor": tokenizer_json.sentence_processor(new_ids),
        "model": model,
    }


def _fill_unigram_rows(rows: Mapping[int, list[Any]]) -> list[list[Any]]:
    """Return the rows [piece, score] of a unigram vocabulary in the order of their ids.

    `rows` maps ids to rows. An id that is missing gets a row with the filler piece "madeupwordN" and the score NEVER.
    """
    return [rows.get(row, [f"madeupword{row}", NEVER]) for row in range(max(rows) + 1)]


def _parse_sentencepiece(data: bytes) -> Any:
    """Return the protobuf message of a SentencePiece model. Raises UserError if it is damaged."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf creates it on import
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf has exceptions of its own
        raise UserError(f"spm.model is damaged: {first_line(error)}") from error
    return proto


def _convert_sentencepiece(tokenizer: SentencePieceTokenizer, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of tokenizer.json for a SentencePiece model with these ids of all symbols of the dictionary.

    KeyError is raised if they lack a piece, and UserError if the model is none of BPE, unigram and characters.
    """
    proto = _parse_sentencepiece(tokenizer.files["spm.model"])
    piece_types = proto.SentencePiece
    scores = {}
    normal_scores = {}  # without pieces for single bytes and pieces that the user defined
    for piece in proto.pieces:
        is_separator = piece.piece.isspace() and tokenizer.characters is not None
        if piece.type not in (piece_types.CONTROL, piece_types.UNKNOWN) and not is_separator:
            scores[piece.piece] = piece.score
        if piece.type == piece_types.NORMAL:
            normal_scores[piece.piece] = piece.score
    new_ids = {piece: ids[piece] for piece in scores} | _special_ids(ids)
    normalizer = _sentencepiece_normalizer(proto)
    others = [symbol for symbol in ids if symbol not in new_ids and tokenizer.can_give(symbol)]  # text without a piece
    new_ids |= {symbol: ids[symbol] for symbol in others}
    byte_fallback = bool(proto.trainer_spec.byte_fallback)
    pre_tokenizer = None
    if tokenizer.characters is not None:
        normalizer["normalizers"].append(_replace({"Regex": _unknown_text(tokenizer.characters, others)}, UNKNOWN_TEXT))
        pre_tokenizer = {"type": "Split", "pattern": {"Regex": f"[{SPACES}]+"}, "behavior": "Removed", "invert": False}
    if proto.trainer_spec.model_type in (SENTENCEPIECE_BPE, SENTENCEPIECE_CHAR):  # characters: a BPE without merges
        parts = set()  # a BPE makes a symbol from its first character on
        for symbol in others:
            parts |= {*symbol, *(symbol[:end] for end in range(1, len(symbol) + 1))}
        for number, part in enumerate(sorted(parts - set(new_ids)), start=max(ids.values()) + 1):
            new_ids[part] = number
        model: dict[str, Any] = {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": new_ids,
            "merges": _find_merges(normal_scores | dict.fromkeys(sorted(parts), 0.0)),
        }
    elif proto.trainer_spec.model_type == SENTENCEPIECE_UNIGRAM:
        scores |= dict.fromkeys(others, -1.0)  # below 0, so that one symbol is better than several
        rows = {number: [piece, scores.get(piece, 0.0)] for piece, number in new_ids.items()}
        model = {
            "type": "Unigram",
            "unk_id": new_ids["<unk>"],
            "vocab": _fill_unigram_rows(rows),
            "byte_fallback": byte_fallback,
        }
        if byte_fallback:
            # A text that contains <0x41> literally is split there, or it would become the piece of that byte.
            pre_tokenizer = {
                "type": "Split",
                "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"},
                "behavior": "MergedWithPrevious",
                "invert": False,
            }
    else:
        raise UserError(
            "spm.model is neither a BPE, a unigram nor a character model: the tokenizer cannot be exported, since "
            "transformers has no other SentencePiece models"
        )
    return tokenizer_json.document(
        new_ids,
        model,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        decoder=_sentencepiece_decoder(),
    )


def _unknown_text(characters: Set[str], symbols: Sequence[str]) -> str:
    """Return a regular expression for text of characters without a piece that is none of the symbols."""
    unknown = rf"[^{SPACES}{_escape(''.join(sorted(characters)))}]"
    alternatives = "|".join(_escape(symbol) for symbol in symbols)
    return rf"(?={unknown})(?<!{unknown})(?!(?:{alternatives})(?!{unknown})){unknown}+"


def _escape(text: str) -> str:
    """Return a regular expression for a text, in which each character has its code point."""
    return "".join(f"\\x{{{ord(char):X}}}" for char in text)


def _find_merges(scores: Mapping[str, float]) -> list[list[str]]:
    """Return the merges of a BPE: every pair [left, right] of pieces that form a piece when they are joined.

    `scores` has the pieces. Pairs that form a piece with a higher score come first.
    """
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            if left in scores and right in scores:
                merges.append([left, right])
    return merges


def _sentencepiece_normalizer(proto: Any) -> dict[str, Any]:
    """Return the normalizer, the part of tokenizer.json that changes a text before it is split into pieces.

    It first strips a text, as `lln-fairseq predict` does, and then makes the changes that SentencePiece makes.
    SentencePiece writes "▁" for a space.
    """
    spec = proto.normalizer_spec
    steps = [_replace({"Regex": rf"\A[{SPACES}]+|[{SPACES}]+\z"}, "")]
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        if "nfkc" in spec.name:  # Precompiled looks up a letter without the accents that follow it: compose them
            steps.append({"type": "NFC"})
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"\A +"}, ""))
        steps.append(_replace({"Regex": " {2,}"}, " "))
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append(_replace({"String": " "}, "▁"))
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": r"▁+\z"}, ""))  # SentencePiece also removes a "▁" that the text ends with
    return {"type": "Sequence", "normalizers": steps}


def _sentencepiece_decoder() -> dict[str, Any]:
    """Return the decoder, the part of tokenizer.json that joins pieces into text.

    It replaces every "▁" with a space, and removes one space at the start of the text.
    """
    return {
        "type": "Sequence",
        "decoders": [
            _replace({"String": "▁"}, " "),
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }


def _replace(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    """Return a step of a normalizer or decoder. The step replaces each match of `pattern` with the text `content`.

    `pattern` is {"String": text} or {"Regex": regular expression}.
    """
    return {"type": "Replace", "pattern": pattern, "content": content}
