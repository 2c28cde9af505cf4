"""Exported models in transformers and sentence-transformers: every parameter is loaded, and the outputs are ours.

scripts/test_transformers.sh runs this file with the oldest and the newest supported version of both.
"""

import sys

import pytest
import torch
from packaging.version import Version
from torch.export import Dim
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from lln_fairseq.checkpoints.pooling import Pooling
from lln_fairseq.conversion import to_onnx
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.ops.moment_matching import calibration_table
from tests.conversion.sources import TEXTS, add_noise, compute_logits, encode_texts, make_model, padded_batch
from tests.conversion.test_sentence_encoders import pool, write_pooling
from tests.fairseq_runs import CLASSIFICATION, LLN, make_classification, train

REPORTED = ("MISSING", "UNEXPECTED", "MISMATCH", "newly initialized", "were not used")  # in load reports
POOLING = Pooling("cls", normalize=True)


def load_completely(model_class, folder, capfd):
    """Load a model, and check that transformers neither misses a parameter nor leaves one out."""
    capfd.readouterr()
    model, report = model_class.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[name], (name, report[name])
    assert_nothing_reported(capfd)
    return model.eval()


def assert_nothing_reported(capfd):
    printed = capfd.readouterr()
    for word in REPORTED:
        assert word not in printed.out + printed.err, printed.err


def each_implementation(model, monkeypatch):
    """Yield twice, with the kernels of lln_fairseq in use and with plain operations, or once for a stock RoBERTa."""
    module = sys.modules[type(model).__module__]
    if not hasattr(module, "HAS_KERNELS"):
        yield
        return
    for has_kernels in (True, False):
        monkeypatch.setattr(module, "HAS_KERNELS", has_kernels)
        yield


def our_features(checkpoint, tokens):
    model, _ = load_model(str(checkpoint))
    with torch.no_grad():
        return model(tokens, features_only=True)[0]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Return a function from an attention to the directories of a converted and an exported sentence encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    make_model("bert", folder / "source", headless=True)
    write_pooling(folder / "source", POOLING)

    def make(attention):
        converted = folder / f"{attention}-converted"
        exported = folder / attention
        if not exported.exists():
            convert(folder / "source", converted, attention)
            export(converted / "model.pt", exported)
        return converted, exported

    return make


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
def test_encoder_is_loaded_completely(attention, encoders, monkeypatch, capfd):
    converted, exported = encoders(attention)
    model = load_completely(AutoModel, exported, capfd)
    tokens = encode_texts(converted, TEXTS[:3])
    real = tokens != 1
    expected = our_features(converted / "model.pt", tokens)
    for _ in each_implementation(model, monkeypatch):
        with torch.no_grad():
            actual = model(tokens, attention_mask=real.long()).last_hidden_state
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "lln_diag"])
def test_sentence_transformers_gives_same_vectors(attention, encoders, capfd):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    converted, exported = encoders(attention)
    capfd.readouterr()
    model = sentence_transformers.SentenceTransformer(str(exported), trust_remote_code=True, device="cpu")
    assert_nothing_reported(capfd)
    assert model.max_seq_length == 40
    tokens = encode_texts(converted, TEXTS[:3])
    expected = pool(our_features(converted / "model.pt", tokens), tokens != 1, POOLING)
    actual = model.encode(TEXTS[:3], convert_to_tensor=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("attention", "tied"), [("lln_diag", True), ("softmax", False)])
def test_masked_language_model_is_loaded_completely(attention, tied, tmp_path, monkeypatch, capfd):
    make_model("roberta", tmp_path / "in", tie_word_embeddings=tied)
    convert(tmp_path / "in", tmp_path / "converted", attention)
    export(tmp_path / "converted" / "model.pt", tmp_path / "out")
    model = load_completely(AutoModelForMaskedLM, tmp_path / "out", capfd)
    tokens = padded_batch()
    real = tokens != 1
    expected = compute_logits(tmp_path / "converted" / "model.pt", tokens)
    for _ in each_implementation(model, monkeypatch):
        with torch.no_grad():
            actual = model(tokens, attention_mask=real.long()).logits
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


def test_classifier_is_loaded_completely(tmp_path, monkeypatch, capfd):
    data = make_classification(tmp_path / "data", names=("bad", "good"))
    options = (*CLASSIFICATION, *LLN, "--attention", "lln_diag")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *options)
    checkpoint = add_noise(tmp_path / "run" / "checkpoint_last.pt")
    export(checkpoint, tmp_path / "out")
    model = load_completely(AutoModelForSequenceClassification, tmp_path / "out", capfd)
    tokens = padded_batch()
    expected = compute_logits(checkpoint, tokens, "sentence_classification_head")
    for _ in each_implementation(model, monkeypatch):
        with torch.no_grad():
            actual = model(tokens, attention_mask=(tokens != 1).long()).logits
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_mask_of_layers_does_not_grow_with_the_square_of_the_length(encoders):
    _, exported = encoders("lln_diag")
    model = AutoModel.from_pretrained(exported, trust_remote_code=True).eval()
    shapes = []

    def record(module, args, kwargs):
        shapes.append(kwargs.get("attention_mask", args[1] if len(args) > 1 else None).shape)

    model.encoder.layer[0].attention.self.register_forward_pre_hook(record, with_kwargs=True)
    tokens = torch.full((2, 9), 5)
    model(tokens)
    model(tokens, attention_mask=torch.ones(2, 9))
    model(inputs_embeds=torch.zeros(2, 9, 32))
    assert shapes == [(2, 1, 1, 9)] * 3


def random_batch(sequences, length):
    """Return tokens (sequences, length) and their mask, with more padding in every further sequence."""
    tokens = torch.randint(4, 70, (sequences, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(tokens)
    for row in range(sequences):
        mask[row, max(1, length - row * length // sequences) :] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 1), "attention_mask": mask}


def assert_same_outputs(traced, model):
    """Compare a traced model with the model itself for lengths around those of whole blocks of 16 tokens."""
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 40):
        for sequences in (1, 3):
            batch = random_batch(sequences, length)
            real = batch["attention_mask"].bool()
            with torch.no_grad():
                actual = traced(**batch)["last_hidden_state"]
                expected = model(**batch).last_hidden_state
            torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)


NAMED = {0: Dim("batch", max=64), 1: Dim("length", max=40)}
AUTOMATIC = {0: Dim.AUTO, 1: Dim.AUTO}
if Version(torch.__version__) < Version("2.13"):  # cannot prove min(16 N, 32 N) = 16 N
    NAMED = AUTOMATIC


@pytest.mark.parametrize(("attention", "dimensions"), [("lln_diag", NAMED), ("window", AUTOMATIC)])
def test_program_of_torch_export_takes_every_length(attention, dimensions, encoders):
    model = AutoModel.from_pretrained(encoders(attention)[1], trust_remote_code=True).eval()
    model.encoder.layer = model.encoder.layer[:1]
    batch = random_batch(2, 36)
    program = torch.export.export(model, (), batch, dynamic_shapes=dict.fromkeys(batch, dimensions))
    assert_same_outputs(program.module(), model)


def test_first_trace_of_a_process_is_like_the_second(encoders):
    model = AutoModel.from_pretrained(encoders("lln_diag")[1], trust_remote_code=True).eval()
    calibration_table.cache_clear()
    traced = torch.jit.trace(model, example_kwarg_inputs=random_batch(2, 36), strict=False)
    assert_same_outputs(traced, model)


def test_mask_of_another_length_is_rejected(encoders):
    model = AutoModel.from_pretrained(encoders("lln_diag")[1], trust_remote_code=True).eval()
    with pytest.raises(ValueError, match=r"got a mask of shape \(1, 4\) for \(1, 5\) tokens"):
        model(torch.full((1, 5), 7), attention_mask=torch.ones(1, 4))


def test_transformers_that_cannot_be_imported_is_reported(monkeypatch):
    """transformers 5 imports torchaudio, which fairseq requires and which may be built for another torch."""

    def fail(name):
        raise OSError("Could not load this library: torchaudio/lib/_torchaudio.abi3.so")

    monkeypatch.setattr(to_onnx.importlib, "import_module", fail)
    with pytest.raises(UserError, match=r"Could not load .*so\. It does not fit .* pip uninstall torchaudio"):
        to_onnx.check_packages()
