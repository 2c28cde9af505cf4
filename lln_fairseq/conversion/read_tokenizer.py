"""Read the tokenizer of a Hugging Face directory in the form that data_prep uses, and match its ids to fairseq's.

fairseq's ids begin with <s> <pad> </s> <unk>, go on with the symbols of dict.txt, and end with <mask>. A symbol of
dict.txt stands for a token. It is the token's id in tokenizer.json, written in decimal, or the token itself if the
tokenizer is a SentencePiece model (XLM-R).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.conversion.directory import CONFIG, read_json
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import MASK, PAD, SPECIAL_SYMBOLS
from lln_fairseq.data.tokenizers import TOKENIZER_FILES, make_tokenizer
from lln_fairseq.data.vocabulary import Vocabulary
from lln_fairseq.errors import InputError, first_line

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
WORDS = "vocab.txt"  # BERT's
BPE_TOKENS = "vocab.json"  # RoBERTa's, with BPE_MERGES
BPE_MERGES = "merges.txt"
PIECES = "sentencepiece.bpe.model"  # XLM-R's
VOCABULARY_FILES = (PIECES, TOKENIZER, BPE_TOKENS, WORDS)  # the files that state the ids of tokens
PIECE_OFFSET = 1  # XLM-R's id of a piece is the id in SentencePiece plus this, except for special pieces

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = "additional_special_tokens"
FLAGS = ("single_word", "lstrip", "rstrip")
# The tokenizer class of transformers for a model type, used if no file names a class.
DEFAULT_CLASSES = {"bert": "BertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer"}
# The supported classes. The classes in BERT_CLASSES replace the settings of the normalizer in tokenizer.json.
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
ROBERTA_CLASSES = ("RobertaTokenizer", "LongformerTokenizer", "BartTokenizer", "GPT2Tokenizer")
KNOWN_CLASSES = (*BERT_CLASSES, *ROBERTA_CLASSES, "XLMRobertaTokenizer", "PreTrainedTokenizer")


@dataclass(frozen=True)
class SourceVocabulary:
    """A tokenizer in data_prep's form, with its ids in the Hugging Face directory.

    Attributes:
        order: for each of fairseq's ids, in order, the id of the same token in the Hugging Face directory. That id is
            also the row of the token in the embedding.
        symbols: the symbols of dict.txt. Symbol i, from 0, has fairseq's id 4 + i.
        files: the contents of the tokenizer's files by the file names that data_prep uses.
    """

    order: list[int]
    symbols: list[str]
    files: dict[str, bytes]


def read_vocabulary(directory: Path, rows: int, config: Mapping[str, Any]) -> SourceVocabulary:
    """Read the tokenizer in a directory as transformers' AutoTokenizer would load it.

    A SentencePiece model is kept if it contains all tokens, added tokens included. Any other tokenizer becomes a
    tokenizer.json.

    Args:
        directory: the Hugging Face directory.
        rows: the number of rows of the embedding. A row that belongs to no token gets a symbol that no text uses.
        config: the content of config.json, with a supported model_type.

    Raises:
        InputError: if there is no tokenizer, it is damaged or of an unknown class, a token's id has no row in the
            embedding, or the padding contradicts config.json.
    """
    ids = _read_token_ids(directory)
    settings: dict[str, Any] = {}
    if (directory / SETTINGS).is_file():
        settings = read_json(directory / SETTINGS)
    class_name = _tokenizer_class(directory, settings, config)
    document = b""  # stays empty if the SentencePiece model is kept
    try:
        added_tokens = _read_added_tokens(directory, settings)
        if not _is_complete_sentencepiece(directory, ids, added_tokens):
            content = _build_tokenizer_json(directory, settings, class_name, added_tokens)
            ids |= tokenizer_json.token_ids(content)
            document = _tokenizer_json_bytes(content, directory / TOKENIZER)
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{directory}: the tokenizer or its {SETTINGS} is damaged: {first_line(error)}") from error
    _check_ids_in_embedding(ids, rows, directory)
    special_ids = _special_ids(ids, directory)
    padding = config.get("pad_token_id")
    if padding is not None and padding != special_ids[PAD]:
        raise InputError(
            f"{directory}: pad_token_id in {CONFIG} must be {special_ids[PAD]}, the tokenizer's padding, got {padding}"
        )
    ordinary_rows = sorted(set(range(rows)) - set(special_ids))
    order = [*special_ids[:-1], *ordinary_rows, special_ids[-1]]  # <mask> is the last symbol of the dictionary
    if document:
        return SourceVocabulary(order, [str(row) for row in ordinary_rows], {TOKENIZER: document})
    symbols = _piece_symbols(ids, ordinary_rows)
    return SourceVocabulary(order, symbols, {"spm.model": (directory / PIECES).read_bytes()})


def check_dictionary(files: Mapping[str, bytes], path: Path) -> None:
    """Raise InputError if a dict.txt is malformed or lacks a token of a tokenizer.

    Args:
        files: the contents of the tokenizer's files by name. If it is empty, nothing is checked.
        path: the dict.txt.
    """
    for kind, names in TOKENIZER_FILES.items():
        if names[0] in files:
            try:
                Vocabulary(make_tokenizer(kind, files), path.read_text(encoding="utf-8"))
            except DataError as error:
                raise InputError(f"{path}: {error}") from error


def _tokenizer_class(directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of the tokenizer's class in transformers, without "Fast".

    The first of these that names a class decides: tokenizer_config.json (`settings`), config.json (`config`), and
    DEFAULT_CLASSES. Raises InputError if the class is not one of KNOWN_CLASSES.
    """
    name = settings.get("tokenizer_class") or config.get("tokenizer_class") or DEFAULT_CLASSES[config["model_type"]]
    class_name = str(name).removesuffix("Fast")
    if class_name not in KNOWN_CLASSES:
        raise InputError(f"{directory}: the tokenizer's class must be one of {', '.join(KNOWN_CLASSES)}, got {name}")
    return class_name


def _check_ids_in_embedding(ids: Mapping[str, int], rows: int, directory: Path) -> None:
    """Raise InputError if the embedding has no row for a token. The message names the token with the smallest id."""
    outside = [(number, token) for token, number in ids.items() if not 0 <= number < rows]
    if outside:
        number, token = min(outside)
        raise InputError(
            f"{directory}: the tokenizer has the token {token!r} with id {number}, but the embedding has {rows} rows"
        )


def _special_ids(ids: Mapping[str, int], directory: Path) -> list[int]:
    """Return the tokenizer's ids of <s> <pad> </s> <unk> <mask>, in this order.

    Raises InputError if one of these tokens is missing or two of them have the same id.
    """
    special_ids = []
    for name in (*SPECIAL_SYMBOLS, MASK):
        token = tokenizer_json.special_token(ids, name)
        if token is None:
            raise InputError(f"{directory}: the tokenizer has no {' or '.join(tokenizer_json.SPECIAL[name])}")
        special_ids.append(ids[token])
    if len(set(special_ids)) != len(special_ids):
        raise InputError(f"{directory}: the tokenizer has special tokens with the same id: {special_ids}")
    return special_ids


def _read_token_ids(directory: Path) -> dict[str, int]:
    """Return the id of every token in the tokenizer's files, the files in VOCABULARY_FILES.

    A token may be missing from some of the files: only tokenizer.json lists tokens that were added later. Raises
    InputError if there is no file, if a file is damaged, or if a token has different ids in the first and another file.
    """
    ids_by_file: dict[str, dict[str, int]] = {}
    for name in VOCABULARY_FILES:
        path = directory / name
        if path.is_file():
            try:
                ids_by_file[name] = _read_ids_in_file(path)
            except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
                raise InputError(f"{path} is damaged: {first_line(error)}") from error
    if not ids_by_file:
        raise InputError(f"{directory} has no tokenizer: it needs {' or '.join(VOCABULARY_FILES)}")
    first, *further = ids_by_file
    ids = ids_by_file[first]
    for name in further:
        for token, number in ids_by_file[name].items():
            if ids.get(token, number) != number:
                raise InputError(
                    f"{directory}: the files of the tokenizer contradict each other: "
                    f"{token!r} is {ids[token]} in {first} and {number} in {name}"
                )
    merged: dict[str, int] = {}
    for name in reversed(ids_by_file):
        merged |= ids_by_file[name]
    return merged


def _read_ids_in_file(path: Path) -> dict[str, int]:
    """Return the id of every token in one of VOCABULARY_FILES. A damaged file can raise many types of exceptions."""
    if path.name == PIECES:
        return _read_piece_ids(path)
    if path.name == TOKENIZER:
        return tokenizer_json.token_ids(read_json(path))
    if path.name == WORDS:
        return _read_word_ids(path)
    return _read_json_ids(path)


def _read_word_ids(path: Path) -> dict[str, int]:
    """Return the id of every token in vocab.txt. The id is the number of the token's line, counted from 0.

    If a token occurs in several lines, its id is the number of the last one. Raises UnicodeDecodeError if the file is
    not UTF-8.
    """
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return {line: number for number, line in enumerate(lines)}


def _read_json_ids(path: Path) -> dict[str, int]:
    """Return the id of every token in a JSON file that maps tokens to ids, converted to int.

    Raises InputError if the file is not a JSON object, and ValueError or TypeError if an id is not a number.
    """
    return {str(token): int(number) for token, number in read_json(path).items()}


def _read_piece_ids(path: Path) -> dict[str, int]:
    """Return the ids that XLM-R gives to the pieces of a SentencePiece model and to fairseq's special symbols.

    The id of <mask> follows the id of the last piece. Raises ValueError if the first pieces of the model are not
    <unk> <s> </s>.
    """
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=path.read_bytes())
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    if pieces[:3] != ["<unk>", "<s>", "</s>"]:
        raise ValueError(f"its first pieces are {' '.join(pieces[:3])}, not <unk> <s> </s>")
    ids = {piece: number + PIECE_OFFSET for number, piece in enumerate(pieces)}
    for number, name in enumerate(SPECIAL_SYMBOLS):
        ids[name] = number
    ids[MASK] = len(pieces) + PIECE_OFFSET
    return ids


def _piece_symbols(ids: Mapping[str, int], rows: list[int]) -> list[str]:
    """Return the symbol in dict.txt for each of the given rows of the embedding.

    The symbol is the piece with this id, or "madeupwordN" for a row N without a piece. Raises InputError if a piece is
    empty or has white space, because dict.txt cannot hold it.
    """
    pieces = {number: token for token, number in ids.items()}
    symbols = [pieces.get(row, f"madeupword{row}") for row in rows]
    for symbol in symbols:
        if len(symbol.split()) != 1 or symbol != symbol.strip():
            raise InputError(f"the piece {symbol!r} cannot be in a fairseq dictionary: it is empty or has white space")
    return symbols


def _read_added_tokens(directory: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that the settings files add to the vocabulary, in the order in which transformers adds them.

    As in transformers, special_tokens_map.json and added_tokens.json are ignored if tokenizer_config.json (`settings`)
    has "added_tokens_decoder".

    Returns: entries for `added_tokens` in tokenizer.json. Tokens with an id come first, sorted by id. Special tokens
        follow; the id in their entries is None. A token can occur in both parts.
    """
    special_tokens = _special_tokens(settings)
    tokens: dict[int, Any] = {}
    if "added_tokens_decoder" in settings:
        tokens = {int(number): token for number, token in settings["added_tokens_decoder"].items()}
    else:
        if (directory / SPECIAL_MAP).is_file():
            special_tokens += _special_tokens(read_json(directory / SPECIAL_MAP))
        if (directory / ADDED).is_file():
            tokens = {number: token for token, number in _read_json_ids(directory / ADDED).items()}
    special_entries = [_added_token_entry(token, None, special=True) for token in special_tokens]
    special_names = {entry["content"] for entry in special_entries}
    entries = []
    for number in sorted(tokens):
        is_special = _token_text(tokens[number]) in special_names
        entries.append(_added_token_entry(tokens[number], number, is_special))
    return entries + special_entries


def _special_tokens(settings: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens in a settings file: first the tokens with a role, then the additional tokens.

    A token is a string or an object with flags.
    """
    tokens = [settings.get(role) for role in ROLES]
    tokens += settings.get(ADDITIONAL) or ()
    return [token for token in tokens if token is not None]


def _token_text(token: str | Mapping[str, Any]) -> str:
    """Return the text of a token, which is a string or an object with flags."""
    if isinstance(token, str):
        return token
    return str(token["content"])


def _added_token_entry(token: str | Mapping[str, Any], number: int | None, special: bool) -> dict[str, Any]:
    """Return a token as an entry for `added_tokens` in tokenizer.json.

    Flags that the token does not state have transformers' defaults. The entry itself is never marked as special, see
    `_add_tokens`.

    Args:
        token: a string or an object with flags.
        number: the id of the token, or None if it is not known.
        special: True if a settings file lists the token as special.
    """
    stated: Mapping[str, Any] = {}
    if not isinstance(token, str):
        stated = token
    is_special = special or stated.get("special")
    return {
        "id": number,
        "content": _token_text(token),
        **{flag: bool(stated.get(flag, False)) for flag in FLAGS},
        "normalized": stated.get("normalized", not is_special),
        "special": False,
    }


def _is_complete_sentencepiece(
    directory: Path, ids: Mapping[str, int], added_tokens: Sequence[Mapping[str, Any]]
) -> bool:
    """Return True if the directory has a SentencePiece model that contains all tokens.

    Raises InputError if the model lacks a token and the directory has no tokenizer.json that could be used instead.
    """
    if not (directory / PIECES).is_file():
        return False
    pieces = _read_piece_ids(directory / PIECES)
    tokens = [*ids, *(token["content"] for token in added_tokens)]
    missing = [token for token in tokens if token not in pieces]
    if missing and not (directory / TOKENIZER).is_file():
        raise InputError(
            f"{directory}: {PIECES} lacks the added token {missing[0]!r}: save the tokenizer with a {TOKENIZER} "
            "(AutoTokenizer's save_pretrained)"
        )
    return not missing


def _build_tokenizer_json(
    directory: Path, settings: Mapping[str, Any], class_name: str, added_tokens: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the content of tokenizer.json, with the changes that transformers makes when it loads the tokenizer.

    If the directory has no tokenizer.json, the content is built from vocab.txt, or from vocab.json and merges.txt.
    Raises InputError if merges.txt is missing or damaged, or if an added token states an id that differs from the id
    that transformers gives it.
    """
    if (directory / TOKENIZER).is_file():
        content = read_json(directory / TOKENIZER)
    elif (directory / WORDS).is_file():
        content = tokenizer_json.word_piece(_read_word_ids(directory / WORDS))
    elif (directory / BPE_MERGES).is_file():
        ids = _read_json_ids(directory / BPE_TOKENS)
        content = tokenizer_json.byte_level_bpe(ids, _read_merges(directory / BPE_MERGES, ids))
    else:
        raise InputError(f"{directory} has {BPE_TOKENS} without {BPE_MERGES}")
    normalizer = content.get("normalizer") or {}
    if class_name in BERT_CLASSES and normalizer.get("type") == "BertNormalizer":
        normalizer["lowercase"] = bool(settings.get("do_lower_case", True))
        normalizer["strip_accents"] = settings.get("strip_accents")
        normalizer["handle_chinese_chars"] = bool(settings.get("tokenize_chinese_chars", True))
    pre_tokenizer = content.get("pre_tokenizer") or {}
    if pre_tokenizer.get("type") == "ByteLevel":
        pre_tokenizer["add_prefix_space"] = bool(settings.get("add_prefix_space", False))
    _add_tokens(content, added_tokens, directory)
    return content


def _tokenizer_json_bytes(content: Mapping[str, Any], source: Path) -> bytes:
    """Return the content of a tokenizer.json as bytes.

    If `source` has the same content, the result is the bytes of `source`, so that the file keeps its checksum.
    """
    if source.is_file() and read_json(source) == content:
        return source.read_bytes()
    return tokenizer_json.as_bytes(content)


def _add_tokens(content: dict[str, Any], added_tokens: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Add tokens to the content of a tokenizer.json in place, with the ids that the tokenizers library gives them.

    A token that the tokenizer does not have yet gets the largest id plus 1. Among all added tokens, only fairseq's
    special symbols are then marked as special, because data_prep has no symbols for other special tokens. Raises
    InputError if a token states an id that differs from the id that it gets.
    """
    ids = tokenizer_json.token_ids(content)
    entries = list(content.get("added_tokens") or ())
    present = {entry["content"] for entry in entries}
    for token in added_tokens:
        name = token["content"]
        number = ids.setdefault(name, max(ids.values()) + 1)
        if token["id"] is not None and token["id"] != number:
            raise InputError(
                f"{directory}: the added token {name!r} has id {token['id']}, but transformers gives it {number}"
            )
        if name not in present:
            entries.append({**token, "id": number})
            present.add(name)
    fairseq_names: set[str] = set()
    for names in tokenizer_json.SPECIAL.values():
        fairseq_names.update(names)
    entries.sort(key=lambda entry: entry["id"])
    for entry in entries:
        entry["special"] = entry["content"] in fairseq_names
    content["added_tokens"] = entries


def _read_merges(path: Path, ids: Mapping[str, int]) -> list[str]:
    """Return the merges in merges.txt, each a string "left right", in the order of the file.

    Raises InputError if the file is not UTF-8, or if `ids` lacks a token of a merge or the token that the merge forms.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    merges = [line for line in lines if line and not line.startswith("#version")]
    for merge in merges:
        parts = merge.split(" ")
        if len(parts) != 2 or not {*parts, "".join(parts)} <= ids.keys():
            raise InputError(f"{path} does not fit {BPE_TOKENS}, first at {merge[:80]!r}")
    return merges
