"""Any RoBERTa of fairseq as our encoder, also of an architecture that nobody registered here.

Sizes are read from the tensors. What tensors do not show (heads, activation, dropout) is in the options that the
checkpoint was trained with.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.compatibility import require_roberta_layers
from lln_fairseq.checkpoints.config import stored_options
from lln_fairseq.checkpoints.reading import check_weights, load_checkpoint_lazily, verify_checksums
from lln_fairseq.checkpoints.run_tokenizer import DICTIONARIES, directories
from lln_fairseq.conversion.directory import as_float32
from lln_fairseq.conversion.encoder import (
    DICTIONARY,
    EMBEDDING,
    HEAD,
    OFFSET,
    POSITIONS,
    Encoder,
    first_few,
    require_shapes,
)
from lln_fairseq.conversion.parameter_names import ENCODER, HEAD_WEIGHT, Sizes, encoder_names, head_names
from lln_fairseq.conversion.read_tokenizer import check_dictionary
from lln_fairseq.conversion.write_tokenizer import find_tokenizer
from lln_fairseq.data.special_symbols import MASK, NUM_SPECIAL
from lln_fairseq.errors import InputError

LAYERS = re.compile(re.escape(ENCODER) + r"layers\.(\d+)\.")
TRAINED_WITH = ("activation_fn", "dropout", "attention_dropout", "activation_dropout", "layer_norm_eps")
IGNORED = re.compile(r"(\.version|_float_tensor)$")
PRE_NORM = (ENCODER + "layer_norm.weight", ENCODER + "layer_norm.bias")


def read(path: Path, dictionary: Path | None = None, heads: int | None = None, attention: str = "") -> Encoder:
    """The encoder in a checkpoint, with the dict.txt and the tokenizer beside it, and its head if there is one.

    `dictionary`: dict.txt where it lies elsewhere. `heads`: where the checkpoint does not say how many. `attention`:
    its own parameters and options are kept where the checkpoint has them.
    Raises: InputError for files that cannot be read, other architectures, and a dictionary that does not fit.
    """
    state = load_checkpoint_lazily(str(path))
    verify_checksums(str(path))
    given = stored_options(state)["model"]
    require_roberta_layers(given, path)
    check_weights(state["model"], path)
    tensors = _names_of_today(state["model"])
    if EMBEDDING not in tensors or POSITIONS not in tensors:
        kind = given.get("_name")
        raise InputError(f"{path} is no RoBERTa{f', it is a {kind}' if kind else ''}: it has no {EMBEDDING}")
    sizes = _sizes(tensors, path)
    options = _options(given, tensors, sizes, heads, path)
    has_head = any(name.startswith(HEAD) for name in tensors)
    names = [*encoder_names(sizes), *(head_names(sizes) if has_head else [])]
    wanted = {name.ours: name.shape for name in names}
    wanted |= dict.fromkeys(PRE_NORM, (sizes.C,)) if options["encoder_normalize_before"] else {}
    if not options["layernorm_embedding"]:
        wanted = {name: shape for name, shape in wanted.items() if "layernorm_embedding" not in name}
    require_shapes(tensors, wanted, path, "the others need")
    parameters, notes = {name: tensors[name] for name in wanted}, []
    if has_head:
        with_head = {HEAD_WEIGHT: tensors[EMBEDDING], **tensors}
        require_shapes(with_head, {HEAD_WEIGHT: (sizes.V, sizes.C)}, path, "the others need")
        parameters[HEAD_WEIGHT] = tensors.get(HEAD_WEIGHT, tensors[EMBEDDING])
        options["untie_weights_roberta"] = not torch.equal(parameters[HEAD_WEIGHT], parameters[EMBEDDING])
    own = {name: value for name, value in tensors.items() if ".self_attn.attention." in name}
    if given.get("attention") == attention:
        parameters |= own
        options |= {key: value for key, value in given.items() if key.startswith(f"{attention}_")}
    others = [name for name in tensors if name not in parameters and not IGNORED.search(name) and name not in own]
    others = [name for name in others if name != HEAD_WEIGHT]
    if unknown := [name for name in others if name.startswith((ENCODER, HEAD))]:
        raise InputError(f"{path} has what no RoBERTa has: {first_few(unknown)}")
    if others:  # heads for other tasks
        notes.append(f"left out: {first_few(others)}")
    symbols, files = _dictionary(path, dictionary, sizes.V)
    return Encoder(as_float32(parameters), options, symbols, files, notes)


def _names_of_today(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whatever wraps the encoder and its head, and the names of 2019, as RoBERTa has them now."""
    found: dict[str, Tensor] = {}
    for name, value in parameters.items():
        name = re.sub(r"^.*?\b(?=(sentence_encoder|lm_head)\.)", "encoder.", name)
        name = name.replace(".emb_layer_norm.", ".layernorm_embedding.")
        if match := re.fullmatch(r"(.*\.self_attn)\.in_proj_(weight|bias)", name):
            parts = zip(("q_proj", "k_proj", "v_proj"), value.chunk(3), strict=True)
            found |= {f"{match[1]}.{part}.{match[2]}": piece for part, piece in parts}
        else:
            found[name] = value
    return found


def _sizes(tensors: Mapping[str, Tensor], path: Path) -> Sizes:
    """Sizes that the tensors themselves have; `require_shapes` compares every one with them."""
    layers = {int(found[1]) for name in tensors if (found := LAYERS.match(name))}
    first = tensors.get(f"{ENCODER}layers.0.fc1.weight")
    tables = (tensors[EMBEDDING], tensors[POSITIONS], first)
    if first is None or layers != set(range(len(layers))) or any(x is None or x.dim() != 2 for x in tables):
        raise InputError(f"{path} is no RoBERTa: its layers are {sorted(layers)[:9] or 'none'}")
    if len(tensors[POSITIONS]) <= OFFSET:
        raise InputError(f"{path}: its positional table has {len(tensors[POSITIONS])} rows")
    V, C = tensors[EMBEDDING].shape
    return Sizes(V, len(tensors[POSITIONS]), C, len(first), len(layers))


def _options(
    given: Mapping[str, Any], tensors: Mapping[str, Tensor], sizes: Sizes, heads: int | None, path: Path
) -> dict[str, Any]:
    stated = given.get("encoder_attention_heads")
    if stated is None and heads is None:
        raise InputError(f"{path} does not say how many attention heads it has: give --heads")
    if heads is not None and stated not in (None, heads):
        raise InputError(f"{path} has {stated} attention heads, not {heads}")
    return {
        "encoder_layers": sizes.layers,
        "encoder_embed_dim": sizes.C,
        "encoder_ffn_embed_dim": sizes.F,
        "encoder_attention_heads": heads if stated is None else stated,
        "encoder_normalize_before": PRE_NORM[0] in tensors,
        "layernorm_embedding": f"{ENCODER}layernorm_embedding.weight" in tensors,
        "max_positions": sizes.P - OFFSET,
        "untie_weights_roberta": False,
        **{key: given[key] for key in TRAINED_WITH if given.get(key) is not None},
    }


def _dictionary(path: Path, dictionary: Path | None, rows: int) -> tuple[list[str], dict[str, bytes]]:
    """The symbols of dict.txt, fillers included, and the tokenizer's files, beside it or in the run's own folder."""
    folder = dictionary.parent if dictionary else next(iter(directories(str(path), None)), path.parent)
    places = [dictionary] if dictionary else [folder / name for name in DICTIONARIES[:2]]
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        raise InputError(f"no {DICTIONARY} beside {path}: give --dictionary")
    try:
        lines = place.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        symbols = [line.rstrip().rsplit(" ", 1)[0] for line in lines]
    except UnicodeDecodeError as error:
        raise InputError(f"{place} is not UTF-8: {error}") from error
    count = NUM_SPECIAL + len(symbols) + (MASK not in symbols)
    if count != rows:
        raise InputError(f"{place} has {count} symbols with fairseq's own, and {path} has {rows}")
    files = find_tokenizer([folder])
    check_dictionary(files, place)
    return symbols, files
