"""Tests of `lln-fairseq speedup` from the command line, with small models and times that are set."""

import json
import random
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification

from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import convert
from lln_fairseq.speedup import candidates, original, program, search
from lln_fairseq.speedup.candidates import candidates_for, make_candidate
from lln_fairseq.speedup.journal import Journal
from lln_fairseq.speedup.quality import Agreement
from lln_fairseq.speedup.report import caveats, summarize
from lln_fairseq.speedup.search import Search
from tests.conversion.classifiers import make_classifier, transformers_logits
from tests.conversion.sources import make_model
from tests.documentation import code_blocks

POSITIONS = 160  # so that a row has several blocks
ROWS = 320
WORDS = ["the", "plot", "isn", "new", "but", "it", "holds", "eva", "films", "we", "un", "t", "2"]
ORIGINAL_TIME = 10.0


def make_texts(count, words, seed=0):
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=words)) for _ in range(count)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a directory with a classifier of pairs, a reranker and an encoder, and their rows."""
    folder = tmp_path_factory.mktemp("speedup")
    model = make_classifier("bert", folder / "classifier", ["no", "yes"], POSITIONS)
    make_classifier("bert", folder / "reranker", ["score"], POSITIONS)
    make_model("bert", folder / "encoder", headless=True, positions=POSITIONS)
    pairs = list(zip(make_texts(ROWS, 3, 1), make_texts(ROWS, 140, 2), strict=True))
    predictions = transformers_logits(model, folder / "classifier", pairs, longest=POSITIONS)
    labels = ["no", "yes"]
    lines = ["question\tpassage\tlabel\tquery\tscore"]
    for number, (pair, logits) in enumerate(zip(pairs, predictions, strict=True)):
        cells = [*pair, labels[int(logits.argmax())], f"query {number // 8}", f"{number % 3}"]
        lines.append("\t".join(cells))
    (folder / "rows.tsv").write_text("\n".join(lines) + "\n")
    (folder / "texts.txt").write_text("\n".join(make_texts(ROWS, 140)) + "\n")
    return folder


def patch_search(monkeypatch):
    """Let every search train a few steps without ONNX, and return a function that sets the times of models."""

    def set_times(**times):
        def time_entry(self, entry):
            name = "unchanged" if entry.model == "unchanged" else entry.model.split(",")[0].split()[0]
            return times.get(entry.model, times.get(name, ORIGINAL_TIME)), 1.0

        monkeypatch.setattr(Search, "_time_entry", time_entry)

    def time_each(models, batches):  # the model of the report
        return {name: [ORIGINAL_TIME if name != "model" else 3.0] for name in models}

    monkeypatch.setattr(original, "time_each", time_each)
    monkeypatch.setattr(search, "STEPS", 3)
    monkeypatch.setattr(search, "FEW_STEPS", 2)
    monkeypatch.setattr(search, "find_spec", lambda package: None)
    monkeypatch.setattr(search, "half_precisions", list)
    monkeypatch.setattr(Search, "left", lambda self: 1e6)
    set_times()
    return set_times


@pytest.fixture
def set_times(monkeypatch):
    """Return the function of `patch_search`."""
    return patch_search(monkeypatch)


def run(sources, model, out, *options):
    rows = ["--texts", sources / "texts.txt"]
    if model == "classifier":
        rows = ["--rows", sources / "rows.tsv", "--text", "question", "passage"]
    elif model == "reranker":
        rows = ["--rows", sources / "rows.tsv", "--text", "question", "passage", "--label", "score"]
    return main(["speedup", str(sources / model), str(out), *map(str, rows), *map(str, options)])


def read_report(out):
    return json.loads((out / "report.json").read_text())


def interrupt(*args):
    raise KeyboardInterrupt


WHOLE = ("--min-agreement", 20)


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory):
    """Return the results of a search with the options WHOLE in which blocks are the fastest. Do not change them."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_search(monkeypatch)(blocks=4.0)
        assert run(sources, "classifier", out, *WHOLE) == 0
    return out


def test_yes_writes_the_fastest_model_that_is_good_enough(sources, tmp_path, set_times, capsys):
    set_times(blocks=4.0, windows=3.0)
    out = tmp_path / "faster"
    assert run(sources, "classifier", out, "--min-agreement", 20) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line.startswith("yes: windows of 48 in transformers is")
    report = read_report(out)
    assert report["chosen"] == "windows of 48, transformers"
    assert report["summary"] == last_line
    trained = [row for row in report["models"] if row["score"] is not None]
    assert {row["model"] for row in trained} == {"unchanged", "blocks of 128", "windows of 48"}
    assert "| windows of 48 | transformers | 3.0 | 3.33 |" in (out / "report.md").read_text()
    assert (out / "report.png").stat().st_size > 5000
    (code,) = code_blocks(out / "report.md", "python")
    names = {}
    exec(code, names)
    assert names["model"].config.id2label == {0: "no", 1: "yes"}
    # The stored rows are those of the exported model and of the original.
    lines = (out / "rows.tsv").read_text().splitlines()[1:]
    assert len(lines) == report["rows"]["test"] == report["test"]["rows"]
    table = [line.split("\t") for line in (sources / "rows.tsv").read_text().splitlines()]
    stored = [line.split("\t") for line in lines[:20]]
    pairs = [tuple(table[int(row)][:2]) for row, *_ in stored]
    for column, folder in ((2, sources / "classifier"), (3, out / "model")):
        model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        logits = transformers_logits(model, folder, pairs, longest=POSITIONS)
        assert [model.config.id2label[int(row.argmax())] for row in logits] == [cells[column] for cells in stored]
    agreement = 100 * np.mean([cells[2] == cells[3] for cells in (line.split("\t") for line in lines)])
    assert report["test"]["score"] == pytest.approx(agreement)


def test_finished_search_is_not_repeated_and_another_is_refused(sources, whole, set_times, capsys):
    assert run(sources, "classifier", whole, *WHOLE) == 0
    assert capsys.readouterr().out.splitlines() == [read_report(whole)["summary"]]
    assert run(sources, "classifier", whole, *WHOLE, "--seed", 2) == 1
    assert "holds a search with another seed: give another OUT" in capsys.readouterr().err
    assert run(sources, "reranker", whole, *WHOLE) == 1
    assert "holds a search with another model, label" in capsys.readouterr().err


def test_no_is_an_answer(sources, tmp_path, set_times, capsys):
    out = tmp_path / "faster"
    names = ("blocks of 128", "windows of 48", "LLN+Diag")
    in_both_layers = {f"{name}, softmax in 2 layers": ORIGINAL_TIME for name in names}
    set_times(blocks=1.0, windows=2.0, **{"LLN+Diag": 3.0}, **in_both_layers)
    assert run(sources, "encoder", out, "--min-agreement", 100) == 0
    report = read_report(out)
    assert all(row["drop"] > 0 for row in report["models"][1:] if row["drop"] is not None)
    assert report["chosen"] is None
    assert report["summary"].startswith("no: nothing was both faster and good enough. The nearest is ")
    assert not (out / "model").exists()
    # Softmax returns to the best one.
    assert any("softmax in" in row["model"] and len(row["layers"]) == 1 for row in report["models"][1:])


def test_no_if_the_last_measurement_is_not_faster(sources, tmp_path, set_times, monkeypatch):
    set_times(blocks=4.0)
    monkeypatch.setattr(original, "time_each", lambda models, batches: {name: [ORIGINAL_TIME] for name in models})
    out = tmp_path / "faster"
    assert run(sources, "classifier", out, "--min-agreement", 20) == 0
    assert read_report(out)["chosen"] is None
    assert "no: blocks of 128 in transformers is only 1.00 times as fast" in read_report(out)["summary"]
    assert not (out / "model").exists()


def test_nothing_is_trained_if_nothing_is_faster(sources, tmp_path, set_times):
    out = tmp_path / "faster"
    set_times(blocks=9.5, windows=9.9)
    assert run(sources, "classifier", out, "--label", "label") == 0
    report = read_report(out)
    assert report["chosen"] is None
    assert all(row["score"] is None for row in report["models"][1:])
    assert "The fastest is blocks of 128, transformers, with 1.05 times the speed." in report["summary"]


@pytest.mark.parametrize("model", ["reranker", "encoder"])
def test_rerankers_and_encoders(sources, tmp_path, set_times, model):
    out = tmp_path / "faster"
    set_times(blocks=4.0)
    options = ["--group", "query", "--max-drop", 50] if model == "reranker" else ["--min-agreement", 20]
    assert run(sources, model, out, *options) == 0
    report = read_report(out)
    assert report["chosen"] == "blocks of 128, transformers"
    assert report["test"]["metric"] == ("nDCG@10" if model == "reranker" else "cosine")
    if model == "encoder":
        texts = (sources / "texts.txt").read_text().splitlines()[:5]
        vectors = SentenceTransformer(str(out / "model"), trust_remote_code=True).encode(texts, convert_to_tensor=True)
        original = SentenceTransformer(str(sources / "encoder")).encode(texts, convert_to_tensor=True)
        assert torch.cosine_similarity(vectors, original).min() > 0.2


def test_unchanged_model_in_onnx_can_be_the_answer(sources, tmp_path, set_times, monkeypatch):
    monkeypatch.setattr(search, "find_spec", lambda package: True)
    set_times(unchanged=2.0)
    out = tmp_path / "faster"
    assert run(sources, "classifier", out, "--label", "label", "--max-drop", 5) == 0
    report = read_report(out)
    assert report["chosen"] == "unchanged, onnxruntime"
    assert report["test"]["drop"] == 0
    (code,) = code_blocks(out / "report.md", "python")
    names = {}
    exec(code, names)
    assert names["outputs"][0].shape == (1, 2)
    # The model card opens it in the same way, before the code that opens the slow weights.
    card = (out / "model/README.md").read_text()
    use = card[card.index("## Use") : card.index("AutoModel")]
    assert textwrap.indent(code.replace(str(out / "model"), "DIRECTORY"), "    ") in use


def test_killed_search_continues(sources, whole, tmp_path, set_times, monkeypatch):
    set_times(blocks=4.0)
    killed = tmp_path / "killed"
    once = Journal.once
    kept = 0  # results

    def once_until_killed(self, name, compute):
        if name not in self.values and len(self.values) == kept:
            raise KeyboardInterrupt
        return once(self, name, compute)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "once", once_until_killed)
        for kept in (2, 4, 7, 9):
            assert run(sources, "classifier", killed, *WHOLE) == 130
            assert len(json.loads((killed / "work/journal.json").read_text())["values"]) == kept
    assert run(sources, "classifier", killed, *WHOLE) == 0
    reports = [read_report(out) for out in (whole, killed)]
    for report in reports:
        for row in report["models"]:
            row.pop("memory_mb")
    for key in ("chosen", "test", "models", "rows"):
        assert reports[0][key] == reports[1][key]
    assert (whole / "rows.tsv").read_text() == (killed / "rows.tsv").read_text()


def test_search_without_time_left_ends_as_it_would_have(sources, whole, tmp_path, set_times, monkeypatch):
    set_times(blocks=4.0)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(program, "write_reports", interrupt)
        assert run(sources, "classifier", out, *WHOLE) == 130
    monkeypatch.setattr(Search, "left", lambda self: -1.0)
    assert run(sources, "classifier", out, *WHOLE) == 0
    assert read_report(out)["summary"] == read_report(whole)["summary"]
    assert read_report(out)["notes"] == read_report(whole)["notes"]
    assert (whole / "rows.tsv").read_text() == (out / "rows.tsv").read_text()


def test_refused_search_leaves_no_model_to_the_next(sources, whole, tmp_path, set_times, capsys):
    set_times(blocks=4.0)
    out = tmp_path / "out"
    rows = ["--rows", str(sources / "rows.tsv"), "--text", "question", "passage"]
    assert main(["speedup", str(sources / "encoder"), str(out), *rows]) == 1
    assert "is an encoder: give --texts" in capsys.readouterr().err
    assert run(sources, "classifier", out, *WHOLE) == 0
    assert (whole / "rows.tsv").read_text() == (out / "rows.tsv").read_text()


def test_groups_are_scored_as_a_whole(sources, tmp_path, set_times, monkeypatch):
    set_times(blocks=4.0)
    monkeypatch.setattr(original, "SCORING_SHARE", 0)  # time is kept for 100 rows
    monkeypatch.setattr(search, "rows_needed", lambda *numbers: 0)
    out = tmp_path / "out"
    assert run(sources, "reranker", out, "--group", "query", "--max-drop", 50) == 0
    assert read_report(out)["rows"]["test"] == 104  # 13 groups of 8


@pytest.mark.parametrize(
    ("drop", "half_width", "is_unsure"),
    [(-2.4, 1.9, False), (0.5, 1.9, True), (1.1, 3.2, True), (4.4, 3.0, False), (0.8, 0.5, False)],
)
def test_answer_is_unsure_if_the_limit_lies_in_a_wide_interval(drop, half_width, is_unsure):
    found = SimpleNamespace(original=SimpleNamespace(lengths=np.array([10])), notes=[])
    entry = SimpleNamespace(model="windows of 48", runtime="transformers")
    final = {"milliseconds": {"original": 20.0, "model": 10.0}, "times_as_fast": 2.0, "metric": "accuracy", "rows": 500}
    final |= {"original": 80.0, "score": 80.0 - drop, "drop": drop, "half_width": half_width, "limit": 1.0}
    assert ("too few rows to be sure" in summarize(found, entry, final, drop <= 1)) == is_unsure
    assert any("test rows to tell" in line for line in caveats(found, final)) == is_unsure


def test_training_continues_after_its_last_saved_step(sources, whole, tmp_path, set_times, monkeypatch):
    set_times(blocks=4.0)
    monkeypatch.setattr("lln_fairseq.linearize.progress.SAVE_INTERVAL", 1)
    write = candidates.Linearizer.write
    interrupted = []

    def write_later(self, model, candidate, layers, out):
        if (out / candidates.STATES).exists() and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        write(self, model, candidate, layers, out)

    monkeypatch.setattr(candidates.Linearizer, "write", write_later)
    killed = tmp_path / "killed"
    assert run(sources, "classifier", killed, *WHOLE) == 130
    assert run(sources, "classifier", killed, *WHOLE) == 0
    assert interrupted
    assert (whole / "rows.tsv").read_text() == (killed / "rows.tsv").read_text()


def test_chosen_attentions_are_all_trained_and_those_without_export_never_chosen(sources, tmp_path, set_times):
    out = tmp_path / "faster"
    set_times(elu=1.0)
    specs = ["elu", "block_diag:block_size=16"]
    assert run(sources, "classifier", out, "--min-agreement", 0, "--attentions", *specs) == 0
    report = read_report(out)
    assert [row["model"] for row in report["models"]] == ["unchanged", *specs]
    assert report["models"][1]["runtime"] == "lln_fairseq"
    assert all(row["score"] is not None for row in report["models"])
    assert report["chosen"] is None
    assert any("elu cannot be exported" in note for note in report["notes"])


@pytest.mark.parametrize(("limit", "seconds", "rows"), [(80, 1e6, 100), (0.1, 1e6, 128), (0.1, 110.5 * 0.014, 110)])
def test_as_many_test_rows_as_tell_the_limit_if_there_is_time(
    sources, tmp_path, set_times, monkeypatch, limit, seconds, rows
):
    set_times(blocks=4.0)  # so that a row takes 0.014 s
    report_on = Search.report_on

    def report_with_little_time(self, entry):
        monkeypatch.setattr(Search, "left", lambda self: seconds)
        return report_on(self, entry)

    monkeypatch.setattr(Search, "report_on", report_with_little_time)
    monkeypatch.setattr(Search, "is_good", lambda self, entry: entry.drop is not None)
    monkeypatch.setattr(Agreement, "half_width", lambda self, outputs: 10.0)
    monkeypatch.setattr(original, "SCORING_SHARE", 0)  # time is kept for 100 rows
    out = tmp_path / "faster"
    assert run(sources, "classifier", out, "--min-agreement", 100 - limit) == 0
    report = read_report(out)
    assert report["rows"]["test"] == report["test"]["rows"] == rows
    assert len((out / "rows.tsv").read_text().splitlines()) == rows + 1


BAD_INPUT = {
    "a missing column": (["--label", "answer"], "no column 'answer' among question, passage, label, query, score"),
    "labels of another model": (["--label", "query"], "'query 0' is not a label of the model (no, yes)"),
    "an unknown attention": (["--attentions", "lnn"], "unknown attention 'lnn'; did you mean 'tnn'"),
    "a directory inside the model": ([], "is in the directory of the model: give another OUT"),
    "a missing model": ([], "no such directory or checkpoint"),
    "texts": ([], "is a classifier: give --rows and --text"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_ends_in_one_line(sources, tmp_path, set_times, capsys, case):
    options, message = BAD_INPUT[case]
    model = sources / ("missing" if case == "a missing model" else "classifier")
    out = model / "out" if case == "a directory inside the model" else tmp_path / "out"
    if case == "texts":
        code = main(["speedup", str(model), str(out), "--texts", str(sources / "texts.txt")])
    else:
        rows = ["--rows", str(sources / "rows.tsv"), "--text", "question", "passage"]
        code = main(["speedup", str(model), str(out), *rows, *options])
    assert code == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: ")
    assert message in error[-1]


def test_checkpoint_is_a_classifier_too_but_not_one_with_another_attention(sources, tmp_path, set_times, capsys):
    rows = ["--rows", str(sources / "rows.tsv"), "--text", "question", "passage"]
    convert(sources / "classifier", tmp_path / "softmax", attention="softmax")
    set_times(blocks=4.0)
    out = tmp_path / "faster"
    assert main(["speedup", str(tmp_path / "softmax/model.pt"), str(out), *rows, "--min-agreement", "20"]) == 0
    assert read_report(out)["chosen"] == "blocks of 128, transformers"
    capsys.readouterr()
    assert main(["speedup", str(out / "model"), str(tmp_path / "again"), *rows]) == 1
    assert "has block_diag attention: give the model with softmax that it is from" in capsys.readouterr().err


def test_rows_beyond_the_positions_are_refused(sources, tmp_path, set_times, capsys):
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\n" + "\n".join(make_texts(ROWS, POSITIONS)) + "\n")
    assert main(["speedup", str(sources / "classifier"), str(tmp_path / "out"), "--rows", str(rows)]) == 1
    assert f"{ROWS} of {ROWS} rows have more than the {POSITIONS} tokens" in capsys.readouterr().err


def test_candidates_follow_from_the_rows():
    many = np.full(100, 600)
    names = [candidate.name for candidate in candidates_for(many, np.full(100, 16))]
    assert names == ["blocks of 128", "windows of 48", "LLN+Diag"]
    both_long = candidates_for(many, np.full(100, 300))
    assert [candidate.num_softmax_layers for candidate in both_long] == [0, 2]
    assert all(candidate.options["global_tokens"] == "none" for candidate in both_long)
    single = candidates_for(many, np.ones(100, dtype=int))
    assert [candidate.options["block_size"] for candidate in single] == [128, 48, 32]


def test_candidate_with_softmax_keeps_its_options():
    candidate = make_candidate("LLN+Diag", "lln_diag", block_size=32).with_softmax(1)
    assert candidate.name == "LLN+Diag, softmax in a layer"
    assert candidate.options["block_size"] == 32
    assert candidate.softmax_layers == "best:1"
