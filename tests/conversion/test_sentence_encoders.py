"""Encoders of sentence vectors: the pooling of the source in the checkpoint and in the exported model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.pooling import Pooling, stored_pooling
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.conversion.sentence_transformers_files import MODE_FLAGS, read_pooling, sentence_files
from lln_fairseq.errors import UserError
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.conversion.sources import TEXTS, make_model, make_model_with_settings

FEATURES = 32
MODULES = "sentence_transformers.models"


def write_pooling(folder, pooling, features=FEATURES):
    """Write the files of sentence-transformers for a pooling to an existing folder."""
    (folder / "1_Pooling").mkdir()
    for name, content in sentence_files(pooling, features, longest=40).items():
        (folder / name).write_bytes(content)


def checkpoint_pooling(folder):
    return stored_pooling(load_checkpoint_lazily(str(folder / "model.pt")))


def pool(hidden, mask, pooling):
    """Return the vectors (B, C) of hidden states (B, N, C), written down once more."""
    rows = []
    for states, real in zip(hidden, mask.bool(), strict=True):
        if pooling.mode == "mean":
            row = states[real].mean(dim=0)
        elif pooling.mode == "max":
            row = states[real].max(dim=0).values
        else:
            row = states[0]
        rows.append(row / row.norm() if pooling.normalize else row)
    return torch.stack(rows)


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """Return a function that copies a BERT without a language-model head to a new folder, and the model."""
    source = tmp_path_factory.mktemp("headless") / "bert"
    model = make_model("bert", source, headless=True)

    def copy(folder):
        shutil.copytree(source, folder)
        return model

    return copy


@pytest.mark.parametrize(
    ("pooling", "attention"),
    [(Pooling("cls", normalize=True), "softmax"), (Pooling("max"), "softmax"), (Pooling("mean"), "lln_diag")],
)
def test_pooling_of_source_is_exported(pooling, attention, headless, tmp_path):
    model = headless(tmp_path / "in")
    write_pooling(tmp_path / "in", pooling)

    notes = convert(tmp_path / "in", tmp_path / "converted", attention).notes
    lines = export(tmp_path / "converted" / "model.pt", tmp_path / "out")

    assert not any("pooling" in note for note in notes)
    assert checkpoint_pooling(tmp_path / "converted") == pooling
    assert read_pooling(tmp_path / "out", FEATURES) == pooling
    assert lines[0].endswith(f"Model, sentence vectors (pooling: {pooling})")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers\npipeline_tag: sentence-similarity" in card
    trust = ", trust_remote_code=True" if attention == "lln_diag" else ""
    assert f'SentenceTransformer("DIRECTORY"{trust})' in card
    assert f"sentence vectors: 32 features, pooling: {pooling}\n" in card
    if attention == "lln_diag":
        return
    exported = AutoModel.from_pretrained(tmp_path / "out")
    vectors = []
    for folder, encoder in ((tmp_path / "in", model), (tmp_path / "out", exported.eval())):
        batch = AutoTokenizer.from_pretrained(folder)(TEXTS[:3], padding=True, return_tensors="pt")
        with torch.no_grad():
            vectors.append(pool(encoder(**batch).last_hidden_state, batch["attention_mask"], pooling))
    torch.testing.assert_close(vectors[1], vectors[0], rtol=1e-5, atol=1e-5)


def test_encoder_has_neither_head_nor_prefix(headless, tmp_path):
    headless(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "converted", "lln_diag")
    export(tmp_path / "converted" / "model.pt", tmp_path / "out")
    names = list(load_file(tmp_path / "out" / "model.safetensors"))
    assert all(name.startswith(("embeddings.", "encoder.layer.")) for name in names)
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling"]
    sentence_config = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert sentence_config == {"max_seq_length": 40, "do_lower_case": False}
    assert (tmp_path / "out" / "1_Pooling").stat().st_mode & 0o500 == 0o500


def test_shorter_max_seq_length_is_reported(tmp_path):
    make_model("roberta", tmp_path / "in", headless=True)
    for longest, count in ((20, 1), (40, 0)):
        (tmp_path / "in" / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
        notes = convert(tmp_path / "in", tmp_path / f"out{longest}", "softmax").notes
        expected = "texts are now cut at 40 tokens, or at --positions, not at max_seq_length (20)"
        assert notes.count(expected) == count


def test_pooling_survives_another_conversion(headless, tmp_path):
    headless(tmp_path / "in")
    write_pooling(tmp_path / "in", Pooling("cls", normalize=True))
    convert(tmp_path / "in", tmp_path / "softmax", "softmax")
    convert(tmp_path / "softmax" / "model.pt", tmp_path / "linear", "lln_diag", positions=64)
    assert checkpoint_pooling(tmp_path / "linear") == Pooling("cls", normalize=True)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_lower_case_is_kept(name, tmp_path):
    """The tokenizer of the source is cased, and sentence-transformers puts the texts into lower case before it."""
    make_model_with_settings("bert", tmp_path / "in", {"do_lower_case": False})
    (tmp_path / "in" / name).write_text(json.dumps({"do_lower_case": True}))

    notes = convert(tmp_path / "in", tmp_path / "converted", "softmax").notes
    export(tmp_path / "converted" / "model.pt", tmp_path / "out")

    assert "texts are put into lower case, as do_lower_case says" in notes
    source = AutoTokenizer.from_pretrained(tmp_path / "in")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ["The PLOT", "EVA saw films"]:
        (ids,) = load_vocabulary(str(tmp_path / "converted")).tokenizer.encode_ids([text])
        assert ids == source(text.lower(), add_special_tokens=False)["input_ids"]
        assert ids != source(text, add_special_tokens=False)["input_ids"]
        assert exported.tokenize(text) == source.tokenize(text.lower())


def write_prompts(folder, default, **settings):
    prompts = {"query": "query: ", "passage": ""}
    config = {"prompts": prompts, "default_prompt_name": default, **settings}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


def test_default_prompt_is_rejected(headless, tmp_path, capsys):
    headless(tmp_path / "in")
    write_prompts(tmp_path / "in", default="query")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the default prompt query ('query: ') would be left out: set default_prompt_name to null" in error


def test_prompts_and_similarity_of_source_are_exported(headless, tmp_path):
    import sentence_transformers  # slow

    headless(tmp_path / "in")
    write_pooling(tmp_path / "in", Pooling("cls"))
    write_prompts(tmp_path / "in", default="passage", similarity_fn_name="dot")  # the default prompt is empty

    notes = convert(tmp_path / "in", tmp_path / "softmax", "softmax").notes
    convert(tmp_path / "softmax/model.pt", tmp_path / "longer", positions=64)
    export(tmp_path / "longer/model.pt", tmp_path / "out")

    assert any(note.startswith("only the exported model has the prompts query ('query: ')") for note in notes)
    similarities = []
    for folder in (tmp_path / "in", tmp_path / "out"):
        model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        vectors = model.encode(TEXTS[:3], prompt_name="query", convert_to_tensor=True)
        similarities.append(model.similarity(vectors, vectors))
    torch.testing.assert_close(similarities[1], similarities[0], rtol=1e-5, atol=1e-5)
    assert similarities[0].max() > 2  # no cosine


@pytest.mark.parametrize("named", ["", "0_Transformer"])
def test_encoder_in_a_folder_of_its_own_keeps_pooling_and_prompts(named, headless, tmp_path):
    """Old versions of sentence-transformers wrote 0_Transformer, with pooling and prompts next to it."""
    source = tmp_path / "in"
    source.mkdir()
    headless(source / "0_Transformer")
    write_pooling(source, Pooling("cls"))
    (source / "sentence_bert_config.json").rename(source / "0_Transformer" / "sentence_bert_config.json")
    steps = modules("Transformer", "Pooling")
    steps[0]["path"] = "0_Transformer"
    (source / "modules.json").write_text(json.dumps(steps))

    convert(source / named, tmp_path / "out", "softmax")

    assert checkpoint_pooling(tmp_path / "out") == Pooling("cls")
    write_prompts(source, default="query")
    with pytest.raises(UserError, match="the default prompt query"):
        convert(source / named, tmp_path / "other", "softmax")


def test_configuration_with_the_name_of_the_mode_is_read(tmp_path):
    """sentence-transformers 6 writes the name of the mode in place of flags, and other paths of its classes."""
    write_pooling(tmp_path, Pooling("mean"))
    config = {"embedding_dimension": FEATURES, "pooling_mode": "cls", "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.x.modules.pooling.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert read_pooling(tmp_path, FEATURES) == Pooling("cls")


def test_pooling_folder_is_read_without_modules(tmp_path):
    write_pooling(tmp_path, Pooling("max"))
    (tmp_path / "modules.json").unlink()
    assert read_pooling(tmp_path, FEATURES) == Pooling("max")


def flags(*modes):
    """Return a pooling configuration in which these modes are selected."""
    return {name: mode in modes for name, mode in MODE_FLAGS.items()}


def modules(*types, path="1_Pooling"):
    return [{"type": f"{MODULES}.{name}", "path": path if name == "Pooling" else ""} for name in types]


STEPS = modules("Transformer", "Pooling")
BAD_POOLINGS = {
    "weighted mean": (
        flags("weightedmean"),
        STEPS,
        "mode must be mean or cls or max, got weightedmean; remove modules",
    ),
    "last token": ({"pooling_mode": "lasttoken"}, STEPS, "mode must be mean or cls or max, got lasttoken; remove"),
    "several": (flags("mean", "max"), STEPS, "there must be a single pooling mode, got max, mean; remove"),
    "no mode": (flags(), STEPS, "there must be a single pooling mode, got none"),
    "no flags": ({"word_embedding_dimension": 32}, STEPS, "states no pooling mode"),
    "text": ({"pooling_mode_cls_token": "yes"}, STEPS, "pooling_mode_cls_token must be true or false, got 'yes'"),
    "size": ({"word_embedding_dimension": 768}, STEPS, "word_embedding_dimension must be 32, .*hidden_size, got 768"),
    "prompt": ({"include_prompt": False}, STEPS, "include_prompt must be true"),
    "list": ([], STEPS, "1_Pooling/config.json cannot be read: it does not hold a JSON object"),
    "dense": (flags("mean"), modules("Transformer", "Pooling", "Dense"), "got Transformer, Pooling, Dense; remove"),
    "no modules": (flags("mean"), [], "Normalize, got none; remove"),
    "modules": (flags("mean"), {"0": "x"}, "modules.json must be a list of modules with type and path"),
    "path": (
        flags("mean"),
        modules("Transformer", "Pooling", path="../p"),
        "in a folder next to it, got '' and '../p'",
    ),
    "folder": (flags("mean"), modules("Transformer", "Pooling", path="2_P"), "2_P/config.json does not exist"),
}


@pytest.mark.parametrize("name", BAD_POOLINGS)
def test_pooling_that_cannot_be_kept_is_rejected(name, tmp_path):
    config, steps, message = BAD_POOLINGS[name]
    write_pooling(tmp_path, Pooling())
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(UserError, match=message):
        read_pooling(tmp_path, FEATURES)


def test_wrong_pooling_is_reported_in_one_line(headless, tmp_path, capsys):
    headless(tmp_path / "in")
    write_pooling(tmp_path / "in", Pooling())
    (tmp_path / "in" / "1_Pooling" / "config.json").write_text(json.dumps(flags("lasttoken")))
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "the pooling mode must be mean or cls or max, got lasttoken" in error
    assert not (tmp_path / "out").exists()


def test_unknown_pooling_of_checkpoint_is_rejected():
    state = {"extra_state": {"lln_fairseq": {"pooling": "median"}}}
    with pytest.raises(UserError, match="pooling must be mean, cls, max, got median"):
        stored_pooling(state)
