"""Read and write the files of sentence-transformers that say how an encoder's sentence vectors are computed.

modules.json lists the steps: the model, a pooling, and a normalization if there is one. 1_Pooling/config.json has the
pooling's mode, sentence_bert_config.json the longest sequence and whether texts are put into lower case, and
config_sentence_transformers.json the prompts and the similarity of two vectors, or the activation of a cross-encoder.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln_fairseq.checkpoints.pooling import POOLINGS, Pooling
from lln_fairseq.conversion.directory import parse_json, read_json
from lln_fairseq.errors import UserError

MODULES = "modules.json"
POOLING_FOLDER = "1_Pooling"
SENTENCE_CONFIG = "sentence_bert_config.json"
# The first of these files is read, as by sentence-transformers.
SENTENCE_CONFIGS = (
    SENTENCE_CONFIG,
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
)
PROMPT_CONFIG = "config_sentence_transformers.json"
PACKAGE = "sentence_transformers.models"  # the names of its classes in modules.json, old ones that every version reads
# The names of the modes in configurations of sentence-transformers before 6.0, which have one flag for every mode.
MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# The settings that each file can have: those that are read, and those without an effect on a text's vector or score.
PROMPT_SETTINGS = (
    "prompts",
    "default_prompt_name",
    "similarity_fn_name",
    "truncate_dim",
    "activation_fn",
    "model_type",
    "__version__",
)
TRANSFORMER_SETTINGS = (
    "max_seq_length",
    "do_lower_case",
    "transformer_task",
    "modality_config",
    "module_output_name",
    "unpad_inputs",
)
KEPT_SETTINGS = ("prompts", "similarity_fn_name")  # of an encoder, in PROMPT_CONFIG
ADVICE = f"remove {MODULES} and {POOLING_FOLDER} to convert the encoder with mean pooling"


def locate_model(directory: Path) -> tuple[Path, Path]:
    """Return the root of a sentence-transformers model and the directory of its encoder, which `directory` may both be.

    Old versions wrote the encoder to a folder of its own, 0_Transformer, and pooling and prompts next to it. Elsewhere,
    root and encoder are the same directory.
    """
    folder = _encoder_folder(directory)
    if folder is not None:
        return directory, directory / folder
    parent = directory.resolve().parent
    if _encoder_folder(parent) == directory.resolve().name:
        return parent, directory
    return directory, directory


def _encoder_folder(root: Path) -> str | None:
    """Return the folder in which modules.json has the encoder; None if there is no such file, or it names no folder."""
    path = root / MODULES
    if not path.exists():
        return None
    modules = parse_json(path)
    if not isinstance(modules, list) or not modules or not _is_module(modules[0]):
        return None
    folder = modules[0]["path"]
    if not _is_folder_name(folder):
        return None
    return folder


def _is_folder_name(path: str) -> bool:
    """Return True for the name of a folder in the same directory, and for the directory itself."""
    return path in ("", ".", Path(path).name) and path != ".."


def read_pooling(directory: Path, features: int) -> Pooling | None:
    """Return the pooling of a sentence-transformers directory; None if it has neither modules.json nor 1_Pooling.

    `features` is the size of the model's hidden states. UserError is raised if a file is damaged, or asks for steps or
    a mode that this project does not have.
    """
    path = directory / MODULES
    if not path.exists():
        if not (directory / POOLING_FOLDER).exists():
            return None
        return Pooling(_read_mode(directory / POOLING_FOLDER / "config.json", features))
    modules = _read_modules(path)
    types = _types(modules)
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        steps = ", ".join(types) or "none"
        raise UserError(
            f"{path}: the modules must be Transformer, Pooling and perhaps Normalize, got {steps}; {ADVICE}"
        )
    model_folder = modules[0]["path"]
    folder = modules[1]["path"]
    if not _is_folder_name(model_folder) or folder != Path(folder).name:
        paths = f"{model_folder!r} and {folder!r}"
        raise UserError(
            f"{path}: the model must be in '' or in a folder, and its pooling in a folder next to it, got {paths}"
        )
    mode = _read_mode(directory / folder / "config.json", features)
    return Pooling(mode, normalize="Normalize" in types)


def _read_modules(path: Path) -> list[dict[str, Any]]:
    """Read modules.json. Raises UserError if it is no list of modules with type and path."""
    modules = parse_json(path)
    if not isinstance(modules, list) or not all(_is_module(module) for module in modules):
        raise UserError(f"{path} must be a list of modules with type and path")
    return modules


def _types(modules: list[dict[str, Any]]) -> list[str]:
    """Return the names of the classes of modules, without their packages, which differ between versions."""
    return [module["type"].rpartition(".")[2] for module in modules]


def _is_module(module: Any) -> bool:
    """Return True for an entry of modules.json whose type and path are text."""
    return isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)


def _read_mode(path: Path, features: int) -> str:
    """Read the mode from the config.json of a pooling. Raises UserError if it cannot be used."""
    config = read_json(path)
    size = config.get("embedding_dimension", config.get("word_embedding_dimension", features))
    if size != features:
        raise UserError(f"{path}: word_embedding_dimension must be {features}, the model's hidden_size, got {size!r}")
    if config.get("include_prompt", True) is not True:
        raise UserError(f"{path}: include_prompt must be true: prompts cannot be left out of the pooling; {ADVICE}")
    modes = _modes(config, path)
    if len(modes) != 1:
        raise UserError(f"{path}: there must be a single pooling mode, got {', '.join(modes) or 'none'}; {ADVICE}")
    if modes[0] not in POOLINGS:
        raise UserError(f"{path}: the pooling mode must be {' or '.join(POOLINGS)}, got {modes[0]}; {ADVICE}")
    return modes[0]


def _modes(config: dict[str, Any], path: Path) -> list[str]:
    """Return the pooling modes that a configuration selects, in the form with a name or in the one with flags.

    Raises UserError if a flag is not a bool, or the configuration has neither a name nor a flag.
    """
    if "pooling_mode" in config:
        names = config["pooling_mode"]
        if not isinstance(names, list):
            names = [names]
        return [str(name)[:80] for name in names]
    flags = {name: config[name] for name in MODE_FLAGS if name in config}
    if not flags:
        raise UserError(f"{path} states no pooling mode: it needs pooling_mode or {next(iter(MODE_FLAGS))} and others")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UserError(f"{path}: {name} must be true or false, got {str(value)[:80]!r}")
    return [MODE_FLAGS[name] for name, value in flags.items() if value]


def read_lower_case(directory: Path) -> bool:
    """Return True if SentenceTransformer puts texts into lower case before the tokenizer of a directory gets them."""
    value = _read_transformer_config(directory).get("do_lower_case", False)
    if not isinstance(value, bool):
        raise UserError(f"{directory}: do_lower_case must be true or false, got {str(value)[:80]!r}")
    return value


def note_max_length(directory: Path, model_max_length: int, positions: int) -> list[str]:
    """Return a note if the source cuts texts before the end of `positions`, or an empty list.

    `model_max_length` is that of the tokenizer, which max_seq_length of SentenceTransformer replaces.
    """
    longest = read_max_length(directory)
    name = "max_seq_length"
    if longest is None:
        name = "model_max_length"
        longest = model_max_length
    if longest < positions:
        return [f"texts are now cut at {positions} tokens, or at --positions, not at {name} ({longest})"]
    return []


def read_max_length(directory: Path) -> int | None:
    """Return max_seq_length, the number of tokens at which SentenceTransformer cuts texts; None if it is not stated."""
    longest = _read_transformer_config(directory).get("max_seq_length")
    return longest if isinstance(longest, int) else None


def _read_transformer_config(directory: Path) -> dict[str, Any]:
    """Return the content of the first of SENTENCE_CONFIGS that exists, or an empty dictionary if none does."""
    for name in SENTENCE_CONFIGS:
        if (directory / name).exists():
            return read_json(directory / name)
    return {}


def read_sentence_config(root: Path) -> dict[str, Any]:
    """Read config_sentence_transformers.json; the result is empty if a directory has none.

    Raises UserError for settings that change every vector or score and cannot be kept: a default prompt, which is put
    before every text, and truncate_dim, which cuts vectors.
    """
    path = root / PROMPT_CONFIG
    if not path.exists():
        return {}
    config = read_json(path)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise UserError(f"{path}: prompts must be an object, got {str(prompts)[:80]!r}")
    default = str(config.get("default_prompt_name"))
    if prompts.get(default):
        raise UserError(
            f"{path}: the default prompt {default} ({prompts[default]!r}) would be left out: set default_prompt_name "
            "to null, and put the prompt before your texts yourself"
        )
    if config.get("truncate_dim") is not None:
        raise UserError(
            f"{path}: truncate_dim must be null, got {str(config['truncate_dim'])[:80]}: vectors would not be cut. "
            "Remove it, and cut them yourself"
        )
    return config


def note_prompts(config: dict[str, Any], are_kept: bool) -> list[str]:
    """Return a note about prompts that are used only when they are named, or an empty list if there are none.

    `config` is the result of `read_sentence_config`, and `are_kept` whether `lln-fairseq export` writes them.
    """
    named = [f"{name} ({prompt!r})" for name, prompt in (config.get("prompts") or {}).items() if prompt]
    if not named:
        return []
    if are_kept:
        return [
            f"only the exported model has the prompts {', '.join(named)}: for `lln-fairseq encode`, put them before "
            "your texts yourself"
        ]
    return [f"left out: the prompts {', '.join(named)}; put them before your texts yourself"]


def note_unknown_settings(root: Path, directory: Path) -> list[str]:
    """Return notes about the files of sentence-transformers that have settings which this project does not know.

    Settings that are known but change no vector and no score are not mentioned. `root` and `directory` are the results
    of `locate_model`.
    """
    notes = _note_unknown(read_sentence_config(root), PROMPT_SETTINGS, PROMPT_CONFIG)
    return notes + _note_unknown(_read_transformer_config(directory), TRANSFORMER_SETTINGS, SENTENCE_CONFIG)


def _note_unknown(config: dict[str, Any], known: Sequence[str], file: str) -> list[str]:
    unknown = [name for name, value in config.items() if value and name not in known]
    if not unknown:
        return []
    return [f"left out of {file}: {', '.join(sorted(unknown))}"]


def require_transformer_only(root: Path) -> None:
    """Raise UserError if modules.json of a classifier lists more than the classifier itself."""
    path = root / MODULES
    if path.exists():
        types = _types(_read_modules(path))
        if types != ["Transformer"]:
            steps = ", ".join(types) or "none"
            raise UserError(f"{path}: the only module of a classifier must be Transformer, got {steps}")


def sentence_files(
    pooling: Pooling, features: int, longest: int, settings: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return the files that make SentenceTransformer compute this pooling, by their paths in the model's directory.

    They have the form of sentence-transformers before 6.0, which later versions also read. `features` is the size of
    the model's hidden states, and `longest` its longest sequence. `settings` are entries of
    config_sentence_transformers.json.
    """
    types = ["Transformer", "Pooling"]
    if pooling.normalize:
        types.append("Normalize")
    modules = []
    for number, name in enumerate(types):
        folder = f"{number}_{name}" if number else ""
        modules.append({"idx": number, "name": str(number), "path": folder, "type": f"{PACKAGE}.{name}"})
    flags = {name: mode == pooling.mode for name, mode in MODE_FLAGS.items()}
    contents: dict[str, Any] = {
        MODULES: modules,
        f"{POOLING_FOLDER}/config.json": {"word_embedding_dimension": features, **flags, "include_prompt": True},
    }
    if settings:
        contents[PROMPT_CONFIG] = dict(settings)
    files = {name: _encode_json(content) for name, content in contents.items()}
    return files | length_file(longest)


def length_file(longest: int) -> dict[str, bytes]:
    """Return sentence_bert_config.json, by its name, with the longest sequence in tokens.

    text-embeddings-inference reads it for every model. Without it, it takes max_position_embeddings of all models but
    three for the longest sequence, which is two tokens too many here. CrossEncoder ignores it.
    """
    return {SENTENCE_CONFIG: _encode_json({"max_seq_length": longest, "do_lower_case": False})}


def _encode_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
