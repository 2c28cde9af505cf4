"""The tokenizer of a directory of Hugging Face as data_prep wants it, and the order of the embedding that goes with it.

fairseq's ids are <s> <pad> </s> <unk>, the symbols of dict.txt, <mask>. dict.txt names the symbols by the tokenizer's
own ids in decimal (tokenizer.json), or by SentencePiece's pieces (XLM-R), which is what data/tokenizers.py expects
of the two kinds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.conversion.directory import read_json
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import MASK, SPECIAL_SYMBOLS
from lln_fairseq.data.tokenizers import TOKENIZER_FILES, make_tokenizer
from lln_fairseq.data.vocabulary import Vocabulary
from lln_fairseq.errors import InputError, first_line

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
PIECES = "sentencepiece.bpe.model"  # XLM-R's
PIECE_OFFSET = 1  # XLM-R's id of a SentencePiece id, from the first piece that is no control symbol on

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = "additional_special_tokens"
FLAGS = ("single_word", "lstrip", "rstrip")
# The classes of transformers that are read as transformers reads them; those of BERT set its normalizer again.
CLASSES = {"bert": "BertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer"}
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
ROBERTA_CLASSES = ("RobertaTokenizer", "LongformerTokenizer", "BartTokenizer", "GPT2Tokenizer")
KNOWN_CLASSES = (*BERT_CLASSES, *ROBERTA_CLASSES, "XLMRobertaTokenizer", "PreTrainedTokenizer")


@dataclass(frozen=True)
class SourceVocabulary:
    """`order`: the row of the source's embedding for each of fairseq's ids; `symbols`, `files`: as in Encoder."""

    order: list[int]
    symbols: list[str]
    files: dict[str, bytes]


def read_vocabulary(folder: Path, rows: int, config: Mapping[str, Any]) -> SourceVocabulary:
    """Return the tokenizer in `folder` as transformers' AutoTokenizer loads it.

    Args:
        rows: the number of rows of the embedding.
        config: the content of config.json.

    Raises: InputError where there is none, where it is damaged, and for the first token that does not fit.
    """
    ids = _ids(folder)
    if ids is None:
        raise InputError(f"{folder} has no tokenizer: neither {TOKENIZER}, {PIECES}, vocab.txt, nor vocab.json")
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    name = settings.get("tokenizer_class") or config.get("tokenizer_class") or CLASSES[config["model_type"]]
    class_name = str(name).removesuffix("Fast")
    if class_name not in KNOWN_CLASSES:
        raise InputError(f"{folder}: its tokenizer is a {name}, and may be one of {', '.join(KNOWN_CLASSES)}")
    document = b""
    try:
        added = _added_tokens(folder, settings)
        if not _is_pieces_alone(folder, ids, added):
            content = _document(folder, settings, class_name, added)
            ids |= tokenizer_json.token_ids(content)
            document = _as_bytes(content, folder / TOKENIZER)
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: the tokenizer or its {SETTINGS} is damaged: {first_line(error)}") from error
    beyond = min(((number, token) for token, number in ids.items() if not 0 <= number < rows), default=None)
    if beyond:
        raise InputError(f"{folder}: the tokenizer has the token {beyond[1]!r} with id {beyond[0]}, but the "
                         f"embedding has {rows} rows")  # fmt: skip
    special = []
    for name in (*SPECIAL_SYMBOLS, MASK):
        token = tokenizer_json.special_token(ids, name)
        if token is None:
            raise InputError(f"{folder}: the tokenizer has no {' or '.join(tokenizer_json.SPECIAL[name])}")
        special.append(ids[token])
    if len(set(special)) != len(special):
        raise InputError(f"{folder}: the tokenizer has special tokens with the same id: {special}")
    padding = config.get("pad_token_id")
    if padding not in (None, special[1]):
        raise InputError(f"{folder}: padding is {special[1]} to the tokenizer, and {padding} in config.json")
    others = sorted(set(range(rows)) - set(special))
    order = [*special[:-1], *others, special[-1]]
    if not document:
        return SourceVocabulary(order, _piece_symbols(ids, others), {"spm.model": (folder / PIECES).read_bytes()})
    return SourceVocabulary(order, [str(row) for row in others], {TOKENIZER: document})


def _ids(folder: Path) -> dict[str, int] | None:
    """The id of every token, after a comparison of the files that say so; None without a tokenizer."""
    found: dict[str, dict[str, int]] = {}
    for name, read in _READERS.items():
        if (folder / name).is_file():
            try:
                found[name] = read(folder / name)
            except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
                raise InputError(f"{folder / name} is damaged: {first_line(error)}") from error
    if not found:
        return None
    (first, ids), *others = found.items()
    for name, theirs in others:  # tokens that were added later are in tokenizer.json alone
        for token, number in theirs.items():
            if ids.get(token, number) != number:
                raise InputError(
                    f"{folder}: {token!r} is {ids[token]} in {first} and {number} in {name}; the tokenizer is not one"
                )
    return {token: number for part in reversed(found.values()) for token, number in part.items()}


def _from_lines(path: Path) -> dict[str, int]:
    return {line: number for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))}


def _from_json(path: Path) -> dict[str, int]:
    return {str(token): int(number) for token, number in read_json(path).items()}


def _from_pieces(path: Path) -> dict[str, int]:
    """XLM-R's ids of the pieces of a SentencePiece model, which begins with <unk> <s> </s>, and of <mask>, the last."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=path.read_bytes())
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    if pieces[:3] != ["<unk>", "<s>", "</s>"]:
        raise ValueError(f"its first pieces are {' '.join(pieces[:3])}, not <unk> <s> </s>")
    ids = {piece: number + PIECE_OFFSET for number, piece in enumerate(pieces)}
    return ids | {name: number for number, name in enumerate(SPECIAL_SYMBOLS)} | {MASK: len(pieces) + PIECE_OFFSET}


_READERS = {
    PIECES: _from_pieces,
    TOKENIZER: lambda path: tokenizer_json.token_ids(read_json(path)),
    "vocab.json": _from_json,
    "vocab.txt": _from_lines,
}


def _piece_symbols(ids: Mapping[str, int], rows: list[int]) -> list[str]:
    """The pieces of these rows; rows without a piece get names that no text has."""
    pieces = {number: token for token, number in ids.items()}
    symbols = [pieces.get(row, f"madeupword{row}") for row in rows]
    for symbol in symbols:
        if len(symbol.split()) != 1 or symbol != symbol.strip():
            raise InputError(f"the piece {symbol!r} cannot stand in a fairseq dictionary")
    return symbols


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that the files beside the vocabulary add, in transformers' order.

    Each is an entry of tokenizer.json's `added_tokens`; its id is None where no file states it.
    """
    special = [settings.get(role) for role in ROLES] + list(settings.get(ADDITIONAL) or ())
    tokens: dict[int, Any] = {}
    if "added_tokens_decoder" in settings:  # transformers then ignores the older files
        tokens = {int(number): token for number, token in settings["added_tokens_decoder"].items()}
    else:
        if (folder / SPECIAL_MAP).is_file():
            older = read_json(folder / SPECIAL_MAP)
            special += [older.get(role) for role in ROLES] + list(older.get(ADDITIONAL) or ())
        if (folder / ADDED).is_file():
            tokens = {number: token for token, number in _from_json(folder / ADDED).items()}
    named = [_entry(token, None, True) for token in special if token is not None]
    names = {token["content"] for token in named}
    return [_entry(tokens[number], number, _content(tokens[number]) in names) for number in sorted(tokens)] + named


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _entry(token: str | Mapping[str, Any], number: int | None, special: bool) -> dict[str, Any]:
    flags: Mapping[str, Any] = {} if isinstance(token, str) else token
    normalized = flags.get("normalized", not (special or flags.get("special")))
    content = {name: bool(flags.get(name, False)) for name in FLAGS}
    return {"id": number, "content": _content(token), **content, "normalized": normalized, "special": False}


def _is_pieces_alone(folder: Path, ids: Mapping[str, int], added: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the SentencePiece model in `folder` has every token.

    Raises: InputError if it lacks one that no tokenizer.json has either.
    """
    if not (folder / PIECES).is_file():
        return False
    pieces = _from_pieces(folder / PIECES)
    missing = [token for token in [*ids, *(token["content"] for token in added)] if token not in pieces]
    if missing and not (folder / TOKENIZER).is_file():
        raise InputError(f"{folder}: {PIECES} lacks the added token {missing[0]!r}: save it with a {TOKENIZER} "
                         "(AutoTokenizer's save_pretrained)")  # fmt: skip
    return not missing


def _document(
    folder: Path, settings: Mapping[str, Any], class_name: str, added: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return tokenizer.json, or the same made of the older files, as this class of transformers changes it."""
    if (folder / TOKENIZER).is_file():
        content = read_json(folder / TOKENIZER)
    elif (folder / "vocab.txt").is_file():
        content = tokenizer_json.word_piece(_from_lines(folder / "vocab.txt"))
    elif (folder / "merges.txt").is_file():
        ids = _from_json(folder / "vocab.json")
        content = tokenizer_json.byte_level_bpe(ids, _merges(folder / "merges.txt", ids))
    else:
        raise InputError(f"{folder} has vocab.json without merges.txt")
    normalizer = content.get("normalizer") or {}
    if class_name in BERT_CLASSES and normalizer.get("type") == "BertNormalizer":
        normalizer["lowercase"] = bool(settings.get("do_lower_case", True))
        normalizer["strip_accents"] = settings.get("strip_accents")
        normalizer["handle_chinese_chars"] = bool(settings.get("tokenize_chinese_chars", True))
    pre_tokenizer = content.get("pre_tokenizer") or {}
    if pre_tokenizer.get("type") == "ByteLevel":
        pre_tokenizer["add_prefix_space"] = bool(settings.get("add_prefix_space", False))
    _add_tokens(content, added, folder)
    return content


def _as_bytes(content: Mapping[str, Any], source: Path) -> bytes:
    """Return the bytes of a tokenizer.json; those of `source` if nothing has changed, so that checksums agree."""
    if source.is_file() and read_json(source) == content:
        return source.read_bytes()
    return tokenizer_json.as_bytes(content)


def _add_tokens(content: dict[str, Any], added: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Add tokens to a tokenizer.json, with the ids that Hugging Face's library gives them.

    Only fairseq's special tokens stay special: data_prep has no symbol for a special token.
    """
    ids = tokenizer_json.token_ids(content)
    tokens = list(content.get("added_tokens") or ())
    present = {token["content"] for token in tokens}
    for token in added:
        name = token["content"]
        number = ids.setdefault(name, max(ids.values()) + 1)
        if token["id"] not in (None, number):
            raise InputError(
                f"{folder}: the added token {name!r} has id {token['id']}, but transformers gives it {number}"
            )
        if name not in present:
            tokens.append({**token, "id": number})
            present.add(name)
    fairseq_names = {name for names in tokenizer_json.SPECIAL.values() for name in names}
    tokens.sort(key=lambda token: token["id"])
    for token in tokens:
        token["special"] = token["content"] in fairseq_names
    content["added_tokens"] = tokens


def _merges(path: Path, ids: Mapping[str, int]) -> list[str]:
    """The merges of a byte-level BPE. Raises: InputError for the first that makes no token."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    merges = [line for line in lines if line and not line.startswith("#version")]
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2 or not {*parts, "".join(parts)} <= ids.keys():
            raise InputError(f"{path} does not fit vocab.json, first at {merge[:80]!r}")
    return merges


def check_dictionary(files: Mapping[str, bytes], path: Path) -> None:
    """Raise InputError if data_prep cannot use these files of a tokenizer with the dict.txt at `path`."""
    for kind, names in TOKENIZER_FILES.items():
        if names[0] in files:
            try:
                Vocabulary(make_tokenizer(kind, files), path.read_text(encoding="utf-8"))
            except DataError as error:
                raise InputError(f"{path}: {error}") from error
