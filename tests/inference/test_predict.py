"""Prediction from text: the outputs that `evaluate` gives for the binarized rows, vectors, and fillings of <mask>."""

import copy
import functools
import gzip
import io
import itertools
import multiprocessing
import operator
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.checkpoints.pooling import Pooling, pooling_entries
from lln_fairseq.checkpoints.reading import PLUGIN_STATE
from lln_fairseq.errors import UserError
from lln_fairseq.inference import text_model
from lln_fairseq.inference.evaluate import compute_outputs, format_predictions, load_finetuned_model
from lln_fairseq.inference.predict import _open_output, open_lines, prediction_lines
from lln_fairseq.inference.text_model import Prediction
from lln_fairseq.models.packed_linear.choice import working_way
from lln_fairseq.models.packed_linear.precisions import WAYS
from lln_fairseq.text.read_lines import MAX_LINE
from lln_fairseq.text.samples import CHUNK_TEXTS, LongTextError, SampleEncoder, split_into_chunks
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.data_prep.conftest import TEXT, small_gpt2
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, USER_DIR, make_classification, train
from tests.text_runs import OPTIONS, make_glue, texts_of
from tests.text_runs import WORDS as WORDS_OF_TEXT

SPECIAL_COUNT = 4  # symbol i of dict.txt has the id 4 + i


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    """Return a directory with a small data set for each task of OPTIONS."""
    return make_glue(tmp_path_factory.mktemp("glue"), *OPTIONS)


@pytest.fixture(scope="module")
def runs(glue, tmp_path_factory):
    """Return a fine-tuned checkpoint by the name of each task, and a pre-trained one by the name "lm"."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, options in OPTIONS.items():
            arguments = (*CLASSIFICATION, *LLN, "--criterion", "lln_sentence_prediction", *options, "--lr", 0.003)
            train(monkeypatch, folder / "log", glue / name, folder / name, *arguments, "--max-update", 12)
        corpus = shutil.copytree(glue / "SST-2/input0", folder / "corpus")
        shutil.copy(glue / "spm.model", corpus)
        train(monkeypatch, folder / "log", corpus, folder / "lm", *MASKED_LM, *LLN, "--max-update", 40, "--lr", 0.003)
    return {name: folder / name / "checkpoint_last.pt" for name in [*OPTIONS, "lm"]}


@pytest.fixture(scope="module")
def loaded(runs):
    """Return a function that loads a checkpoint of `runs` by its name, once. Do not change the model."""
    return functools.cache(lambda name: load(runs[name]))


@pytest.fixture
def sst2_texts(glue):
    return [row[0] for row in texts_of(glue, "SST-2")]


def predict(capsys, *arguments):
    """Run `lln-fairseq predict` and return its exit code, standard output and standard error."""
    code = main(["predict", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def encode(capsys, *arguments):
    """Run `lln-fairseq encode` and return its exit code, standard output and standard error."""
    code = main(["encode", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def labels_of(predictions):
    return [prediction.label for prediction in predictions]


def unpickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
def test_copies_compute_the_same_and_share_nothing(copied, precision, runs, glue, monkeypatch):
    monkeypatch.setenv("LLN_LINEAR", "torch,int_mm")
    pairs = texts_of(glue, "RTE")
    model = load(runs["RTE"], precision=precision)
    expected = model.predict(pairs)

    twin = copied(model)

    assert twin.predict(pairs) == expected
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert {prediction.probability for prediction in twin.predict(pairs)} == {0.5}
    assert model.predict(pairs) == expected


@pytest.mark.exhaustive
def test_spawned_process_receives_a_model(loaded, sst2_texts):
    model = loaded("SST-2")
    # A built-in function, so that the process imports this package only because of the model.
    predict_texts = operator.methodcaller("predict", sst2_texts)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        predictions = pool.submit(predict_texts, model).result(timeout=120)
    assert labels_of(predictions) == labels_of(model.predict(sst2_texts))
    probabilities = [prediction.probability for prediction in predictions]
    assert probabilities == pytest.approx([prediction.probability for prediction in model.predict(sst2_texts)])


@pytest.mark.parametrize("name", OPTIONS)
def test_predictions_from_text_equal_those_of_evaluate(name, glue, runs, loaded):
    model, task = load_finetuned_model(str(runs[name]), str(glue / name))
    outputs = compute_outputs(model, task, "valid")
    texts = [row if len(row) > 1 else row[0] for row in texts_of(glue, name)]

    predictions = loaded(name).predict(texts)

    if name == "STS-B":
        torch.testing.assert_close(torch.tensor(predictions), outputs.logits.view(-1))
        return
    assert labels_of(predictions) == format_predictions(task, outputs)
    probabilities = torch.tensor([prediction.probability for prediction in predictions])
    torch.testing.assert_close(probabilities, outputs.logits.softmax(dim=-1).amax(dim=-1))


def test_moved_run_predicts_without_its_data(runs, glue, sst2_texts, tmp_path):
    expected = load(runs["SST-2"]).predict(sst2_texts)
    checkpoint = shutil.copytree(runs["SST-2"].parent, tmp_path / "elsewhere") / "checkpoint_last.pt"
    hidden = glue.rename(glue.with_name("hidden"))
    try:
        assert load(checkpoint).predict(sst2_texts) == expected
        shutil.rmtree(checkpoint.parent / "tokenizer")
        with pytest.raises(
            UserError, match=r"nor its training data has a dict\.txt\. Pass the training data \(--data\)$"
        ):
            load(checkpoint)
        assert load(checkpoint, data=hidden / "SST-2").predict(sst2_texts) == expected
    finally:
        hidden.rename(glue)
    assert load(checkpoint).predict(sst2_texts) == expected


def test_model_of_stock_task_predicts(glue, sst2_texts, tmp_path, monkeypatch):
    options = ["sentence_prediction" if option == "lln_sentence_prediction" else option for option in CLASSIFICATION]
    stock = (*options, *USER_DIR, "--arch", "roberta", "--max-update", 2, "--max-positions", 20)
    train(monkeypatch, tmp_path / "log", glue / "SST-2", tmp_path / "run", *stock, "--shorten-method", "truncate")
    checkpoint = str(tmp_path / "run/checkpoint_last.pt")
    model, task = load_finetuned_model(checkpoint)
    outputs = compute_outputs(model, task, "valid")
    predictions = load(checkpoint).predict(sst2_texts)
    assert labels_of(predictions) == format_predictions(task, outputs)
    probabilities = torch.tensor([prediction.probability for prediction in predictions])
    torch.testing.assert_close(probabilities, outputs.logits.softmax(dim=-1).amax(dim=-1))


def test_prediction_does_not_depend_on_other_texts(loaded, sst2_texts):
    model = loaded("SST-2")
    separately = [model.predict([text])[0] for text in sst2_texts]
    together = model.predict(iter(sst2_texts * 80))
    assert len(together) == 80 * len(sst2_texts) > CHUNK_TEXTS
    for actual, expected in zip(together, separately * 80, strict=True):
        assert actual.label == expected.label
        assert actual.probability == pytest.approx(expected.probability, abs=1e-5)


@pytest.mark.parametrize("way", ["onednn", "bfloat16", "int_mm"])
def test_vectors_do_not_depend_on_other_texts(way, runs, sst2_texts, monkeypatch):
    if working_way(WAYS[way], torch.randn(64, 64), torch.zeros(64)) is None:
        pytest.skip(f"{way} does not work on this processor")
    monkeypatch.setenv("LLN_LINEAR", f"torch,{way}" if way != "onednn" else way)
    model = load(runs["SST-2"], precision=WAYS[way].precision)
    separately = torch.cat([model.encode([text]) for text in sst2_texts])
    torch.testing.assert_close(model.encode(sst2_texts), separately)


def test_model_in_8_bits_agrees_with_float(runs, loaded, sst2_texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LLN_LINEAR", "torch,int_mm")
    model = load(runs["SST-2"], precision="int8")
    assert model.precision == "int8"
    vectors = model.encode(sst2_texts)
    cosine = torch.cosine_similarity(vectors, loaded("SST-2").encode(sst2_texts))
    assert cosine.min() > 0.99
    assert not torch.equal(vectors, loaded("SST-2").encode(sst2_texts))

    (tmp_path / "in").write_text("\n".join(sst2_texts), encoding="utf-8")
    files = ["--input", tmp_path / "in", "--output", tmp_path / "out.npy"]
    assert encode(capsys, runs["SST-2"], "--precision", "int8", *files) == (0, "", "")
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "out.npy")), vectors)
    code, out, _ = predict(capsys, runs["SST-2"], "--precision", "int8", "--input", tmp_path / "in")
    assert code == 0
    assert [line.split("\t")[0] for line in out.splitlines()] == labels_of(model.predict(sst2_texts))


def test_model_is_loaded_to_the_named_device(runs, loaded, sst2_texts, monkeypatch):
    expected = loaded("SST-2").predict(sst2_texts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load(runs["SST-2"], device="cpu").predict(sst2_texts) == expected
    with pytest.raises(UserError, match=r"^device must be cpu or a GPU of this machine, got 'cuda:77'"):
        load(runs["SST-2"], device="cuda:77")


def test_predict_takes_unusual_texts(loaded):
    model = loaded("SST-2")
    assert model.predict([]) == []
    assert model.predict(["film\r\n\nstory "]) == model.predict(["film story"])
    empty, long = model.predict(["", "film " * 5000])
    assert isinstance(empty, Prediction)
    assert isinstance(long, Prediction)


LONG = "film " * 70  # the models take 64 tokens


def warnings_about_cuts(caplog):
    """Return the warnings that say how much was cut, and forget them."""
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return [message for message in messages if "cut" in message]


@pytest.mark.parametrize(
    ("name", "act", "count", "dropped"),
    [
        ("SST-2", lambda model, long: model.predict(["film", long, long]), "2 of 3", 2 * (70 + 2 - 64)),
        ("RTE", lambda model, long: model.predict([("a", "b"), ("film", long)]), "1 of 2", None),
        ("lm", lambda model, long: model.encode([long]), "1 of 1", 70 + 2 - 64),
        ("lm", lambda model, long: model.fill(f"a <mask> {long}"), "1 of 1", None),
        ("SST-2", lambda model, long: list(model.predict_each([long])), "1 of 1", 70 + 2 - 64),
    ],
)
def test_cut_texts_are_reported_once_per_call(name, act, count, dropped, loaded, caplog):
    model = loaded(name)
    caplog.clear()

    act(model, LONG)

    (message,) = warnings_about_cuts(caplog)
    assert message.startswith(f"cut {count} texts to the 64 tokens that the model takes: ")
    assert int(re.search(r"(\d+) tokens were dropped", message)[1]) == (dropped or pytest.approx(10, abs=4))
    act(model, "film " * 50)
    assert warnings_about_cuts(caplog) == []


def test_stream_reports_cut_texts_when_it_is_left(loaded, caplog):
    stream = loaded("SST-2").predict_each(itertools.cycle(["film", LONG]))
    assert len(list(itertools.islice(stream, 5))) == 5
    assert warnings_about_cuts(caplog) == []
    stream.close()
    (message,) = warnings_about_cuts(caplog)
    assert f"cut {CHUNK_TEXTS // 2} of {CHUNK_TEXTS} texts" in message


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("SST-2", lambda model, texts: model.predict(texts, on_long="error")),
        ("lm", lambda model, texts: model.encode(texts, on_long="error")),
    ],
)
def test_long_text_is_rejected_before_anything_is_computed(name, act, loaded, monkeypatch):
    model = loaded(name)
    act(model, ["film"])
    monkeypatch.setattr("lln_fairseq.text.samples.CHUNK_TEXTS", 2)
    monkeypatch.setattr(model, "_map_samples", lambda *arguments: pytest.fail("the model computes"))
    with pytest.raises(LongTextError, match=r"texts\[4\] has 72 tokens, but the model takes at most 64") as caught:
        act(model, iter(["film", "story", "film", "story", LONG, "film"]))
    assert (caught.value.index, caught.value.length, caught.value.longest) == (4, 72, 64)


def test_stream_rejects_long_text(loaded, monkeypatch):
    monkeypatch.setattr("lln_fairseq.text.samples.CHUNK_TEXTS", 2)
    stream = loaded("SST-2").predict_each(["film", "story", LONG], on_long="error")
    assert isinstance(next(stream), Prediction)
    next(stream)
    with pytest.raises(LongTextError, match=r"texts\[2\] has 72 tokens"):
        next(stream)


def make_rotary(path, folder):
    """Write a copy of a checkpoint with rotary positions, which have no parameters, and return its path."""
    shutil.copytree(path.parent / "tokenizer", folder / "tokenizer")
    state = torch.load(path, weights_only=False)
    state["cfg"]["model"]["rotary"] = True
    torch.save(state, folder / path.name)
    return folder / path.name


def test_rotary_model_takes_longer_texts(runs, tmp_path, caplog):
    path = make_rotary(runs["lm"], tmp_path)
    model = load(path, positions=200)

    (long,) = model.encode([LONG], pooling="tokens", on_long="error")

    assert len(long.vectors) == 72
    attention = model.model.encoder.sentence_encoder.layers[0].self_attn
    assert attention.rotary_base == pytest.approx(10000 * (200 / 64) ** (attention.head_dim / (attention.head_dim - 2)))
    table = model.model.encoder.sentence_encoder.embed_positions.weight
    trained = load(path).model.encoder.sentence_encoder.embed_positions.weight
    assert torch.equal(table[:66], trained)
    torch.testing.assert_close(table[66:], trained[2:].mean(dim=0).expand(136, -1))
    assert len(model.fill(f"{LONG} <mask>", on_long="error")) == 5  # a <mask> beyond the trained positions
    expected = load(path).encode(["a wonderful film"])
    torch.testing.assert_close(load(path, positions=64).encode(["a wonderful film"]), expected)
    assert warnings_about_cuts(caplog) == []


def test_programs_take_positions_of_a_rotary_classifier(runs, glue, tmp_path, capsys, caplog):
    path = make_rotary(runs["SST-2"], tmp_path)
    (tmp_path / "in").write_text(f"{LONG}\n")
    arguments = (path, "--input", tmp_path / "in", "--on-long", "error")

    assert predict(capsys, *arguments)[0] == 1
    code, printed, _ = predict(capsys, *arguments, "--positions", 72)

    assert code == 0
    model = load(path, positions=72)
    ((label, probability),) = model.predict([LONG])
    assert printed == f"{label}\t{probability:.6f}\n"
    assert encode(capsys, *arguments, "--output", tmp_path / "out", "--positions", 72)[0] == 0
    assert np.array_equal(np.load(tmp_path / "out"), model.encode([LONG]).numpy())
    assert warnings_about_cuts(caplog) == []
    assert main(["evaluate", str(path), str(glue / "SST-2"), "--positions", "72"]) == 0
    _, task = load_finetuned_model(str(path), str(glue / "SST-2"), positions=72)
    assert task.max_positions() == 72
    with pytest.raises(UserError, match="positions must be a whole number of at least 1, got '72'"):
        load(path, positions="72")


def test_training_mode_does_not_change_outputs(runs):
    model = load(runs["SST-2"])
    expected = (model.predict(["a wonderful film"]), model.encode(["a wonderful film"]))

    model.train()

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) or type(module).__name__ == "FairseqDropout":
            module.p = 0.9
    assert model.predict(["a wonderful film"]) == expected[0]
    assert torch.equal(model.encode(["a wonderful film"]), expected[1])
    assert model.model.training


@pytest.mark.parametrize(("positions", "message"), [(200, "has no rotary positions"), (0, "at least 1, got 0")])
def test_positions_that_cannot_be_had_are_rejected(positions, message, runs):
    with pytest.raises(UserError, match=message):
        load(runs["lm"], positions=positions)


def test_evaluation_reports_share_of_cut_rows(glue, runs, loaded, caplog):
    model, task = load_finetuned_model(str(runs["RTE"]), str(glue / "RTE"))
    caplog.clear()
    compute_outputs(model, task, "valid")
    (message,) = warnings_about_cuts(caplog)
    count, rows = re.search(r"split 'valid' of .*: (\d+) of (\d+) rows .* are cut to 64 tokens", message).groups()
    assert (int(count) > 0, rows) == (True, "30")
    assert f"({int(count) / 30:.1%})" in message
    loaded("RTE").predict(texts_of(glue, "RTE"))
    assert warnings_about_cuts(caplog)[0].startswith(f"cut {count} of 30 texts")


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        (None, lambda features: features.mean(dim=0)),
        ("cls", lambda features: features[0]),
        ("max", lambda features: features.amax(dim=0)),
    ],
)
def test_vectors_are_pooled_and_normalized(pooling, pool, loaded):
    model = loaded("lm")
    texts = ["film story", "a wonderful script. " * 3, ""]
    tokens = model.encode(texts, pooling="tokens")
    expected = torch.stack([pool(one.vectors) for one in tokens])

    vectors = model.encode(texts, pooling)
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)
    assert not vectors.requires_grad
    normalized = model.encode(texts, pooling, normalize=True)
    torch.testing.assert_close(normalized, torch.nn.functional.normalize(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack(list(model.encode_each(texts, pooling))), expected, rtol=1e-4, atol=1e-5)
    assert model.encode([], pooling).shape == (0, 32)


def test_evaluation_rejects_rows_that_are_too_long_and_not_cut(glue, runs):
    model, task = load_finetuned_model(str(runs["RTE"]), str(glue / "RTE"))
    task.cfg.shorten_method = "none"
    with pytest.raises(UserError, match=r"row \d+ of split 'valid' has \d+ tokens, but the model takes 64: fine-tune"):
        compute_outputs(model, task, "valid")


def test_model_encodes_with_stored_pooling(loaded, runs, tmp_path):
    state = torch.load(runs["lm"])
    state["extra_state"][PLUGIN_STATE] |= pooling_entries(Pooling("cls", normalize=True))
    shutil.copytree(runs["lm"].parent / "tokenizer", tmp_path / "tokenizer")
    torch.save(state, tmp_path / "checkpoint.pt")

    model = load(tmp_path / "checkpoint.pt")

    expected = loaded("lm").encode(["film"], "cls")
    torch.testing.assert_close(model.encode(["film"]), expected / expected.norm())
    torch.testing.assert_close(model.encode(["film"], normalize=False), expected)
    tokens = model.encode(["film"], "tokens")[0].vectors
    torch.testing.assert_close(tokens[:1], expected)
    with pytest.raises(UserError, match="is an encoder of sentence vectors and cannot fill"):
        model.fill("film <mask> story.")


def save_with_global_segments(checkpoint, folder, **task_options):
    """Save a copy of a checkpoint with global_tokens=first_segment and its tokenizer, and return the copy's path."""
    state = torch.load(checkpoint, weights_only=False)
    state["cfg"]["model"] |= {"lln_diag_mix": "joint_offset", "lln_diag_global_tokens": "first_segment"}
    state["cfg"]["task"] |= task_options
    shutil.copytree(checkpoint.parent / "tokenizer", folder / "tokenizer")
    torch.save(state, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def test_threads_share_a_model_with_global_segments(runs, tmp_path):
    model = load(save_with_global_segments(runs["RTE"], tmp_path))
    texts = [(" ".join(["film"] * count), "story") for count in range(1, 9)]
    expected = [model.predict([text]) for text in texts]
    barrier = threading.Barrier(len(texts))

    def wait_for_other_threads(module, inputs):
        barrier.wait(timeout=60)

    model.model.encoder.sentence_encoder.layers[0].register_forward_pre_hook(wait_for_other_threads)

    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(lambda text: model.predict([text]), texts)) == expected


def test_token_vectors_have_offsets_in_the_text(loaded):
    model = loaded("lm")
    texts = ["\n\n film\r\n\nstory,  naïve\n\n你\n\n", "film", "", LONG]

    *outputs, long = model.encode(texts, pooling="tokens")

    for text, (vectors, offsets) in zip(texts, outputs, strict=False):
        ids = model.ids.encode_rows([[text]])[0]
        features, _ = model.model(ids[None], features_only=True)
        torch.testing.assert_close(vectors, features[0], rtol=1e-4, atol=1e-5)
        assert (vectors.dtype, offsets.dtype) == (torch.float32, torch.int64)
        assert offsets.shape == (len(ids), 2)
        assert offsets[0].tolist() == offsets[-1].tolist() == [0, 0]
        parts = [text[start:end] for start, end in offsets.tolist()]
        assert "".join(parts) == "".join(text.split())
    offsets = outputs[0].offsets
    assert texts[0][offsets[1, 0] : offsets[1, 1]].startswith("f")
    assert not vectors.requires_grad
    assert long.vectors.shape == (64, 32)
    assert [LONG[start:end] for start, end in long.offsets.tolist()] == ["", *["film"] * 62, ""]
    assert model.encode([], pooling="tokens") == []
    (normalized,) = model.encode(["film"], pooling="tokens", normalize=True)
    torch.testing.assert_close(normalized.vectors.norm(dim=1), torch.ones(len(normalized.vectors)))


def test_samples_without_special_tokens_are_encoded(loaded, monkeypatch):
    model = loaded("lm")
    monkeypatch.setattr(model.ids, "init_token", None)
    monkeypatch.setattr(model.ids, "strip_eos", True)
    ((vectors, offsets),) = model.encode(["film"], pooling="tokens")
    assert (vectors.shape, offsets.tolist()) == ((1, 32), [[0, 4]])
    with pytest.raises(UserError, match="the text '' has no tokens"):
        model.encode(["film", ""])


@pytest.mark.parametrize("pooling", ["mean", "tokens"])
def test_vectors_are_computed_while_texts_are_read(pooling, loaded, monkeypatch):
    monkeypatch.setattr("lln_fairseq.text.samples.CHUNK_TEXTS", 4)
    texts_read = itertools.count()
    texts = ("film " * (next(texts_read) % 3) for _ in itertools.count())
    vectors = loaded("lm").encode_each(texts, pooling)
    assert len(list(itertools.islice(vectors, 6))) == 6
    assert next(texts_read) == 8


def test_text_of_100000_words_is_encoded(loaded):
    short, long = loaded("lm").encode([LONG, "film " * 100_000], pooling="tokens")
    torch.testing.assert_close(long.vectors, short.vectors, rtol=1e-4, atol=1e-5)
    assert torch.equal(long.offsets, short.offsets)


def test_mask_is_filled_with_most_likely_tokens(loaded):
    fillings = loaded("lm").fill("film <mask> story.", 4)
    probabilities = [filling.probability for filling in fillings]
    assert len(fillings) == 4
    assert loaded("lm").fill("film <mask> story.", np.int64(4)) == fillings
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(0 < probability <= 1 for probability in probabilities)
    for token, _, text in fillings:
        assert re.fullmatch(rf"film ?{re.escape(token)} story\.", text)


def test_mask_is_filled_with_every_token(loaded):
    fillings = loaded("lm").fill("film <mask> story.", 113)
    texts = {(filling.token, filling.text) for filling in fillings}
    assert len(texts) == 113
    assert sum(filling.probability for filling in fillings) < 1  # special symbols have the rest
    likely = {(filling.token, filling.text) for filling in fillings[:60]}
    assert ("ending", "film ending story.") in likely


def test_masked_text_keeps_ids_of_its_parts(loaded):
    model = loaded("lm")
    dictionary = model.task.source_dictionary
    pieces = model.vocabulary.tokenizer.processor.encode("film story.", out_type=str)
    end_of_film = pieces.index("▁film") + 1

    masked = [dictionary[number] for number in model.ids.encode_masked("film ", " story.").tolist()]

    assert masked == ["<s>", *pieces[:end_of_film], "<mask>", *pieces[1:], "</s>"]
    masked = [dictionary[number] for number in model.ids.encode_masked("", ".").tolist()]
    assert masked == ["<s>", "<mask>", ".", "</s>"]
    masked = [dictionary[number] for number in model.ids.encode_masked("film", "東京.").tolist()]
    assert masked == ["<s>", *pieces[:end_of_film], "<mask>", "<unk>", ".", "</s>"]


@pytest.mark.parametrize(("left", "right"), [("the film", " is."), ("", "."), ("the story", "s"), ("film", "")])
def test_masked_text_of_byte_level_bpe_keeps_its_parts(left, right, tmp_path):
    text = TEXT + " ".join(WORDS_OF_TEXT) * 2
    vocabulary = load_vocabulary(str(small_gpt2(tmp_path / "gpt2", text, merges=100)))
    mask = 999
    dictionary = SimpleNamespace(index=lambda symbol: mask, bos=lambda: 0)
    encoder = SampleEncoder(SimpleNamespace(cfg=SimpleNamespace(), source_dictionary=dictionary), vocabulary)

    ids = encoder.encode_masked(f"{left} ", right).tolist()

    place = ids.index(mask)
    assert (ids[0], ids[-1]) == (0, 2)
    assert ids[1:place] == encoder.encode_lines([left])[0][:-1].tolist()
    symbols = [vocabulary.symbols[number - SPECIAL_COUNT] for number in ids[place + 1 : -1]]
    assert "".join(vocabulary.tokenizer.symbol_text(symbol) for symbol in symbols) == right


@pytest.mark.parametrize(
    ("name", "act", "message"),
    [
        ("lm", lambda model: model.predict(["film"]), "was not fine-tuned"),
        ("SST-2", lambda model: model.fill("a <mask>"), "was fine-tuned and cannot fill"),
        ("lm", lambda model: model.fill("a film"), "one <mask>"),
        ("lm", lambda model: model.fill("film " * 100 + "<mask>"), "beyond the 64 tokens"),
        ("lm", lambda model: model.fill("<mask> film" + " film" * 70, on_long="error"), "the text has 74 tokens"),
        (
            "lm",
            lambda model: model.encode(["film"], on_long="cut"),
            "on_long must be one of truncate, error, got 'cut'",
        ),
        ("SST-2", lambda model: model.predict(["film"], on_long="cut"), "on_long must be one of truncate, error"),
        ("SST-2", lambda model: model.predict(["film", None]), r"texts\[1\] must be one text, a string, got None"),
        ("SST-2", lambda model: model.predict(None), "expected a list of texts, got None"),
        ("lm", lambda model: model.encode(["film"], pooling="sum"), "pooling must be one of mean, cls, .* got 'sum'"),
        ("lm", lambda model: model.encode("film"), "put it in a list"),
        ("lm", lambda model: model.encode(None), "expected a list of texts, got None"),
        ("lm", lambda model: model.encode(["film", None]), r"texts\[1\] must be one text, a string, got None"),
        ("lm", lambda model: model.fill(None), "one <mask>, got None"),
        ("lm", lambda model: model.fill("<mask>", 1000), "k must be between 1 and .* got 1000"),
        ("lm", lambda model: model.fill("<mask>", 2.5), "k must be a whole number, got 2.5"),
        ("SST-2", lambda model: model.predict("a film"), "put it in a list"),
        ("SST-2", lambda model: model.predict([("a", "b")]), "one text"),
        ("SST-2", lambda model: model.predict(["\ud800"]), "half of a character|surrogate"),
        ("RTE", lambda model: model.predict(["a", "b"]), "pair of texts"),
        ("RTE", lambda model: model.encode([("a", "b")]), "one text"),
        ("RTE", lambda model: model.encode([("a", "b")], pooling="tokens"), "one text"),
    ],
)
def test_wrong_use_is_reported_in_one_line(name, act, message, loaded):
    with pytest.raises(UserError, match=message) as caught:
        act(loaded(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("SST-2", lambda model: model.predict(["a film"])),
        ("lm", lambda model: model.encode(["a film"])),
        ("lm", lambda model: model.encode(["a film"], pooling="tokens")),
        ("lm", lambda model: model.fill("a <mask>")),
    ],
)
def test_outputs_that_are_not_finite_are_rejected(name, act, runs):
    model = load(runs[name])
    model.model.encoder.sentence_encoder.layers[0].fc1.bias.data.fill_(3e38)
    with pytest.raises(UserError, match=r"NaN or infinite outputs for (the text 'a film'|this text)"):
        act(model)


def test_every_line_gives_one_line(runs, sst2_texts, tmp_path, capsys):
    texts = ["", *sst2_texts, " ", "", "film", ""]
    (tmp_path / "in").write_text("\r\n".join(texts), encoding="utf-8-sig")
    (tmp_path / "out").write_text("old")

    printed = predict(capsys, runs["SST-2"], "--input", tmp_path / "in", "--output", tmp_path / "out")

    assert printed == (0, "", "")
    lines = (tmp_path / "out").read_text().split("\n")
    assert len(lines) == len(texts)  # after the end of the last line, split gives an empty string
    assert [bool(line) for line in lines] == [bool(text.strip()) for text in texts]
    expected = load(runs["SST-2"]).predict([text for text in texts if text.strip()])
    assert [line for line in lines if line] == [f"{one.label}\t{one.probability:.6f}" for one in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_long_lines_are_reported_or_rejected(runs, tmp_path, capsys, caplog):
    (tmp_path / "in").write_text(f"\nfilm\n\n\n{LONG}\nfilm\n")
    arguments = (runs["SST-2"], "--input", tmp_path / "in", "--output", tmp_path / "out")

    assert predict(capsys, *arguments, "--on-long", "error") == (
        1,
        "",
        "error: line 5 has 72 tokens, but the model takes at most 64\n",
    )
    assert not (tmp_path / "out").exists()
    assert warnings_about_cuts(caplog) == []

    assert predict(capsys, *arguments)[0] == 0
    assert [bool(line) for line in (tmp_path / "out").read_text().splitlines()] == [
        False,
        True,
        False,
        False,
        True,
        True,
    ]
    (message,) = warnings_about_cuts(caplog)
    assert message.startswith("cut 1 of 3 texts to the 64 tokens")


BAD_LINES = {2: b"\xff film", 4: b"film\tstory", 5: b"x" * (MAX_LINE + 9), 6: LONG.encode()}  # number: content


@pytest.fixture
def bad_input(tmp_path):
    """A gzip file with BAD_LINES among lines without errors, of which the third and the seventh are empty."""
    lines = [BAD_LINES.get(number, b"a film" if number % 4 != 3 else b"") for number in range(1, 10)]
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    return path


def test_lines_with_errors_keep_their_place(bad_input, runs, loaded, capsys, caplog):
    options = ("--input", bad_input, "--on-error", "row", "--on-long", "error")

    code, output, errors = predict(capsys, runs["SST-2"], *options)

    assert (code, errors) == (0, "")
    (prediction,) = loaded("SST-2").predict(["a film"])
    messages = {
        2: f"{bad_input}, line 2: not UTF-8 (invalid start byte at byte 0)",
        4: "line 4 must be one text without tabs, got 2 columns",
        5: f"{bad_input}, line 5: more than 4 MiB; break it into shorter lines",
        6: "the text has 72 tokens, but the model takes at most 64",
    }
    for number, line in enumerate(output.removesuffix("\n").split("\n"), start=1):
        if number in messages:
            assert line == f"\t\t{messages[number]}"
        elif number in (3, 7):
            assert line == ""
        else:
            assert line == f"{prediction.label}\t{prediction.probability:.6f}"
    assert number == 9
    assert caplog.messages[-1] == "4 of 9 lines have an error instead of an output"
    assert predict(capsys, runs["SST-2"], "--input", bad_input)[0] == 1


def test_vectors_of_lines_with_errors_are_nan(bad_input, runs, loaded, tmp_path, capsys, caplog):
    output = tmp_path / "out.npy"
    options = ("--input", bad_input, "--output", output, "--on-error", "row", "--on-long", "error")

    assert encode(capsys, runs["SST-2"], *options) == (0, "", "")

    vectors = torch.from_numpy(np.load(output))
    film, pair, empty = loaded("SST-2").encode(["a film", "film\tstory", ""])
    for number, vector in enumerate(vectors, start=1):
        if number in (2, 5, 6):
            assert vector.isnan().all()
        else:
            torch.testing.assert_close(vector, {3: empty, 4: pair, 7: empty}.get(number, film))
    assert len(vectors) == 9
    assert "no vector for line 6: the text has 72 tokens, but the model takes at most 64" in caplog.messages


def test_texts_with_errors_do_not_change_others(loaded, monkeypatch):
    """A tokenizer that rejects some texts, and outputs that are not finite for others."""
    model = loaded("SST-2")
    texts = [f"film {number}" for number in range(40)]
    expected = list(model.predict_each(texts))
    encode_lines = model.ids.encode_lines

    def reject_some(lines):
        if any(line in ("film 7", "film 8", "film 39") for line in lines):
            raise UserError("rejected")
        return encode_lines(lines)

    def infinite_for_some(output, name):
        if name == "the text 'film 11'":
            raise UserError("infinite")

    monkeypatch.setattr(model.ids, "encode_lines", reject_some)
    monkeypatch.setattr(text_model, "require_finite", infinite_for_some)

    outputs = list(model.predict_each(texts, on_error="row"))

    messages = {7: "rejected", 8: "rejected", 39: "rejected", 11: "infinite"}
    assert {n: str(output) for n, output in enumerate(outputs) if isinstance(output, UserError)} == messages
    for number, output in enumerate(outputs):
        if number not in messages:
            assert output.label == expected[number].label
            assert output.probability == pytest.approx(expected[number].probability, abs=1e-5)
    with pytest.raises(UserError, match="rejected"):
        list(model.predict_each(texts))


def test_tokens_of_a_batch_can_be_chosen(loaded, monkeypatch):
    model = loaded("SST-2")
    sizes = []
    monkeypatch.setattr(model, "batch_tokens", 40)
    class_logits = model._class_logits

    def record_size(tokens):
        sizes.append(tokens.numel())
        return class_logits(tokens)

    monkeypatch.setattr(model, "_class_logits", record_size)
    model.predict(["film " * length for length in range(1, 60)])
    assert len(sizes) > 30
    assert all(size <= 40 for size in sizes[:10])


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"text", lambda data: data[:40] + b"x" * 99])
def test_damaged_gzip_file_is_rejected_in_one_line(damage, runs, tmp_path, capsys):
    path = tmp_path / "in.gz"
    path.write_bytes(damage(gzip.compress(random.Random(1).randbytes(999).hex().encode())))

    code, _, errors = predict(capsys, runs["SST-2"], "--input", path)

    assert code == 1
    assert errors.startswith(f"error: {path} is not a complete gzip file: ")
    assert errors.count("\n") == 1


def test_pairs_are_scored_through_pipes(runs, glue, monkeypatch, capsys):
    pairs = texts_of(glue, "STS-B", "test")
    text = "\n".join("\t".join(pair) for pair in pairs)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    code, output, errors = predict(capsys, runs["STS-B"])

    assert (code, errors) == (0, "")
    expected = load(runs["STS-B"]).predict(pairs)
    assert [float(line) for line in output.splitlines()] == pytest.approx(expected, abs=1e-5)


def test_tab_alone_is_a_pair_of_empty_texts(runs, loaded, tmp_path, capsys):
    (tmp_path / "in").write_text("film\tstory\n\t\n \n\tstory\nfilm\t\n")

    code, output, errors = predict(capsys, runs["STS-B"], "--input", tmp_path / "in")

    assert (code, errors) == (0, "")
    expected = loaded("STS-B").predict([("film", "story"), ("", ""), ("", "story"), ("film", "")])
    lines = output.splitlines()
    assert lines.pop(2) == ""
    assert [float(line) for line in lines] == pytest.approx(expected, abs=1e-5)


def test_lines_are_read_a_few_thousand_ahead():
    lines_read = 0

    class Model:
        inputs = (1,)

        def predict_each(self, texts, **options):
            for part in split_into_chunks(texts):
                yield from [Prediction("a", 0.5)] * len(part)

    def endless_lines():
        nonlocal lines_read
        for lines_read in itertools.count(1):
            yield "x" if lines_read % 3 else ""

    output = list(itertools.islice(prediction_lines(Model(), endless_lines()), 9000))

    assert [bool(line) for line in output] == [number % 3 != 0 for number in range(1, 9001)]
    assert lines_read < 9000 + 2 * CHUNK_TEXTS


def test_long_line_after_predictions_is_named():
    class Model:
        inputs = (1,)

        def predict_each(self, texts, **options):
            list(texts)
            yield from [0.5] * 2
            raise LongTextError("texts[3]", 3, 72, 64)

    lines = ["", "a", "b", "", "c", "", "long", "d"]

    with pytest.raises(LongTextError, match="line 7 has 72 tokens"):
        list(prediction_lines(Model(), lines, "error"))


@pytest.mark.parametrize("options", [{}, {"pooling": "max", "normalize": True}])
def test_every_line_gives_one_row(options, runs, loaded, tmp_path, capsys, caplog):
    texts = ["film\tstory", "", "naïve 你", LONG] * 30
    (tmp_path / "in").write_text("\r\n".join(texts), encoding="utf-8-sig")
    (tmp_path / "out.npy").write_text("old")
    arguments = [f"--pooling={options['pooling']}", "--normalize"] if options else []

    assert encode(capsys, runs["lm"], "--input", tmp_path / "in", "--output", tmp_path / "out.npy", *arguments) == (
        0,
        "",
        "",
    )
    (message,) = warnings_about_cuts(caplog)
    assert message.startswith("cut 30 of 120 texts")
    vectors = np.load(tmp_path / "out.npy")
    assert (vectors.shape, vectors.dtype) == ((120, 32), np.float32)
    torch.testing.assert_close(torch.from_numpy(vectors), loaded("lm").encode(texts, **options))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.npy"]


def test_empty_file_gives_no_vectors(runs, tmp_path, capsys):
    (tmp_path / "in").write_text("")
    assert encode(capsys, runs["lm"], "--input", tmp_path / "in", "--output", tmp_path / "out.npy")[0] == 0
    assert np.load(tmp_path / "out.npy").shape == (0, 32)


def test_vectors_are_not_written_to_a_device(tmp_path, capsys):
    code, _, errors = encode(capsys, "unread.pt", "--input", tmp_path / "in", "--output", "/dev/null")
    assert (code, errors) == (1, "error: --output must be a file, got /dev/null\n")


@pytest.mark.parametrize(
    ("program", "name", "content", "message"),
    [
        (predict, "SST-2", b"a film\ta story\n", "line 1 must be one text without tabs, got 2 columns"),
        (predict, "RTE", b"a\tb\n\nalone\n", "line 3 must be two texts separated by a tab, got 1 columns"),
        (predict, "SST-2", b"good\nb\xff\n", "line 2: not UTF-8"),
        (encode, "lm", b"good\nb\xff\n", "line 2: not UTF-8"),
        (encode, "lm", f"film\n\n{LONG}\n".encode(), "line 3 has 72 tokens, but the model takes at most 64"),
    ],
)
def test_bad_line_is_reported_and_output_is_kept(program, name, content, message, runs, tmp_path, capsys):
    (tmp_path / "in").write_bytes(content)
    (tmp_path / "out").write_text("old")
    files = ("--input", tmp_path / "in", "--output", tmp_path / "out")

    code, output, errors = program(capsys, runs[name], *files, "--on-long", "error")

    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("error: ")
    assert message in errors
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_streams_that_the_shell_has_closed_are_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(UserError, match="standard input is closed: give --input FILE"), open_lines("-"):
        pass
    with pytest.raises(UserError, match="standard output is closed: give --output FILE"), _open_output("-"):
        pass


@pytest.mark.parametrize("program", ["predict", "encode"])
def test_output_onto_the_input_is_rejected(program, runs, tmp_path, capsys):
    (tmp_path / "in").write_text("good\n")
    (tmp_path / "link").symlink_to("in")

    code = main([program, str(runs["SST-2"]), "--input", f"{tmp_path}/link", "--output", f"{tmp_path}/in"])

    assert code == 1
    assert capsys.readouterr().err.startswith("error: --output would replace the texts of --input, ")
    assert (tmp_path / "in").read_text() == "good\n"


def test_missing_and_unsuitable_tokenizers_are_rejected(tmp_path, monkeypatch, glue):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, "--max-update", 1)
    checkpoint = tmp_path / "run/checkpoint_last.pt"
    with pytest.raises(UserError, match=r"run/tokenizer .*spm.model.*--tokenizer"):
        load(checkpoint)
    with pytest.raises(UserError, match="other symbols than the dictionary"):
        load(checkpoint, tokenizer=glue / "spm.model")
    with pytest.raises(UserError, match="no such tokenizer: nowhere"):
        load(checkpoint, tokenizer="nowhere")
    with pytest.raises(UserError, match=r"the dictionary of .* is not the one"):
        load(checkpoint, data=glue / "SST-2")
    with pytest.raises(UserError, match="no such checkpoint"):
        load(tmp_path / "nowhere.pt")


@pytest.fixture
def predict_many_lines(runs, tmp_path):
    """Return a command that predicts more lines than a pipe holds."""
    (tmp_path / "in").write_text("film\n" * 12_000)
    return [sys.executable, "-m", "lln_fairseq", "predict", runs["SST-2"], "--input", tmp_path / "in"]


@pytest.mark.exhaustive
def test_closed_pipe_ends_without_a_word(predict_many_lines):
    child = subprocess.Popen(predict_many_lines, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline().count("\t") == 1
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == 141


@pytest.mark.exhaustive
def test_device_can_be_output(predict_many_lines):
    command = [*predict_many_lines, "--output", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
