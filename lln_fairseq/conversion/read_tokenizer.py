"""Read the tokenizer of a Hugging Face directory in the form that data_prep uses, and match its ids to fairseq's.

fairseq's ids begin with <s> <pad> </s> <unk>, go on with the symbols of dict.txt, and end with <mask>. A symbol of
dict.txt stands for a token: it is the token's id in the Hugging Face directory, written in decimal.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln_fairseq.conversion import tokenizer_json
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.text.pairs import BERT_PAIRS, DISTILBERT_PAIRS, ROBERTA_PAIRS
from lln_fairseq.text.special_symbols import MASK, SPECIAL_SYMBOLS
from lln_fairseq.text.tokenizers import TOKENIZER_FILES, HuggingFaceTokenizer, make_tokenizer
from lln_fairseq.text.vocabulary import Vocabulary

TOKENIZER = "tokenizer.json"
# A tokenizer needs all files of one of these rows: any fast tokenizer, XLM-R, BERT, RoBERTa.
SOURCE_FILES = ((TOKENIZER,), ("sentencepiece.bpe.model",), ("vocab.txt",), ("vocab.json", "merges.txt"))
# The converted tokenizer must give these texts the tokens of the source's. None has a line end: training data has one
# text per line.
PROBES = (
    "A new text.",
    "ÉVA Müller's naïve café isn't in São Paulo",
    "In 2024: 3.14159 × 1,000,000 = $3,141,590?!",
    "東京は日本の首都です。한국어 Привет مرحبا",
    "a face 😀 and a snowman ☃",
    "two  and   three spaces",
    "Donaudampfschifffahrts" * 5,  # WordPiece makes [UNK] of a word of more than 100 characters
)


@dataclass(frozen=True)
class SourceVocabulary:
    """A tokenizer in data_prep's form, with its ids in the Hugging Face directory.

    Attributes:
        order: for each of fairseq's ids, in order, the id of the same token in the Hugging Face directory. That id is
            also the row of the token in the embedding.
        symbols: the symbols of dict.txt. Symbol i, from 0, has fairseq's id 4 + i.
        files: the contents of the tokenizer's files by the file names that data_prep uses.
        pair_form: one of PAIR_FORMS, or None if the token types of a pair are others than BERT's.
        max_length: the number of tokens at which the tokenizer cuts texts.
        padding_side: "right" or "left".
    """

    order: list[int]
    symbols: list[str]
    files: dict[str, bytes]
    pair_form: str | None
    max_length: int
    padding_side: str


def read_vocabulary(
    directory: Path, rows: int, lower_case: bool = False, has_token_types: bool = False
) -> SourceVocabulary:
    """Read the tokenizer in a directory with transformers' AutoTokenizer, and write it as a tokenizer.json.

    Among the added tokens, only fairseq's special symbols stay special, because data_prep has no symbols for other
    special tokens. UserError is raised if there is no fast tokenizer, a token's id has no row in the embedding, texts
    would get other tokens than AutoTokenizer gives them, or long ones are cut at the left.

    Args:
        directory: the Hugging Face directory.
        rows: the number of rows of the embedding. A row that belongs to no token gets a symbol that no text uses.
        lower_case: put texts into lower case first, as SentenceTransformer does.
        has_token_types: whether the model has more than one token type.
    """
    tokenizer = _load_tokenizer(directory)
    if tokenizer.truncation_side != "right":
        raise UserError(
            f"{directory}: the tokenizer cuts long texts at truncation_side {tokenizer.truncation_side}, but this "
            "project cuts them at the right. If that suits you, change truncation_side in tokenizer_config.json"
        )
    ids = tokenizer.get_vocab()
    _check_ids_in_embedding(ids, rows, directory)
    special_ids = _special_ids(ids, directory)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    fairseq_names: set[str] = set()
    for names in tokenizer_json.SPECIAL.values():
        fairseq_names.update(names)
    for token in content["added_tokens"]:
        token["special"] = token["content"] in fairseq_names
    if lower_case:
        content["normalizer"] = tokenizer_json.prepend_normalizer({"type": "Lowercase"}, content["normalizer"])
    ordinary_rows = sorted(set(range(rows)) - set(special_ids))
    order = [*special_ids[:-1], *ordinary_rows, special_ids[-1]]  # <mask> is the last symbol of the dictionary
    symbols = [str(row) for row in ordinary_rows]
    data = tokenizer_json.as_bytes(content)
    pair = _check_same_tokens(tokenizer, data, special_ids, lower_case, directory)
    return SourceVocabulary(
        order,
        symbols,
        {TOKENIZER: data},
        _pair_form(pair, special_ids[2], has_token_types),
        max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
    )


def _pair_form(pair: Mapping[str, list[int]], separator: int, has_token_types: bool) -> str | None:
    """Return the form of a pair of equal texts, as transformers encodes it, or None if it has other token types.

    The tokens are `<s> A </s> A </s>`, or have two </s> in the middle. `separator` is the id of </s>.
    """
    ids = pair["input_ids"]
    is_single = ids.count(separator) == 2
    types = pair.get("token_type_ids")
    if not has_token_types or types is None or not any(types):
        return DISTILBERT_PAIRS if is_single else ROBERTA_PAIRS
    first = ids.index(separator) + 1
    if is_single and types == [0] * first + [1] * (len(ids) - first):
        return BERT_PAIRS
    return None


def check_dictionary(files: Mapping[str, bytes], path: Path) -> None:
    """Raise UserError if a dict.txt is malformed or lacks a token of the tokenizer with these files, if any."""
    for kind, names in TOKENIZER_FILES.items():
        if names[0] in files:
            try:
                Vocabulary(make_tokenizer(kind, files), path.read_text(encoding="utf-8"))
            except UserError as error:
                raise UserError(f"{path}: {error}") from error


def _load_tokenizer(directory: Path) -> Any:
    """Return the fast tokenizer in a directory. No network is used, and no code in the directory is executed.

    Raises UserError if there is none, or if it has special tokens only.
    """
    existing = {path.name for path in directory.iterdir()}
    if not any(existing.issuperset(names) for names in SOURCE_FILES):
        choices = " or ".join(" with ".join(names) for names in SOURCE_FILES)
        raise UserError(f"{directory} has no tokenizer: it needs {choices}")
    from transformers import AutoTokenizer  # here, because importing it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # damaged files raise all kinds, and a panic in Rust is no Exception
        raise UserError(f"{directory}: AutoTokenizer cannot load the tokenizer: {first_line(error)}") from error
    if not tokenizer.is_fast:
        name = type(tokenizer).__name__
        raise UserError(f"{directory}: only fast tokenizers can be converted, but transformers has none for {name}")
    # transformers 5 makes a tokenizer without a vocabulary if the files of the class are missing or empty.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        name = type(tokenizer).__name__
        raise UserError(f"{directory}: the files of the tokenizer hold no tokens that a {name} can read")
    return tokenizer


def _check_same_tokens(
    tokenizer: Any, converted: bytes, special_ids: Sequence[int], lower_case: bool, directory: Path
) -> Mapping[str, list[int]]:
    """Raise UserError if PROBES get other tokens from this project than from the source's tokenizer.

    The last probe is a pair of the first text and itself, which may have one </s> or two between its texts. Its tokens
    are returned, as transformers encodes them. `converted` is the tokenizer.json that this project will use, with the
    source's ids, and `special_ids` the result of `_special_ids`. The BPE dropout of the source's tokenizer is turned
    off.
    """
    first, _, last, unknown, _ = special_ids
    if hasattr(tokenizer.backend_tokenizer.model, "dropout"):
        tokenizer.backend_tokenizer.model.dropout = None
    try:
        library = HuggingFaceTokenizer(converted)
        tokens = []
        for ids in library.encode_ids(PROBES):
            tokens.append([unknown if library.symbols_by_id[number] is None else number for number in ids])
    except UserError as error:
        raise UserError(f"{directory}: {error}") from error
    texts = list(PROBES)
    if lower_case:
        texts = [text.lower() for text in PROBES]
    for text, ids in zip(texts, tokens, strict=True):
        _compare_tokens(tokenizer, (text,), [[first, *ids, last]], directory)
    pairs = []
    for between in ([last, last], [last]):
        pairs.append([first, *tokens[0], *between, *tokens[0], last])
    return _compare_tokens(tokenizer, (texts[0], texts[0]), pairs, directory)


def _compare_tokens(
    tokenizer: Any, texts: Sequence[str], expected: Sequence[list[int]], directory: Path
) -> Mapping[str, list[int]]:
    """Return what a tokenizer of transformers gives for a text or a pair.

    UserError is raised if the ids are none of the expected lists.
    """
    tokens: Mapping[str, list[int]] = tokenizer(*texts, verbose=False)  # otherwise it warns of texts that are too long
    actual = tokens["input_ids"]
    if actual in expected:
        return tokens
    text = " and ".join(repr(text) for text in texts)
    raise UserError(
        f"{directory}: AutoTokenizer gives {text} the tokens {_tokens_text(tokenizer, actual)}, but a converted model "
        f"would get {_tokens_text(tokenizer, expected[0])}. If the model was trained with the latter, correct the "
        f"post_processor in {TOKENIZER}"
    )


def _tokens_text(tokenizer: Any, ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in tokenizer.convert_ids_to_tokens(ids))


def _check_ids_in_embedding(ids: Mapping[str, int], rows: int, directory: Path) -> None:
    """Raise UserError if the embedding has no row for a token. The message names the token with the smallest id."""
    outside = [(number, token) for token, number in ids.items() if not 0 <= number < rows]
    if outside:
        number, token = min(outside)
        raise UserError(
            f"{directory}: the tokenizer has the token {token!r} with id {number}, but the embedding has {rows} rows"
        )


def _special_ids(ids: Mapping[str, int], directory: Path) -> list[int]:
    """Return the tokenizer's ids of <s> <pad> </s> <unk> <mask>, in this order.

    Raises UserError if one of these tokens is missing or two of them have the same id.
    """
    special_ids = []
    for name in (*SPECIAL_SYMBOLS, MASK):
        token = tokenizer_json.special_token(ids, name)
        if token is None:
            raise UserError(f"{directory}: the tokenizer has no {' or '.join(tokenizer_json.SPECIAL[name])}")
        special_ids.append(ids[token])
    if len(set(special_ids)) != len(special_ids):
        raise UserError(f"{directory}: the tokenizer has special tokens with the same id: {special_ids}")
    return special_ids
