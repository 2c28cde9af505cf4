"""Text in, labels out: as many and the same as evaluate gives for the binarised rows."""

import io
import itertools
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lln_fairseq import load
from lln_fairseq.__main__ import main
from lln_fairseq.command import UserError
from lln_fairseq.data.text_ids import CHUNK_TEXTS, TextIds, split_into_chunks
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.errors import InputError
from lln_fairseq.inference import evaluate
from lln_fairseq.inference.predict import predictions
from lln_fairseq.inference.text_model import Prediction
from tests.data_prep.conftest import TEXT, small_gpt2
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, USER_DIR, WORDS, make_classification, train
from tests.text_runs import OPTIONS, make_glue, texts_of
from tests.text_runs import WORDS as WORDS_OF_TEXT

SPLITS = {"valid": "dev", "test": "test"}


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return make_glue(tmp_path_factory.mktemp("glue"), *OPTIONS)


@pytest.fixture(scope="module")
def runs(glue, tmp_path_factory):
    """A checkpoint by the name of its task; WikiText's stands for a pre-training."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, options in OPTIONS.items():
            arguments = (*CLASSIFICATION, *LLN, "--criterion", "lln_sentence_prediction", *options, "--lr", 0.003)
            train(monkeypatch, folder / "log", glue / name, folder / name, *arguments, "--max-update", 12)
        lm = shutil.copytree(glue / "SST-2/input0", folder / "corpus")
        shutil.copy(glue / "spm.model", lm)
        train(monkeypatch, folder / "log", lm, folder / "lm", *MASKED_LM, *LLN, "--max-update", 40, "--lr", 0.003)
    return {name: folder / name / "checkpoint_last.pt" for name in [*OPTIONS, "lm"]}


def said_by(capsys, *arguments):
    code = main(["predict", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_predictions_from_text_are_those_of_evaluate(name, split, glue, runs):
    model, task = evaluate.load(str(runs[name]), str(glue / name))
    outputs = evaluate.run(model, task, split)
    texts = [row if len(row) > 1 else row[0] for row in texts_of(glue, name, SPLITS[split])]
    found = load(runs[name]).predict(texts)
    if name == "STS-B":
        torch.testing.assert_close(torch.tensor(found), outputs.logits.view(-1))
    else:
        assert [one.label for one in found] == evaluate.predictions(task, outputs)
        torch.testing.assert_close(torch.tensor([one.probability for one in found]),
                                   outputs.logits.softmax(dim=-1).amax(dim=-1))  # fmt: skip


def test_a_run_predicts_wherever_it_is_and_without_its_data(runs, glue, tmp_path, monkeypatch):
    texts = [row[0] for row in texts_of(glue, "SST-2")]
    expected = load(runs["SST-2"]).predict(texts)
    moved = shutil.copytree(runs["SST-2"].parent, tmp_path / "elsewhere")
    hidden = glue.rename(glue.with_name("hidden"))
    try:
        assert load(moved / "checkpoint_last.pt").predict(texts) == expected
        shutil.rmtree(moved / "tokenizer")
        with pytest.raises(InputError, match=r"neither its directory nor its training's has a dict.txt.*--tokenizer"):
            load(moved / "checkpoint_last.pt")
        assert load(moved / "checkpoint_last.pt", data=hidden / "SST-2").predict(texts) == expected
    finally:
        hidden.rename(glue)
    assert load(moved / "checkpoint_last.pt").predict(texts) == expected


def test_a_model_of_fairseqs_own_task_predicts_too(glue, tmp_path, monkeypatch):
    options = ["sentence_prediction" if x == "lln_sentence_prediction" else x for x in CLASSIFICATION]
    train(monkeypatch, tmp_path / "log", glue / "SST-2", tmp_path / "run", *options, *USER_DIR, "--arch", "roberta",
          "--max-update", 2)  # fmt: skip
    checkpoint = str(tmp_path / "run/checkpoint_last.pt")
    model, task = evaluate.load(checkpoint)
    found = load(checkpoint).predict(row[0] for row in texts_of(glue, "SST-2"))
    assert [one.label for one in found] == evaluate.predictions(task, evaluate.run(model, task, "valid"))


def test_any_number_of_texts_in_any_order(runs, glue):
    model = load(runs["SST-2"])
    texts = [row[0] for row in texts_of(glue, "SST-2")]
    alone = [model.predict([text])[0] for text in texts]
    together = model.predict(iter(texts * 80))
    assert len(together) == 80 * len(texts) > CHUNK_TEXTS
    for one, other in zip(alone * 80, together, strict=True):
        assert one.label == other.label
        assert one.probability == pytest.approx(other.probability, abs=1e-5)
    assert model.predict([]) == []
    assert model.predict(["film\nstory "]) == model.predict(["film story"])
    assert isinstance(model.predict(["", "film " * 5000])[1], Prediction)


def test_a_vector_is_the_mean_over_the_tokens(runs):
    model = load(runs["lm"])
    texts = ["film story", "a wonderful script. " * 3, ""]
    vectors = model.encode(texts)
    assert vectors.shape == (3, 32)
    assert vectors.dtype == torch.float32
    for text, vector in zip(texts, vectors, strict=True):
        ids = model.ids.encode_rows([[text]])[0]
        features, _ = model.model(ids[None], features_only=True)
        torch.testing.assert_close(vector, features[0].mean(dim=0), rtol=1e-4, atol=1e-5)
    assert model.encode([]).shape == (0, 32)
    assert load(runs["SST-2"]).encode(["film"]).shape == (1, 32)
    assert not vectors.requires_grad


def test_a_mask_is_filled_with_tokens_of_the_text(runs):
    model = load(runs["lm"])
    found = model.fill("film <mask> story.", 4)
    assert [one.probability for one in found] == sorted((one.probability for one in found), reverse=True)
    assert all(0 < one.probability <= 1 for one in found)
    for token, _, text in found:
        assert re.fullmatch(rf"film ?{re.escape(token)} story\.", text)
    assert ("ending", "film ending story.") in {(one.token, one.text) for one in model.fill("film <mask> story.", 60)}
    everything = model.fill("film <mask> story.", 113)
    assert len({(one.token, one.text) for one in everything}) == 113
    assert sum(one.probability for one in everything) < 1  # special symbols have the rest
    ids = model.ids.encode_masked("film ", " story.")
    pieces = [model.task.source_dictionary[i] for i in ids.tolist()]
    whole = model.vocabulary.tokenizer.processor.encode("film story.", out_type=str)
    assert pieces == ["<s>", *whole[: whole.index("▁film") + 1], "<mask>", *whole[1:], "</s>"]
    assert [model.task.source_dictionary[i] for i in model.ids.encode_masked("", ".").tolist()] == [
        "<s>", "<mask>", ".", "</s>",
    ]  # fmt: skip


def test_a_mask_in_byte_level_bpe(tmp_path):
    text = TEXT + " ".join(WORDS_OF_TEXT) * 2
    vocabulary = load_vocabulary(str(small_gpt2(tmp_path / "gpt2", text, merges=100)))
    dictionary = SimpleNamespace(index=lambda symbol: 999, bos=lambda: 0)
    ids = TextIds(SimpleNamespace(cfg=SimpleNamespace(), source_dictionary=dictionary), vocabulary, 64)

    def text_of(part):
        return "".join(vocabulary.tokenizer.symbol_text(vocabulary.symbols[i - 4]) for i in part)

    for left, right in (("the film", " is."), ("", "."), ("the story", "s"), ("film", "")):
        found = ids.encode_masked(f"{left} ", right).tolist()
        place = found.index(999)
        assert (found[0], found[-1]) == (0, 2)
        assert found[1:place] == ids.encode_lines([left])[0][:-1].tolist()
        assert text_of(found[place + 1 : -1]) == right


@pytest.mark.parametrize(("name", "act", "message"), [
    ("lm", lambda model: model.predict(["film"]), "was not fine-tuned"),
    ("SST-2", lambda model: model.fill("a <mask>"), "was fine-tuned and cannot fill"),
    ("lm", lambda model: model.fill("a film"), "one <mask>"),
    ("lm", lambda model: model.fill("film " * 100 + "<mask>"), "beyond the 64 tokens"),
    ("lm", lambda model: model.fill("<mask>", 1000), "k is 1000, and must be from 1 to"),
    ("SST-2", lambda model: model.predict("a film"), "put it in a list"),
    ("SST-2", lambda model: model.predict([("a", "b")]), "one text, a string"),
    ("SST-2", lambda model: model.predict(["\ud800"]), "half of a character"),
    ("RTE", lambda model: model.predict(["a", "b"]), "a pair of texts, a tuple of two"),
    ("RTE", lambda model: model.encode([("a", "b")]), "one text, a string"),
])  # fmt: skip
def test_what_a_model_cannot_do_is_said_in_one_line(name, act, message, runs):
    with pytest.raises(InputError, match=message) as caught:
        act(load(runs[name]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "act"), [
    ("SST-2", lambda model: model.predict(["a film"])),
    ("lm", lambda model: model.encode(["a film"])),
    ("lm", lambda model: model.fill("a <mask>")),
])  # fmt: skip
def test_outputs_that_are_not_finite_are_refused(name, act, runs):
    model = load(runs[name])
    model.model.encoder.sentence_encoder.layers[0].fc1.bias.data.fill_(3e38)
    with pytest.raises(InputError, match=r"NaN or infinite outputs for (the text 'a film'|this text)"):
        act(model)


def test_a_line_for_every_line(runs, glue, tmp_path, capsys):
    texts = ["", *(row[0] for row in texts_of(glue, "SST-2")), " ", "", "film", ""]
    (tmp_path / "in").write_text("\r\n".join(texts), encoding="utf-8-sig")
    (tmp_path / "out").write_text("old")
    assert said_by(capsys, runs["SST-2"], "--input", tmp_path / "in", "--output", tmp_path / "out") == (0, "", "")
    lines = (tmp_path / "out").read_text().split("\n")
    expected = load(runs["SST-2"]).predict([text for text in texts if text.strip()])
    assert len(lines) == len(texts)  # the last one is what follows the last line's end
    assert [line for line in lines if line] == [f"{one.label}\t{one.probability:.6f}" for one in expected]
    assert [bool(line) for line in lines] == [bool(text.strip()) for text in texts]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_scores_of_pairs_through_pipes(runs, glue, monkeypatch, capsys):
    pairs = texts_of(glue, "STS-B", "test")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(map("\t".join, pairs)).encode())))
    code, said, errors = said_by(capsys, runs["STS-B"])
    assert (code, errors) == (0, "")
    assert [float(line) for line in said.splitlines()] == pytest.approx(load(runs["STS-B"]).predict(pairs), abs=1e-5)


def test_memory_is_bounded_on_a_stream():
    read = 0

    class Model:
        inputs = 1

        def predict_each(self, texts):
            for part in split_into_chunks(texts):
                yield from [Prediction("a", 0.5)] * len(part)

    def lines():
        nonlocal read
        for read in itertools.count(1):
            yield read, "x" if read % 3 else ""

    found = list(itertools.islice(predictions(Model(), lines()), 9000))
    assert [bool(line) for line in found] == [number % 3 != 0 for number in range(1, 9001)]
    assert read < 9000 + 2 * CHUNK_TEXTS


def test_closed_standard_streams_end_in_one_line(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "in").write_text("film\n")
    for stream, option in (("stdin", "--input FILE"), ("stdout", "--output FILE")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, stream, None)
            assert main(["predict", str(runs["SST-2"])]) == 1
        assert f"is closed: give {option}" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    code, output, _ = said_by(capsys, runs["SST-2"], "--input", tmp_path / "in")
    assert (code, output.count("\n")) == (0, 1)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("SST-2", b"a film\ta story\n", "line 1 has 2 columns, and the model takes one text"),
    ("RTE", b"a\tb\n\nalone\n", "line 3 has 1 columns, and the model takes two texts"),
    ("SST-2", b"good\nb\xff\n", "line 2: not UTF-8"),
])  # fmt: skip
def test_bad_input_ends_in_one_line_and_leaves_the_output(name, content, message, runs, tmp_path, capsys):
    (tmp_path / "in").write_bytes(content)
    (tmp_path / "out").write_text("old")
    code, said, errors = said_by(capsys, runs[name], "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert (code, said, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("error: ")
    assert message in errors
    assert (tmp_path / "out").read_text() == "old"
    assert not list(tmp_path.glob("*.part"))


def test_data_without_a_tokenizer_and_tokenizers_that_do_not_fit(tmp_path, monkeypatch, glue):
    data = make_classification(tmp_path / "data")
    train(monkeypatch, tmp_path / "log", data, tmp_path / "run", *CLASSIFICATION, *LLN, "--max-update", 1)
    checkpoint = tmp_path / "run/checkpoint_last.pt"
    with pytest.raises(InputError, match=r"run/tokenizer holds neither .* nor spm.model.*--tokenizer"):
        load(checkpoint)
    with pytest.raises(InputError, match="other symbols than the dictionary"):
        load(checkpoint, tokenizer=glue / "spm.model")
    with pytest.raises(InputError, match="no such file or directory"):
        load(checkpoint, tokenizer="nowhere")
    with pytest.raises(InputError, match=r"the dictionary of .* is not the one"):
        load(checkpoint, data=glue / "SST-2")
    with pytest.raises(InputError, match="no such checkpoint"):
        load(tmp_path / "nowhere.pt")
    assert len(WORDS) == 60
    assert issubclass(InputError, UserError)


@pytest.mark.exhaustive
def test_a_reader_that_goes_away_and_a_device_as_output(runs, tmp_path):
    (tmp_path / "in").write_text("film\n" * 12_000)  # more than a pipe holds
    command = [sys.executable, "-m", "lln_fairseq", "predict", runs["SST-2"], "--input", tmp_path / "in"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline().count("\t") == 1
    child.stdout.close()
    assert child.stderr.read() == "error: [Errno 32] Broken pipe\n"
    assert child.wait() == 1
    done = subprocess.run([*command, "--output", "/dev/null"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
