"""Every setting in the files of a sentence encoder and a cross-encoder is kept, refused, named in a note, or read.

ROWS is the table: the settings whose fate these tests check. A setting in READ becomes a parameter, an option or a file
of the tokenizer, which other tests compare. One in WITHOUT_EFFECT changes no vector, score or label.
"""

import json
import re
import shutil
from typing import NamedTuple

import pytest

from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.conversion.from_hugging_face import read_hugging_face_directory
from lln_fairseq.errors import UserError
from tests.conversion.classifiers import make_classifier
from tests.conversion.sources import make_model

CONFIG = "config.json"
PROMPTS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
POOLING = "1_Pooling/config.json"
TOKENIZER = "tokenizer_config.json"
MODULES = "modules.json"
IDENTITY = "torch.nn.modules.linear.Identity"


class Kept(NamedTuple):
    """The setting is in a file of the export, perhaps with another name or value."""

    file: str
    name: str
    value: object


class Refused(NamedTuple):
    message: str


class Noted(NamedTuple):
    note: str


def same(file, name, value):
    return file, name, value, Kept(file, name, value)


MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
FLAGS = {f"pooling_mode_{name}": name == "max_tokens" for name in MODES}
MAX_POOLING = Kept(POOLING, "pooling_mode_max_tokens", True)


def modules(*types):
    """Return the content of modules.json with these classes, whose old names every version reads."""
    steps = []
    for number, name in enumerate(types):
        path = f"{number}_{name}" if number else ""
        steps.append({"name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"})
    return steps


ENCODER = [
    same(PROMPTS, "similarity_fn_name", "dot"),
    same(PROMPTS, "prompts", {"query": "query: ", "document": ""}),
    (PROMPTS, "prompts", {"query": "query: "}, Noted("only the exported model has the prompts query")),
    (PROMPTS, "default_prompt_name", "query", Refused("the default prompt query .* would be left out")),
    (PROMPTS, "truncate_dim", 16, Refused("truncate_dim must be null, got 16")),
    (PROMPTS, "later", 1, Noted("left out of config_sentence_transformers.json: later")),
    (POOLING, "pooling_mode", "max", MAX_POOLING),
    (POOLING, "pooling_mode", "lasttoken", Refused("mode must be mean or cls or max, got lasttoken")),
    (POOLING, "pooling_mode", ["max", "cls"], Refused("there must be a single pooling mode, got max, cls")),
    (POOLING, "embedding_dimension", 16, Refused("must be 32, the model's hidden_size, got 16")),
    (POOLING, "include_prompt", False, Refused("include_prompt must be true")),
    (TRANSFORMER, "max_seq_length", 20, Noted(r"not at max_seq_length \(20\)")),
    (TRANSFORMER, "do_lower_case", True, Noted("texts are put into lower case")),
    (TRANSFORMER, "processing_kwargs", {"text": {"max_length": 8}}, Noted("left out of .*: processing_kwargs")),
    (TRANSFORMER, "tokenizer_args", {"use_fast": True}, Noted("left out of .*: tokenizer_args")),
    (MODULES, None, modules("Transformer", "Pooling", "Normalize"), Kept(MODULES, 2, "Normalize")),
    (MODULES, None, modules("Transformer", "Pooling", "Dense"), Refused("got Transformer, Pooling, Dense")),
    same(CONFIG, "hidden_act", "gelu_new"),
    (CONFIG, "hidden_act", "silu", Refused("hidden_act must be gelu or .*, got silu")),
    same(CONFIG, "layer_norm_eps", 1e-7),
    same(CONFIG, "hidden_dropout_prob", 0.3),
    same(CONFIG, "attention_probs_dropout_prob", 0.4),
    (CONFIG, "position_embedding_type", "relative_key", Refused("position_embedding_type must be absolute")),
    (CONFIG, "is_decoder", True, Refused("only encoders can be converted")),
    (CONFIG, "add_cross_attention", True, Refused("only encoders can be converted")),
    (CONFIG, "model_type", "nomic_bert", Refused("model_type must be roberta or")),
    (CONFIG, "architectures", ["BertForTokenClassification"], Refused("has a head that cannot be kept")),
    (CONFIG, "auto_map", {"AutoModel": "code.Model"}, Noted("the code that auto_map .* names is not used")),
    (TOKENIZER, "model_max_length", 24, Noted(r"not at model_max_length \(24\)")),
    (TOKENIZER, "truncation_side", "left", Refused("cuts long texts at truncation_side left")),
    (TOKENIZER, "padding_side", "left", Noted("padding is now at the right, not at the left")),
]
CROSS_ENCODER = [
    (PROMPTS, "activation_fn", IDENTITY, Kept(CONFIG, "sentence_transformers", {"activation_fn": IDENTITY})),
    (PROMPTS, "activation_fn", "torch.nn.modules.activation.Tanh", Refused("must be Sigmoid or Identity")),
    (PROMPTS, "prompts", {"query": "query: "}, Noted("left out: the prompts query")),
    (PROMPTS, "default_prompt_name", "query", Refused("the default prompt query .* would be left out")),
    (MODULES, None, modules("Transformer", "Dense"), Refused("must be Transformer, got Transformer, Dense")),
    same(CONFIG, "id2label", {"0": "relevance"}),
    same(CONFIG, "label2id", {"relevance": 0}),
    same(CONFIG, "problem_type", None),
    (CONFIG, "sentence_transformers", {"activation_fn": "code.Own"}, Refused("must be a class of torch, got code.Own")),
    (CONFIG, "sbert_ce_default_activation_function", "code.Own", Refused("must be a class of torch, got code.Own")),
    same(CONFIG, "classifier_dropout", 0.2),
    (TOKENIZER, "model_max_length", 24, Noted(r"not at model_max_length \(24\)")),
]
TABLE = {"encoder": ENCODER, "cross-encoder": CROSS_ENCODER}
ROWS = [(kind, *row) for kind, rows in TABLE.items() for row in rows]

READ = {
    CONFIG: "hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings vocab_size "
    "type_vocab_size pad_token_id tie_word_embeddings num_labels",
    POOLING: f"word_embedding_dimension {' '.join(FLAGS)}",
    TOKENIZER: "tokenizer_class do_lower_case strip_accents tokenize_chinese_chars unk_token sep_token pad_token "
    "cls_token mask_token added_tokens_decoder extra_special_tokens additional_special_tokens",
}
WITHOUT_EFFECT = {
    CONFIG: "_name_or_path bos_token_id chunk_size_feed_forward dtype eos_token_id gradient_checkpointing "
    "initializer_range is_encoder_decoder output_attentions output_hidden_states return_dict torch_dtype "
    "transformers_version use_cache",
    PROMPTS: "__version__ model_type",
    TRANSFORMER: "transformer_task modality_config module_output_name unpad_inputs",  # modules.json decides
    # Of slow tokenizers, of decoding, and arguments of calls, for which sentence-transformers gives its own.
    TOKENIZER: "name_or_path backend is_local local_files_only do_basic_tokenize never_split max_length stride "
    "clean_up_tokenization_spaces truncation_strategy pad_to_multiple_of pad_token_type_id",
}
# The settings in the files of all-MiniLM-L6-v2, which sentence-transformers 2.0 wrote.
MINILM = {
    CONFIG: "_name_or_path architectures attention_probs_dropout_prob gradient_checkpointing hidden_act "
    "hidden_dropout_prob hidden_size initializer_range intermediate_size layer_norm_eps max_position_embeddings "
    "model_type num_attention_heads num_hidden_layers pad_token_id position_embedding_type transformers_version "
    "type_vocab_size use_cache vocab_size",
    PROMPTS: "__version__",
    TRANSFORMER: "max_seq_length do_lower_case",
    POOLING: "word_embedding_dimension pooling_mode_cls_token pooling_mode_mean_tokens pooling_mode_max_tokens "
    "pooling_mode_mean_sqrt_len_tokens",
    TOKENIZER: "do_lower_case unk_token sep_token pad_token cls_token mask_token tokenize_chinese_chars strip_accents "
    "name_or_path do_basic_tokenize never_split tokenizer_class model_max_length",
}


def change(folder, file, name, value):
    """Set a setting in a file of a directory, or the whole content of modules.json, whose name is None."""
    path = folder / file
    if name is None:
        path.write_text(json.dumps(value))
        return
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {name: value}))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return the folder of an encoder and a cross-encoder, with the files of sentence-transformers 5.7."""
    folder = tmp_path_factory.mktemp("sources")
    make_model("bert", folder / "encoder", headless=True)
    make_classifier("bert", folder / "cross-encoder", ["relevance"])
    change(folder / "encoder", MODULES, None, modules("Transformer", "Pooling"))
    change(folder / "cross-encoder", MODULES, None, modules("Transformer"))
    change(folder / "cross-encoder", PROMPTS, "model_type", "CrossEncoder")
    change(folder / "cross-encoder", TRANSFORMER, "transformer_task", "sequence-classification")
    for kind in TABLE:
        change(folder / kind, PROMPTS, "prompts", {"query": "query: ", "document": ""})
        change(folder / kind, PROMPTS, "default_prompt_name", None)
    (folder / "encoder/1_Pooling").mkdir()
    change(folder / "encoder", POOLING, "pooling_mode", "mean")
    change(folder / "encoder", POOLING, "embedding_dimension", 32)
    return folder


@pytest.fixture(scope="module")
def exports(sources, tmp_path_factory):
    """Return the folder of both models after a conversion and an export, with all settings that are kept."""
    folder = tmp_path_factory.mktemp("exports")
    for kind, rows in TABLE.items():
        shutil.copytree(sources / kind, folder / f"{kind}-source")
        for file, name, value, fate in rows:
            if isinstance(fate, Kept):
                change(folder / f"{kind}-source", file, name, value)
        convert(folder / f"{kind}-source", folder / f"{kind}-converted", "softmax")
        export(folder / f"{kind}-converted/model.pt", folder / kind)
    return folder


@pytest.mark.parametrize(("kind", "file", "name", "value", "fate"), [row for row in ROWS if isinstance(row[-1], Kept)])
def test_setting_is_in_the_export(kind, file, name, value, fate, exports):
    actual = json.loads((exports / kind / fate.file).read_text())[fate.name]
    if file == MODULES:
        actual = actual["type"].rpartition(".")[2]
    assert actual == fate.value


@pytest.mark.parametrize(
    ("kind", "file", "name", "value", "fate"), [row for row in ROWS if not isinstance(row[-1], Kept)]
)
def test_setting_is_refused_or_named(kind, file, name, value, fate, sources, tmp_path):
    source = shutil.copytree(sources / kind, tmp_path / "in")
    change(source, file, name, value)
    if isinstance(fate, Refused):
        with pytest.raises(UserError, match=fate.message):
            read_hugging_face_directory(source)
    else:
        notes = read_hugging_face_directory(source).notes
        assert any(re.search(fate.note, note) for note in notes), notes


def known_settings(file):
    """Return the names of all settings of a file that are in ROWS, READ or WITHOUT_EFFECT."""
    names = {name for _, row_file, name, *_ in ROWS if row_file == file}
    return names | {*READ.get(file, "").split(), *WITHOUT_EFFECT.get(file, "").split()}


def test_table_has_every_setting_of_a_published_encoder():
    for file, names in MINILM.items():
        assert set(names.split()) <= known_settings(file), file


@pytest.mark.parametrize("kind", TABLE)
def test_table_has_every_setting_that_sentence_transformers_writes(kind, sources, tmp_path):
    import sentence_transformers  # slow

    classes = {"encoder": "SentenceTransformer", "cross-encoder": "CrossEncoder"}
    model = getattr(sentence_transformers, classes[kind])(str(sources / kind), device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    for file in (CONFIG, PROMPTS, TRANSFORMER, POOLING, TOKENIZER):
        path = tmp_path / "saved" / file
        if path.exists():
            assert set(json.loads(path.read_text())) <= known_settings(file), file
    assert read_hugging_face_directory(tmp_path / "saved").settings
