"""Read a Hugging Face RoBERTa, BERT or DistilBERT directory, or one that `lln-fairseq export` wrote.

A BERT becomes a RoBERTa in two steps: the embedding of token type 0, which every token has in this project, is added to
the positional embeddings, and row p of their table moves to p + 2. In a classifier, the tokens of a second text get
the difference to token type 1.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.attention import MECHANISMS
from lln_fairseq.checkpoints.config import POSITION_OFFSET
from lln_fairseq.checkpoints.reading import check_weights, load_plain_data, verify_checksums
from lln_fairseq.checkpoints.source_settings import (
    REGRESSION,
    activation_name,
    activation_settings,
    score_activation,
)
from lln_fairseq.conversion.directory import CONFIG, read_json
from lln_fairseq.conversion.imported_encoder import HEAD, ImportedEncoder, choose_pooling, summarize_names
from lln_fairseq.conversion.parameter_names import (
    ATTENTION_PREFIX,
    BERT,
    DISTILBERT,
    ENCODER,
    HEAD_BIAS,
    HEAD_WEIGHT,
    ROBERTA,
    TOKEN_TYPES,
    ModelSizes,
    classifier_names,
    encoder_names,
    head_names,
)
from lln_fairseq.conversion.read_tokenizer import SourceVocabulary, read_vocabulary
from lln_fairseq.conversion.sentence_transformers_files import (
    KEPT_SETTINGS,
    locate_model,
    note_max_length,
    note_prompts,
    note_unknown_settings,
    read_lower_case,
    read_pooling,
    read_sentence_config,
    require_transformer_only,
)
from lln_fairseq.conversion.silence import silence
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.models.adapt import EMBEDDING, POSITIONS, SECOND_TEXT
from lln_fairseq.models.options import format_softmax_layers
from lln_fairseq.text.labels import label_dictionary
from lln_fairseq.text.pairs import BERT_PAIRS
from lln_fairseq.text.special_symbols import PAD

OURS = "lln_roberta"  # the models that `lln-fairseq export` writes with code
MODEL_TYPES = (ROBERTA, "xlm-roberta", "camembert", BERT, DISTILBERT, OURS)
# fairseq's names of Hugging Face's activations. gelu_accurate is GELU's approximation by tanh, in whatever form.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_accurate",
    "gelu_fast": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
    "relu": "relu",
}
DISTILBERT_EPS = 1e-12  # of its layer norms, which its config.json does not state
CLASSIFIER = "ForSequenceClassification"  # ends the name of an architecture with a classification head
LOST_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")
ADAPTER = "adapter_config.json"  # of peft
DECODER_OPTIONS = ("is_decoder", "add_cross_attention")  # true only for decoders

HEADS = re.compile(r"(lm_head|cls\.predictions|vocab_\w+)\.")
# Parts of the model in which every parameter must be known. Other parts are heads for other tasks.
CONVERTED_PARTS = re.compile(r"(embeddings|encoder|transformer|lm_head|cls\.predictions|vocab_\w+)\.")
CLASSIFIER_PARTS = re.compile(r"(embeddings|encoder|transformer|pooler|pre_classifier|classifier)\.")


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """A model that transformers loaded in float32, with what its files lack and what they have besides.

    Attributes:
        model: the model, with a classification head or a masked-language-model head.
        config: its configuration, with transformers' defaults.
        sizes: its sizes.
        family: ROBERTA, BERT or DISTILBERT, whose parameters have other names.
        tensors: its parameters by their names without the prefix of the model.
        missing: the names of the parameters that the files lack; their values are random.
        unexpected: the names in the files that the model does not have.
        is_classifier: whether it has a classification head.
        has_language_head: whether the files have a masked-language-model head, or a part of it.
    """

    model: Any
    config: Any
    sizes: ModelSizes
    family: str
    tensors: dict[str, Tensor]
    missing: set[str]
    unexpected: set[str]
    is_classifier: bool
    has_language_head: bool

    @property
    def token_types(self) -> Tensor:
        """The embeddings of the token types, (types, C): one row of zeros if the files have none."""
        if TOKEN_TYPES in self.missing or TOKEN_TYPES not in self.tensors:
            return torch.zeros(1, self.sizes.features)
        return self.tensors[TOKEN_TYPES]


def read_hugging_face_directory(directory: Path) -> ImportedEncoder:
    """Read the encoder in a Hugging Face directory, with its tokenizer and its head.

    This is a language-model head, or a classification head if the architecture in config.json has one. The rows of the
    embedding are put in the order of fairseq's ids. Parts for other tasks are left out, with a note. UserError is
    raised if the architecture is not supported, a tensor is missing, unknown or of the wrong shape, or the tokenizer
    does not fit the embedding. `directory` can also be a model of sentence-transformers, see `locate_model`.
    """
    root, directory = locate_model(directory)
    stated_config = _read_config(directory)
    notes: list[str] = []
    source = _load_model(directory, stated_config, notes)
    _require_all_parameters(source, directory)
    notes += _note_unused_parameters(source, directory)
    sentence_config = read_sentence_config(root)
    pooling = None
    labels: list[str] = []
    settings: dict[str, Any] = {}
    if source.is_classifier:
        require_transformer_only(root)
        labels = _read_labels(source.config, directory / CONFIG)
        settings = _classifier_settings(source.config, sentence_config, directory / CONFIG)
    else:
        pooling = choose_pooling(read_pooling(root, source.sizes.features), source.has_language_head, notes)
    if pooling is not None:
        settings = {name: sentence_config[name] for name in KEPT_SETTINGS if name in sentence_config}
    notes += note_prompts(sentence_config, are_kept=pooling is not None)
    notes += note_unknown_settings(root, directory)
    lower_case = read_lower_case(directory)
    vocabulary = read_vocabulary(directory, source.sizes.vocabulary, lower_case, len(source.token_types) > 1)
    if lower_case:
        notes.append("texts are put into lower case, as do_lower_case says")
    if vocabulary.padding_side != "right":
        notes.append(f"padding is now at the right, not at the {vocabulary.padding_side} (padding_side)")
    parameters = _encoder_parameters(source, vocabulary, directory)
    options = _read_options(source.config, source.sizes)
    options["max_positions"] = len(parameters[POSITIONS]) - POSITION_OFFSET
    if source.has_language_head:
        parameters |= _language_head_parameters(source, directory)
        options["untie_weights_roberta"] = not source.config.tie_word_embeddings
    if source.is_classifier:
        parameters |= _classifier_parameters(source, vocabulary, directory)
        options |= _classifier_options(source.config)
        options["pair_form"] = vocabulary.pair_form
    _reorder_symbols(parameters, vocabulary)
    notes += note_max_length(directory, vocabulary.max_length, options["max_positions"])
    return ImportedEncoder(
        parameters,
        options,
        vocabulary.symbols,
        vocabulary.files,
        notes,
        pooling,
        source.is_classifier,
        labels,
        settings,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    """Read config.json. UserError is raised if the directory has no model, or one that cannot be represented."""
    path = directory / CONFIG
    if (directory / ADAPTER).exists() and not _weight_files(directory):
        raise UserError(
            f"{directory} holds only an adapter ({ADAPTER}): merge it into its model (merge_and_unload of peft), and "
            "convert the result"
        )
    if (directory / ADAPTER).exists():  # with peft installed, transformers loads the adapter's base instead
        raise UserError(
            f"{directory} holds weights and an adapter ({ADAPTER}): delete the adapter's files if it is merged into "
            "the weights, or else merge it (merge_and_unload of peft) and convert the result"
        )
    if not path.exists():
        raise UserError(
            f"{directory} is not a Hugging Face directory: it has no {CONFIG}{_checkpoint_advice(directory)}"
        )
    config = read_json(path)
    _check_architecture(config, path)
    return config


def _has_classification_head(config: dict[str, Any], path: Path) -> bool:
    """Return True if a config.json, read from `path`, names an architecture that classifies texts.

    The names of tensors do not show it: a multiple-choice head has those of a classifier with one label. UserError is
    raised if the architecture has a head of LOST_HEADS.
    """
    architectures = [str(name) for name in config.get("architectures") or ()]
    for name in architectures:
        if name.endswith(LOST_HEADS):
            raise UserError(
                f"{path}: {name} has a head that cannot be kept. Encoders, masked language models and "
                f"{CLASSIFIER} can be converted"
            )
    return any(name.endswith(CLASSIFIER) for name in architectures)


def _read_labels(config: Any, path: Path) -> list[str]:
    """Return the names of a classifier's classes in the order of its outputs, or an empty list for a single output.

    UserError is raised for several labels of a text, or names that a label dictionary cannot hold. `path` is that of
    config.json.
    """
    if config.num_labels == 1:
        return []
    problem = config.problem_type
    if problem == "multi_label_classification":
        raise UserError(f"{path}: problem_type is {problem}, but a classifier gives a text one label here")
    if problem == REGRESSION:
        raise UserError(f"{path}: problem_type is {problem}, but the model has {config.num_labels} outputs")
    labels = [str(config.id2label.get(number, "")) for number in range(config.num_labels)]
    try:
        label_dictionary(labels, {})
    except UserError as error:
        raise UserError(f"{path}: id2label: {error}") from error
    return labels


def _classifier_settings(config: Any, sentence_config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the entries of config.json that say what the outputs of a classifier mean.

    The activation of CrossEncoder is read from `sentence_config`, the result of `read_sentence_config`, or else from
    config.json, whose path is for messages. Raises UserError for one that a model with a single output cannot have
    here, or that is not a class of torch: CrossEncoder would look for its code.
    """
    settings: dict[str, Any] = {"problem_type": config.problem_type}
    name = sentence_config.get("activation_fn") or activation_name(config.to_dict())
    if name is not None:
        if not str(name).startswith("torch."):
            raise UserError(f"{path}: the activation of CrossEncoder must be a class of torch, got {str(name)[:80]}")
        settings |= activation_settings(name)
    if config.num_labels == 1:
        label = str(config.id2label.get(0, ""))
        settings |= {"id2label": {"0": label}, "label2id": {label: 0}}
        try:
            score_activation(settings)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    return settings


def _read_sizes(config: Any) -> ModelSizes:
    """Return the sizes that a configuration of transformers states."""
    is_ours = config.model_type == OURS
    return ModelSizes(
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        features=config.hidden_size,
        ffn_features=config.hidden_dim if config.model_type == DISTILBERT else config.intermediate_size,
        layers=config.num_hidden_layers,
        pre_norm=is_ours and config.normalize_before,
        embedding_norm=not is_ours or config.normalize_embedding,
    )


def _load_model(directory: Path, stated_config: dict[str, Any], notes: list[str]) -> SourceModel:
    """Load a classifier or masked language model in float32 and evaluation mode.

    The code in an exported model's directory is not used. A note is added if a model that is not ours has code. Raises
    UserError if the weights are damaged or do not have the shapes of config.json.
    """
    is_classifier = _has_classification_head(stated_config, directory / CONFIG)
    if "auto_map" in stated_config and stated_config["model_type"] != OURS:
        notes.append(f"the code that auto_map in {CONFIG} names is not used")
    config_class, model_class = _classes(stated_config["model_type"], is_classifier)
    _check_files(directory)
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        with silence():
            config = config_class.from_pretrained(directory, **options)
            sizes = _read_sizes(config)
            _check_size_of_files(sizes, directory)
            model, report = model_class.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except Exception as error:  # transformers and safetensors have no common exception
        reason = " ".join(str(error).split())  # some messages have their point in the second line
        raise UserError(f"{directory} cannot be read by transformers: {reason:.300}") from error
    for entry in report["mismatched_keys"]:
        name = entry if isinstance(entry, str) else entry[0]  # transformers 5 adds both shapes
        expected = tuple(model.state_dict()[name].shape)
        raise UserError(f"{directory}: {_without_prefix(name)} must have the shape {expected} according to {CONFIG}")
    family = ROBERTA
    if config.model_type in (BERT, DISTILBERT):
        family = config.model_type
    missing = {_without_prefix(name) for name in report["missing_keys"]}
    language_head = {name.hugging_face for name in head_names(sizes, family)}
    return SourceModel(
        model=model.eval(),
        config=config,
        sizes=sizes,
        family=family,
        tensors={_without_prefix(name): value for name, value in model.state_dict().items()},
        missing=missing,
        unexpected={_without_prefix(name) for name in report["unexpected_keys"]},
        is_classifier=is_classifier,
        has_language_head=not is_classifier and not language_head <= missing,
    )


def _classes(model_type: str, is_classifier: bool) -> tuple[Any, Any]:
    """Return the classes of transformers, or of our modeling file, for a model's configuration and the model itself."""
    import transformers  # here, because importing it takes seconds

    if model_type == OURS:
        from lln_fairseq.conversion import modeling_lln_roberta as modeling

        if is_classifier:
            return modeling.LLNRobertaConfig, modeling.LLNRobertaForSequenceClassification
        return modeling.LLNRobertaConfig, modeling.LLNRobertaForMaskedLM
    if is_classifier:
        return transformers.AutoConfig, transformers.AutoModelForSequenceClassification
    return transformers.AutoConfig, transformers.AutoModelForMaskedLM


def _check_size_of_files(sizes: ModelSizes, directory: Path) -> None:
    """Raise ValueError if the model has more parameters than its files bytes, before it gets memory."""
    layer = 4 * sizes.features**2 + 2 * sizes.features * sizes.ffn_features
    num_parameters = (sizes.vocabulary + sizes.positions) * sizes.features + sizes.layers * layer
    if num_parameters > sum(file.stat().st_size for file in _weight_files(directory)):
        raise ValueError(f"the sizes in {CONFIG} make {num_parameters} parameters, more than the files hold")


def _weight_files(directory: Path) -> list[Path]:
    return list(directory.glob("model*.safetensors")) or list(directory.glob("pytorch_model*.bin"))


def _check_files(directory: Path) -> None:
    """Read all files of weights, and raise UserError if they are damaged, or a part that is converted is not floats.

    transformers would accept integers, for example.
    """
    files = _weight_files(directory)
    if not files:
        raise UserError(f"{directory} holds no weights: it needs model.safetensors or pytorch_model.bin")
    for index in directory.glob("*.index.json"):
        read_json(index)
    for file in files:
        for name, value in _read_file(file).items():
            short_name = _without_prefix(name)
            is_converted = CONVERTED_PARTS.match(short_name) or CLASSIFIER_PARTS.match(short_name)
            if is_converted and not name.endswith("_ids"):
                check_weights({short_name: value}, file)


def _read_file(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a file of weights. Raises UserError if it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{file} is damaged: {first_line(error)}") from error
    tensors = load_plain_data(str(file))
    verify_checksums(str(file))
    return {str(name): value for name, value in tensors.items() if isinstance(value, Tensor)}


def _without_prefix(name: str) -> str:
    """Return a parameter's name without the name of the model in front of it."""
    return re.sub(r"^(roberta\.|bert\.|distilbert\.|\w+\.(?=(embeddings|encoder|pooler)\.))", "", name)


def _check_padding(stated: int | None, padding: int, directory: Path) -> None:
    """Raise UserError if config.json has another id for the padding than the tokenizer, whose id is `padding`."""
    if stated is not None and stated != padding:
        raise UserError(
            f"{directory}: pad_token_id in {CONFIG} must be {padding}, the tokenizer's padding, got {stated}"
        )


def _checkpoint_advice(directory: Path) -> str:
    """Return a hint to name a fairseq checkpoint in `directory` itself; empty if there is none."""
    checkpoints = sorted(directory.glob("*.pt"))
    if not checkpoints:
        return ""
    return f". To convert a fairseq checkpoint, name the file, such as {checkpoints[0]}"


def _check_architecture(config: dict[str, Any], path: Path) -> None:
    """Raise UserError if config.json, read from `path`, describes a model that fairseq's RoBERTa cannot represent."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UserError(f"{path}: model_type must be {' or '.join(MODEL_TYPES)}, got {model_type}")
    for option in DECODER_OPTIONS:
        if config.get(option):
            raise UserError(f"{path}: only encoders can be converted, but {option} is {config[option]}")
    position_type = config.get("position_embedding_type", "absolute")
    if position_type != "absolute":
        raise UserError(f"{path}: position_embedding_type must be absolute, got {position_type}")
    option = "activation" if model_type == DISTILBERT else "hidden_act"
    activation = str(config.get(option, "gelu"))
    if activation not in ACTIVATIONS:
        raise UserError(f"{path}: {option} must be {' or '.join(ACTIVATIONS)}, got {activation}")


def _read_options(config: Any, sizes: ModelSizes) -> dict[str, Any]:
    """Return the options of LLNRobertaModel that a configuration of transformers states."""
    options = {
        "encoder_layers": sizes.layers,
        "encoder_embed_dim": sizes.features,
        "encoder_ffn_embed_dim": sizes.ffn_features,
        "encoder_attention_heads": config.num_attention_heads,
        "encoder_normalize_before": sizes.pre_norm,
        "layernorm_embedding": sizes.embedding_norm,
    }
    if config.model_type == DISTILBERT:
        options["activation_fn"] = ACTIVATIONS[config.activation]
        options["dropout"] = config.dropout
        options["attention_dropout"] = config.attention_dropout
        options["layer_norm_eps"] = DISTILBERT_EPS
    else:
        options["activation_fn"] = ACTIVATIONS[config.hidden_act]
        options["dropout"] = config.hidden_dropout_prob
        options["attention_dropout"] = config.attention_probs_dropout_prob
        options["layer_norm_eps"] = config.layer_norm_eps
    if config.model_type == OURS:
        options |= _attention_options(config)
    return options


def _classifier_options(config: Any) -> dict[str, Any]:
    """Return the options of LLNRobertaModel for the classification head.

    In training, this project applies the dropout of the head also to its input.
    """
    if config.model_type == DISTILBERT:
        return {"pooler_activation_fn": "relu", "pooler_dropout": config.seq_classif_dropout}
    options = {"pooler_dropout": config.classifier_dropout}
    if config.classifier_dropout is None:
        options["pooler_dropout"] = config.hidden_dropout_prob
    if config.model_type == OURS:
        options["pooler_activation_fn"] = config.classifier_activation
    return options


def _attention_options(config: Any) -> dict[str, Any]:
    """Return the options of LLNRobertaModel for the attention of an exported model and its rotary positions."""
    options = {"attention": config.attention, "softmax_layers": format_softmax_layers(config.softmax_layers)}
    for field in dataclasses.fields(MECHANISMS[config.attention].config):
        options[f"{config.attention}_{field.name}"] = getattr(config, field.name)
    if config.rotary_base is not None:
        options["rotary"] = True
        options["rotary_base"] = config.rotary_base
    return options


def _attention_parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the own parameters of an exported model's attention, such as learned gains, under fairseq's names."""
    parameters = {}
    for name, value in tensors.items():
        # The names of the projections have one more dot.
        match = re.fullmatch(r"encoder\.layer\.(\d+)\.attention\.self\.(\w+)", name)
        if match is not None:
            parameters[f"{ENCODER}layers.{match[1]}.{ATTENTION_PREFIX}{match[2]}"] = value
    return parameters


def _require_all_parameters(source: SourceModel, directory: Path) -> None:
    """Raise UserError if the files lack a parameter of the encoder or of the head that is converted."""
    lost = source.missing - {TOKEN_TYPES}
    if not source.has_language_head:
        lost = {name for name in lost if not HEADS.match(name)}
    if lost:
        raise UserError(f"{directory} lacks {summarize_names(sorted(lost))}")


def _note_unused_parameters(source: SourceModel, directory: Path) -> list[str]:
    """Return a note that lists the parts for other tasks, or an empty list if there are none.

    Raises UserError if a part that is converted has a parameter that the model does not have, apart from RoBERTa's
    pooler, which its classifier does not use.
    """
    converted = CLASSIFIER_PARTS if source.is_classifier else CONVERTED_PARTS
    unused = sorted(source.unexpected)
    unknown = [name for name in unused if converted.match(name) and not name.startswith("pooler.")]
    if unknown:
        raise UserError(f"{directory} is not a RoBERTa or BERT: unexpected parameters {summarize_names(unknown)}")
    heads = set()
    for name in unused:
        parts = name.split(".")
        if parts[0] == "cls":  # all heads of BERT are in `cls`
            heads.add(".".join(parts[:2]))
        else:
            heads.add(parts[0])
    if not heads:
        return []
    return [f"left out: {', '.join(sorted(heads))}"]


def _encoder_parameters(source: SourceModel, vocabulary: SourceVocabulary, directory: Path) -> dict[str, Tensor]:
    """Return the parameters of the encoder by fairseq's names, with its positions in fairseq's rows."""
    names = encoder_names(source.sizes, source.family)
    parameters = {name.fairseq: source.tensors[name.hugging_face] for name in names}
    if source.config.model_type == OURS:
        parameters |= _attention_parameters(source.tensors)
    unused_rows = 0
    if source.family == ROBERTA:  # RoBERTa counts positions from the id of the padding
        _check_padding(source.config.pad_token_id, vocabulary.order[PAD], directory)
        unused_rows = vocabulary.order[PAD] + 1
    _convert_positions(parameters, source.token_types[0], unused_rows, directory)
    return parameters


def _language_head_parameters(source: SourceModel, directory: Path) -> dict[str, Tensor]:
    """Return the parameters of the masked-language-model head by fairseq's names.

    The output matrix and its bias are included only if the matrix is not tied to the embedding. fairseq's head has the
    activation of the layers, but the head of Hugging Face's RoBERTa always has GELU: UserError is raised for a RoBERTa
    whose layers have another one.
    """
    is_stock_roberta = source.family == ROBERTA and source.config.model_type != OURS
    if is_stock_roberta and ACTIVATIONS[source.config.hidden_act] != "gelu":
        raise UserError(
            f"{directory / CONFIG}: hidden_act must be gelu, as in the language-model head of a RoBERTa, got "
            f"{source.config.hidden_act}"
        )
    names = head_names(source.sizes, source.family)
    parameters = {name.fairseq: source.tensors[name.hugging_face] for name in names}
    if not source.config.tie_word_embeddings:
        output_layer = source.model.get_output_embeddings()
        parameters[HEAD_WEIGHT] = output_layer.weight.detach()
        parameters[HEAD_BIAS] = output_layer.bias.detach()
    return parameters


def _classifier_parameters(source: SourceModel, vocabulary: SourceVocabulary, directory: Path) -> dict[str, Tensor]:
    """Return the parameters of the classification head by fairseq's names, and what BERT adds to a second text.

    Raises UserError if the tokenizer gives a pair other token types than BERT's.
    """
    if vocabulary.pair_form is None:
        raise UserError(
            f"{directory}: the tokenizer must give a pair BERT's token types, 0 for the first text and 1 for the second"
        )
    names = classifier_names(family=source.family)
    parameters = {fairseq: source.tensors[hugging_face] for fairseq, hugging_face in names.items()}
    if vocabulary.pair_form == BERT_PAIRS:
        parameters[SECOND_TEXT] = source.token_types[1] - source.token_types[0]
    return parameters


def _convert_positions(parameters: dict[str, Tensor], token_type: Tensor, unused_rows: int, directory: Path) -> None:
    """Add the embedding of token type 0 to all positions and move position p to row p + POSITION_OFFSET.

    The positional table in `parameters` is replaced; if neither step is necessary, its values stay exactly the same.
    `unused_rows` is the row of position 0 in the source.
    """
    table = parameters[POSITIONS]
    if len(table) <= unused_rows:
        raise UserError(f"{directory}: the positional table must have more than {unused_rows} rows, got {len(table)}")
    if token_type.any():
        table = torch.cat([table[:unused_rows], table[unused_rows:] + token_type])
    if unused_rows != POSITION_OFFSET:
        table = torch.cat([table.new_zeros(POSITION_OFFSET, table.shape[1]), table[unused_rows:]])
    parameters[POSITIONS] = table


def _reorder_symbols(parameters: dict[str, Tensor], vocabulary: SourceVocabulary) -> None:
    """Put the rows of all parameters that have one row per symbol into the order of fairseq's ids, in place.

    A language-model head without an output matrix of its own gets the embedding.
    """
    order = torch.tensor(vocabulary.order)
    for name in (EMBEDDING, HEAD_BIAS, HEAD_WEIGHT):
        if name in parameters:
            parameters[name] = parameters[name][order]
    if any(name.startswith(HEAD) for name in parameters):
        parameters.setdefault(HEAD_WEIGHT, parameters[EMBEDDING])
