"""Read the tokenizer of a Hugging Face directory in the form that data_prep uses, and match its ids to fairseq's.

fairseq's ids begin with <s> <pad> </s> <unk>, go on with the symbols of dict.txt, and end with <mask>. In dict.txt, a
symbol is a token's id in tokenizer.json, in decimal, or a SentencePiece piece (XLM-R).
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
PIECE_OFFSET = 1  # XLM-R's id of a piece minus the piece's id in SentencePiece, except for special pieces

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = "additional_special_tokens"
FLAGS = ("single_word", "lstrip", "rstrip")
# The class of transformers that reads the tokenizer of a model type if no file names one.
DEFAULT_CLASSES = {"bert": "BertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer"}
# The supported classes. Those of BERT replace the settings of the normalizer in tokenizer.json.
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
ROBERTA_CLASSES = ("RobertaTokenizer", "LongformerTokenizer", "BartTokenizer", "GPT2Tokenizer")
# TokenizersBackend is the name of PreTrainedTokenizerFast in transformers 5.
KNOWN_CLASSES = (*BERT_CLASSES, *ROBERTA_CLASSES, "XLMRobertaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")


@dataclass(frozen=True)
class SourceVocabulary:
    """A tokenizer, and the mapping of fairseq's ids to its own.

    Attributes:
        order: for each of fairseq's ids, the id in the source, which is also the row of the source's embedding.
        symbols: the symbols of dict.txt, see ImportedEncoder.
        files: the files of the tokenizer, see ImportedEncoder.
    """

    order: list[int]
    symbols: list[str]
    files: dict[str, bytes]


def read_vocabulary(directory: Path, rows: int, config: Mapping[str, Any]) -> SourceVocabulary:
    """Read the tokenizer in a directory as AutoTokenizer of transformers loads it.

    A SentencePiece model is kept if it contains all tokens, added tokens included. Any other tokenizer becomes a
    tokenizer.json.

    Args:
        directory: the Hugging Face directory.
        rows: the number of rows of the embedding; a row that belongs to no token gets an unused symbol.
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
    """Raise InputError if the dict.txt at `path` does not fit the tokenizer in `files`, unless `files` is empty."""
    for kind, names in TOKENIZER_FILES.items():
        if names[0] in files:
            try:
                Vocabulary(make_tokenizer(kind, files), path.read_text(encoding="utf-8"))
            except DataError as error:
                raise InputError(f"{path}: {error}") from error


def _tokenizer_class(directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the name of the tokenizer's class in transformers, without "Fast".

    Raises InputError if it is not one of KNOWN_CLASSES.
    """
    name = settings.get("tokenizer_class") or config.get("tokenizer_class") or DEFAULT_CLASSES[config["model_type"]]
    class_name = str(name).removesuffix("Fast")
    if class_name not in KNOWN_CLASSES:
        raise InputError(f"{directory}: the tokenizer's class must be one of {', '.join(KNOWN_CLASSES)}, got {name}")
    return class_name


def _check_ids_in_embedding(ids: Mapping[str, int], rows: int, directory: Path) -> None:
    """Raise InputError if the embedding has no row for a token; the message names the one with the smallest id."""
    outside = [(number, token) for token, number in ids.items() if not 0 <= number < rows]
    if outside:
        number, token = min(outside)
        raise InputError(
            f"{directory}: the tokenizer has the token {token!r} with id {number}, but the embedding has {rows} rows"
        )


def _special_ids(ids: Mapping[str, int], directory: Path) -> list[int]:
    """Return the tokenizer's ids of <s> <pad> </s> <unk> <mask>. Raises InputError if one is missing or not unique."""
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
    """Return the id of every token in the tokenizer's files.

    Raises InputError if there is no file, one is damaged, or a token has another id than in the first file. A token may
    be missing from some of the files: only tokenizer.json lists tokens that were added later.
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
    """Return the id of every token in one of VOCABULARY_FILES. A damaged file raises many types of exceptions."""
    if path.name == PIECES:
        return _read_piece_ids(path)
    if path.name == TOKENIZER:
        return tokenizer_json.token_ids(read_json(path))
    if path.name == WORDS:
        return _read_word_ids(path)
    return _read_json_ids(path)


def _read_word_ids(path: Path) -> dict[str, int]:
    """Return the id of every token in vocab.txt: the number of its line, from 0; the last of equal lines counts.

    OSError and UnicodeDecodeError are passed on.
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

    <mask> follows the last piece. Raises ValueError if the model does not begin with <unk> <s> </s>.
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
    """Return the piece of each of these rows of the embedding; a row without a piece gets an unused symbol.

    Raises InputError for an empty piece or one with white space, which dict.txt cannot hold.
    """
    pieces = {number: token for token, number in ids.items()}
    symbols = [pieces.get(row, f"madeupword{row}") for row in rows]
    for symbol in symbols:
        if len(symbol.split()) != 1 or symbol != symbol.strip():
            raise InputError(f"the piece {symbol!r} cannot be in a fairseq dictionary: it is empty or has white space")
    return symbols


def _read_added_tokens(directory: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that the settings files add to the vocabulary, in the order in which transformers adds them.

    Tokens with an id come first, sorted by it, then the special tokens, whose id is None. Each is an entry of
    `added_tokens` in tokenizer.json. If tokenizer_config.json has "added_tokens_decoder", the older files are ignored,
    as transformers does.
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
    """Return the special tokens of a settings file, strings or objects: those with a role and the additional ones."""
    tokens = [settings.get(role) for role in ROLES]
    tokens += settings.get(ADDITIONAL) or ()
    return [token for token in tokens if token is not None]


def _token_text(token: str | Mapping[str, Any]) -> str:
    """Return the text of a token, which is a string or an object with flags."""
    if isinstance(token, str):
        return token
    return str(token["content"])


def _added_token_entry(token: str | Mapping[str, Any], number: int | None, special: bool) -> dict[str, Any]:
    """Return a token as an entry of `added_tokens`, with the flags that the file states or transformers' defaults.

    The entry itself is not marked as special; see `_add_tokens`.
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

    Raises InputError if the model lacks a token and there is no tokenizer.json to take it from.
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

    Without a tokenizer.json, it is made from vocab.txt, or from vocab.json and merges.txt. Raises InputError if
    merges.txt is missing or damaged, or an added token has another id than transformers gives it.
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
    """Return a tokenizer.json as bytes: those of `source`, to keep its checksum, if its content is the same."""
    if source.is_file() and read_json(source) == content:
        return source.read_bytes()
    return tokenizer_json.as_bytes(content)


def _add_tokens(content: dict[str, Any], added_tokens: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Add tokens to the content of a tokenizer.json in place, with the ids that the tokenizers library gives them.

    A token that the tokenizer does not have yet gets the id after the largest one. Of all added tokens, only fairseq's
    special symbols are marked as special, because data_prep has no symbols for other special tokens. Raises InputError
    if a token states another id.
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
    """Return the merges of a byte-level BPE. Raises InputError for the first merge whose tokens are not in `ids`."""
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
