"""Convert a Hugging Face or fairseq model to a checkpoint of this project, with its dictionary and tokenizer.

    lln-fairseq convert SOURCE OUT --attention lln_diag --positions 4096

SOURCE is a Hugging Face directory (RoBERTa, XLM-R, CamemBERT, BERT or DistilBERT), or a checkpoint of fairseq's RoBERTa
with its dict.txt in the same directory. A classifier stays one.

To fine-tune the result, run `lln-fairseq train` with `checkpoint.finetune_from_model=OUT/model.pt`. To encode text for
it, give `--tokenizer OUT` to the programs of data_prep.
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lln_fairseq.attention import MECHANISMS, reject_layer_mechanism
from lln_fairseq.checkpoints.compatibility import ANY_INPUTS, dictionary_hash
from lln_fairseq.checkpoints.config import POSITION_OFFSET, STOCK_ATTENTION
from lln_fairseq.checkpoints.pooling import pooling_entries
from lln_fairseq.checkpoints.reading import PLUGIN_STATE
from lln_fairseq.checkpoints.run_tokenizer import require_one_path
from lln_fairseq.checkpoints.source_settings import REGRESSION, settings_entries
from lln_fairseq.conversion.directory import new_directory, write_large
from lln_fairseq.conversion.from_fairseq import read_fairseq_checkpoint
from lln_fairseq.conversion.from_hugging_face import read_hugging_face_directory
from lln_fairseq.conversion.imported_encoder import DICTIONARY, HEAD, ImportedEncoder, summarize_names
from lln_fairseq.conversion.parameter_names import CLASSIFICATION_HEAD
from lln_fairseq.conversion.to_hugging_face import require_exportable_activation
from lln_fairseq.errors import UserError, user_errors
from lln_fairseq.models.adapt import ATTENTION_PARAMETERS, POSITIONS, extended_rotary_base, resize_positions
from lln_fairseq.models.lln_roberta import LLNRobertaModel, RobertaConfig
from lln_fairseq.models.options import format_softmax_layers, parse_softmax_layers
from lln_fairseq.tasks.masked_lm import LLNMaskedLMConfig, LLNMaskedLMTask
from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionConfig, LLNSentencePredictionTask
from lln_fairseq.text.labels import label_dictionary
from lln_fairseq.text.pairs import ROBERTA_PAIRS
from lln_fairseq.text.special_symbols import BOS, EOS, PAD, format_dictionary
from lln_fairseq.text.tokenizers import HuggingFaceTokenizer, make_tokenizer
from lln_fairseq.text.vocabulary import MANIFEST, Vocabulary, load_vocabulary
from lln_fairseq.training.recipes import attention_of_layout, format_override, layout_names

CHECKPOINT = "model.pt"
SEED = 1  # for the parameters that the source does not have
MAX_POSITIONS = 1 << 20  # a positional table of 4 GB for 1,024 features


def convert(
    source: Path,
    out: Path,
    attention: str | None = None,
    positions: int | None = None,
    dictionary: Path | None = None,
    heads: int | None = None,
    softmax_layers: str | None = None,
    layout: str | None = None,
) -> ImportedEncoder:
    """Convert a Hugging Face or fairseq encoder and write it to a new directory, completely or not at all.

    Args:
        source: a Hugging Face directory or a fairseq checkpoint.
        out: the directory to create.
        attention: name of the new model's attention; a mechanism that replaces whole layers is refused. None keeps the
            attention of a source that this project wrote; otherwise it stands for softmax in a classifier, and for
            lln_diag in an encoder.
        positions: the longest sequence of the new model; None keeps the source's.
        dictionary: dict.txt of a fairseq checkpoint; None looks for it next to the checkpoint.
        heads: number of attention heads, for a fairseq checkpoint that does not state it.
        softmax_layers: layers with softmax attention, such as "0,11" or "every:4"; None keeps those of a source with
            the same attention.
        layout: name of a file in configs/layout whose attention and options the new model gets, in place of
            `attention`; one that sets other options of the model is refused.

    Returns:
        The encoder as it was written, with a note on each difference from the source.
    """
    attention_options: dict[str, Any] = {}
    if layout is not None:
        attention, attention_options, layers = attention_of_layout(layout)
        softmax_layers = softmax_layers or layers
    if attention is not None:
        with user_errors():
            reject_layer_mechanism(attention, "cannot use the weights of a converted encoder")
    require_one_path(out)
    if not source.exists():
        raise UserError(f"no such directory or checkpoint: {source}")
    if source.is_dir() and heads is not None:
        raise UserError(f"--heads is for a fairseq checkpoint, but {source} is a directory: leave it out")
    if source.is_dir() and dictionary is not None:
        raise UserError(f"--dictionary is for a fairseq checkpoint, but {source} is a directory: leave it out")
    with new_directory(out) as directory:
        if source.is_dir():
            encoder = read_hugging_face_directory(source)
        else:
            encoder = read_fairseq_checkpoint(source, dictionary, heads)
            require_exportable_activation(encoder.options.get("activation_fn", "gelu"))
        if attention is None:
            default = STOCK_ATTENTION if encoder.is_classifier else RobertaConfig.attention
            attention = encoder.options.get("attention", default)
        if softmax_layers is not None:
            numbers = parse_softmax_layers(softmax_layers, encoder.options["encoder_layers"])
            softmax_layers = format_softmax_layers(numbers)
        change_attention(encoder, attention, softmax_layers)
        encoder.options |= {f"{attention}_{key}": value for key, value in attention_options.items()}
        if positions is not None:
            change_max_positions(encoder, positions)
        write_converted_encoder(encoder, directory)
    return encoder


def change_attention(encoder: ImportedEncoder, attention: str, softmax_layers: str | None) -> None:
    """Set the attention of an encoder and its layers with softmax in place.

    If the attention is not the source's, the parameters and options of the source's attention are removed, with a note.
    Without `softmax_layers`, only the same attention keeps those of the source.
    """
    previous = encoder.options.get("attention", attention)
    if previous != attention:
        for name in [name for name in encoder.parameters if ATTENTION_PARAMETERS in name]:
            del encoder.parameters[name]
        for key in [key for key in encoder.options if key.startswith(f"{previous}_")]:
            del encoder.options[key]
        encoder.options["softmax_layers"] = None
        layers = "all layers" if softmax_layers is None else f"all layers but {softmax_layers}"
        encoder.notes.append(f"{attention} replaces {previous} in {layers}")
    encoder.options["attention"] = attention
    if softmax_layers is not None:
        encoder.options["softmax_layers"] = softmax_layers


def change_max_positions(encoder: ImportedEncoder, positions: int) -> None:
    """Resize the positional table of an encoder in place, and add a note unless its size stays the same.

    See `resize_positions` for the rows of a longer table, and `extended_rotary_base` for the base of rotary positions.
    """
    if not 1 <= positions <= MAX_POSITIONS:
        raise UserError(f"--positions must be between 1 and {MAX_POSITIONS}, got {positions}")
    learned = encoder.options["max_positions"]
    if positions == learned:
        return
    table = encoder.parameters[POSITIONS]
    rotary = encoder.options.get("rotary", False)
    encoder.parameters[POSITIONS] = resize_positions(table, positions + POSITION_OFFSET, PAD, rotary)
    if positions > learned and rotary:
        base = extended_rotary_base(encoder.options, positions)
        encoder.options["rotary_base"] = base
        encoder.notes.append(
            f"extended to {positions} positions: rotary_base is {base:.0f}, and the new ones have the mean of the "
            f"{learned} learned ones"
        )
    elif positions > learned:
        encoder.notes.append(f"extended to {positions} positions by repeating the {learned} learned ones")
    else:
        encoder.notes.append(
            f"shortened to {positions} positions: the first {positions} of {learned} learned ones are kept"
        )
    encoder.options["max_positions"] = positions


def write_converted_encoder(encoder: ImportedEncoder, directory: Path) -> None:
    """Write dict.txt, the tokenizer's files and, last, model.pt to an existing directory.

    For a classifier, the directory has the layout of its data: input0/dict.txt, label/dict.txt and manifest.json.
    Parameters that the attention does not have are removed from `encoder.parameters`, and notes are added, in place.
    """
    folder = "input0/" if encoder.is_classifier else ""
    text = format_dictionary(encoder.symbols, {}, multiple=1)
    files = {f"{folder}{DICTIONARY}": text.encode(), **encoder.files}
    if encoder.is_classifier:
        tokenizer = make_tokenizer(HuggingFaceTokenizer.kind, encoder.files)
        manifest = {"tokenizer": Vocabulary(tokenizer, text).record(folder)}
        files[MANIFEST] = (json.dumps(manifest, indent=1) + "\n").encode()
    if encoder.labels:
        files[f"label/{DICTIONARY}"] = label_dictionary(encoder.labels, {}).encode()
    for name, data in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)
    state = build_checkpoint(encoder, directory)
    write_large(directory / CHECKPOINT, lambda path: torch.save(state, path))


def build_checkpoint(encoder: ImportedEncoder, data: Path) -> dict[str, Any]:
    """Return a checkpoint of a masked language model or classifier at update 0.

    Parameters that the source does not have are initialized with SEED; the caller's random state does not change. What
    changes in the encoder is said at `load_encoder_parameters`. `data` has the dictionaries of the model, and its
    tokenizer if it has one.
    """
    positions = encoder.options["max_positions"]
    task_options: dict[str, Any] = {"_name": "lln_masked_lm", "data": ".", "tokens_per_sample": positions}
    task: Any
    if encoder.is_classifier:
        task_options = classification_options(encoder)
        config = LLNSentencePredictionConfig(**{**task_options, "_name": None, "data": str(data), "seed": SEED})
        task = LLNSentencePredictionTask.setup_task(config)
    else:
        task = LLNMaskedLMTask.setup_task(LLNMaskedLMConfig(data=str(data), tokens_per_sample=positions, seed=SEED))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LLNRobertaModel.build_model(OmegaConf.create(encoder.options), task)
        if encoder.is_classifier:
            model.register_classification_head(CLASSIFICATION_HEAD, num_classes=task.cfg.num_classes)
    load_encoder_parameters(model, encoder)
    identity: dict[str, Any] = {"dictionary": dictionary_hash(task.source_dictionary)}
    identity |= pooling_entries(encoder.pooling) | settings_entries(encoder.settings)
    if encoder.is_classifier:
        identity["labels"] = encoder.labels
        identity["inputs"] = ANY_INPUTS
    if encoder.files:
        identity["tokenizer"] = load_vocabulary(str(data)).identity
    return checkpoint_at_update_0(model.state_dict(), encoder.options, task_options, identity)


def classification_options(encoder: ImportedEncoder) -> dict[str, Any]:
    """Return the options of the task of a classifier, which cuts texts that the model cannot take."""
    separator = EOS if encoder.options["pair_form"] == ROBERTA_PAIRS else None
    return {
        "_name": "lln_sentence_prediction",
        "data": ".",
        "num_classes": len(encoder.labels) or 1,
        "regression_target": not encoder.labels,
        "init_token": BOS,
        "separator_token": separator,
        "max_positions": encoder.options["max_positions"],
        "shorten_method": "truncate",
        "classification_head_name": CLASSIFICATION_HEAD,
    }


def checkpoint_at_update_0(
    parameters: dict[str, Tensor], options: dict[str, Any], task_options: dict[str, Any], identity: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of a checkpoint of LLNRobertaModel that has not been trained yet.

    `task_options` has the name of the task under `_name`. `identity` has the hash of the dictionary, the tokenizer and
    the labels, as `HookedTask.get_checkpoint_dict` records them, and the entries of `pooling_entries`.
    """
    return {
        "args": None,
        "cfg": {"model": {**options, "_name": "lln_roberta"}, "task": task_options},
        "model": parameters,
        "optimizer_history": [{"num_updates": 0, "optimizer_name": "", "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, PLUGIN_STATE: identity},
    }


def load_encoder_parameters(model: nn.Module, encoder: ImportedEncoder) -> None:
    """Load the parameters of an encoder into a model; the model's remaining parameters keep their initial values.

    Parameters that the model does not have are removed from `encoder.parameters`. Notes about them, about new
    parameters of the attention and about a new language-model head are added to `encoder.notes`.
    """
    model_state = model.state_dict()
    unknown = [name for name in encoder.parameters if name not in model_state]
    for name in unknown:
        encoder.notes.append(f"left out, because this attention has no such parameter: {name}")
        del encoder.parameters[name]
    for name, value in encoder.parameters.items():
        expected = tuple(model_state[name].shape)
        if value.shape != expected:  # the shapes of some attentions depend on their options or on the length
            raise UserError(f"the shape of {name} must be {expected} for this model, got {tuple(value.shape)}")
    new = [name for name in model_state if ATTENTION_PARAMETERS in name and name not in encoder.parameters]
    if new:
        encoder.notes.append(f"new in this attention, at their initial values: {len(new)} parameters")
    if not encoder.is_classifier and not any(name.startswith(HEAD) for name in encoder.parameters):
        encoder.notes.append("the source has no masked-language-model head: it is initialized at random")
    nn.Module.load_state_dict(model, model_state | encoder.parameters)


def finetuning_command(checkpoint: Path, positions: int) -> str:
    """Return a command that fine-tunes a converted encoder on texts of up to `positions` tokens.

    The run takes the sizes and the attention from the checkpoint.
    """
    options = [f"task.max_positions={positions}", format_override("checkpoint.finetune_from_model", checkpoint)]
    return shlex.join(["lln-fairseq", "train", "--config-name", "finetune", "glue=TASK", *options])


def classifier_description(encoder: ImportedEncoder) -> str:
    if not encoder.labels and encoder.settings["problem_type"] == REGRESSION:
        return "a regression of texts and pairs"
    if not encoder.labels:
        return "a classifier of texts and pairs with one output, such as a reranker"
    return f"a classifier of texts and pairs with {len(encoder.labels)} labels: {summarize_names(encoder.labels, 8)}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a Hugging Face directory, or a fairseq checkpoint")
    parser.add_argument("out", type=Path, help="a new directory for model.pt, dict.txt and the tokenizer")
    attention = parser.add_mutually_exclusive_group()
    attention.add_argument(
        "--attention",
        choices=sorted(MECHANISMS),
        help=f"default: that of a model of lln_fairseq; otherwise {STOCK_ATTENTION} for a classifier, "
        f"{RobertaConfig.attention} for an encoder",
    )
    attention.add_argument(
        "--layout", choices=layout_names(), help="an attention with its options: a file of configs/layout"
    )
    parser.add_argument(
        "--positions",
        type=int,
        help="the longest sequence (default: the source's); more positions repeat the learned ones from their start, "
        "unless the model has rotary positions",
    )
    parser.add_argument(
        "--dictionary", type=Path, help="dict.txt of a fairseq checkpoint (default: the one next to it)"
    )
    parser.add_argument(
        "--heads", type=int, help="number of attention heads, if a fairseq checkpoint does not state it"
    )
    parser.add_argument(
        "--softmax-layers",
        metavar="LAYERS",
        help="layers with softmax attention, such as 0,11 or every:4 (default: the source's, if it has this attention)",
    )
    args = parser.parse_args(argv)
    encoder = convert(**vars(args))
    for note in encoder.notes:
        print(note)
    checkpoint = args.out / CHECKPOINT
    if encoder.is_classifier:
        print(f"wrote {checkpoint}, {classifier_description(encoder)}")
        return
    print(f"wrote {checkpoint}; to fine-tune it, with TASK one of configs/glue:")
    print(finetuning_command(checkpoint, encoder.options["max_positions"]))
