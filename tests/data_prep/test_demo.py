"""Test the demo data set with a small archive: its content, loading it in fairseq, and interruptions."""

import csv
import itertools
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from fairseq.data import indexed_dataset
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import demo, download, manifest
from lln_fairseq.errors import UserError
from lln_fairseq.text.read_lines import SPLITS, sentence_key
from lln_fairseq.text.tokenizers import load_sentencepiece
from tests.data_prep.conftest import BAD, GOOD, MOVIES, VOCAB_SIZE, decode, files_without_manifest, read_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path, archive):
    """A function that builds the data set from the small archive, by default into tmp_path / "out"."""

    def call(out=tmp_path / "out", archive=archive, vocab_size=VOCAB_SIZE, overwrite=False, **options):
        return demo.build_demo(out, archive, vocab_size, overwrite, **options)

    return call


def read_tsv(out, name):
    with (out / f"raw/SST-2/{name}.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_result_has_expected_files(tmp_path, build):
    content = build()

    out = tmp_path / "out"
    assert set(read_files(out)) == {*demo.demo_result_files(demo.TRAINED_FILES), "manifest.json"}
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8")) == content
    assert (out / "lm/dict.txt").read_bytes() == (out / "sentiment/input0/dict.txt").read_bytes()
    assert (out / "sentiment/label/dict.txt").read_text().split("\n")[0].startswith("0 ")


def test_sentiment_rows_have_expected_texts_labels_and_counts(tmp_path, build):
    counts = build()["counts"]["sentiment"]

    rows = []
    for name in ("train", "dev", "test"):
        rows += read_tsv(tmp_path / "out", name)
    assert len(rows) == sum(counts[split]["0"] + counts[split]["1"] for split in SPLITS)
    # Of the 200 fake rows 29 are neutral; of the seven rows after them one is a copy, one is empty, two are neutral.
    assert counts["left_out"] == {"empty": 1, "repeated": 2, "neutral": 29 + 2}
    assert len(rows) == len(MOVIES) - 1 - 2 - 31
    for row in rows:
        words_of_other_label = GOOD if row["label"] == "0" else BAD
        assert not set(row["sentence"].split()) & set(words_of_other_label)
    texts = {row["sentence"] for row in rows}
    assert {'A "double" quoted & café film.', "Told twice, gladly!"} <= texts
    assert not any(text.startswith(("Loved", "Exactly")) for text in texts)


def test_corpus_has_no_repeated_lines(build):
    counts = build()["counts"]

    # 5 repetitions in the third file, the 60 upper-case sentences of the last one (those of the second came first),
    # and "Loved and hated."
    assert counts["lm"]["left_out"] == {"empty": 1, "repeated": 5 + 60 + 1}
    assert sum(counts["lm"][split] for split in SPLITS) == sum(counts["snippets"].values()) - 67


def normalize(text):
    """Return the text as the demo's tokenizer decodes it."""
    return unicodedata.normalize("NFKC", text).casefold()


def test_tokenizer_of_other_data_gives_same_files(tmp_path, build):
    build(out=tmp_path / "other", vocab_size=VOCAB_SIZE + 5)

    content = build(tokenizer=str(tmp_path / "other"))

    assert files_without_manifest(tmp_path / "out") == files_without_manifest(tmp_path / "other")
    assert build(tokenizer=str(tmp_path / "other")) == content
    with pytest.raises(UserError, match="was built with another tokenizer"):
        build()


def test_missing_tokenizer_is_rejected(tmp_path, build):
    with pytest.raises(UserError, match="nowhere"):
        build(out=tmp_path / "new", tokenizer=str(tmp_path / "nowhere"))

    assert not (tmp_path / "new").exists()


def test_no_sentence_is_in_two_splits(tmp_path, build):
    build()
    out = tmp_path / "out"
    task = MaskedLMTask.setup_task(MaskedLMConfig(data=str(out / "lm")))
    tokenizer = load_sentencepiece(out / "spm.model")

    keys = {}
    for split, name in demo.GLUE_NAMES.items():
        texts = [
            decode(tokenizer, task.dictionary.string(sample).split()) for sample in read_samples(out / "lm" / split)
        ]
        keys[split] = {sentence_key(text) for text in texts}
        # Every sentence of the task is in the same split of the corpus, so it is in no other split.
        assert {sentence_key(row["sentence"]) for row in read_tsv(out, name)} <= keys[split]
    assert not keys["train"] & keys["valid"]
    assert not keys["train"] & keys["test"]
    assert not keys["valid"] & keys["test"]


def read_samples(prefix):
    dataset = indexed_dataset.make_dataset(str(prefix), impl="mmap")
    return [dataset[i] for i in range(len(dataset))]


def test_fairseq_loads_sentiment_task_and_label_k_is_class_k(tmp_path, build):
    build()
    out = tmp_path / "out"
    config = SentencePredictionConfig(data=str(out / "sentiment"), num_classes=2, init_token=0, no_shuffle=True, seed=1)
    config.regression_target = False  # otherwise taken from the criterion
    task = SentencePredictionTask.setup_task(config)
    tokenizer = load_sentencepiece(out / "spm.model")

    for split, name in demo.GLUE_NAMES.items():
        rows = read_tsv(out, name)
        dataset = task.load_dataset(split)
        assert len(dataset) == len(rows)
        batch = dataset.collater([dataset[i] for i in range(len(dataset))])
        assert batch["target"].view(-1).tolist() == [int(row["label"]) for row in rows]
        for tokens, row in zip(batch["net_input"]["src_tokens"], rows, strict=True):
            tokens = tokens[tokens != task.dictionary.pad()]
            if task.dictionary.unk() not in tokens:  # some characters of dev and test are not in train
                assert decode(tokenizer, task.dictionary.string(tokens).split()) == normalize(row["sentence"])
    assert len(task.dictionary) % 8 == 0  # with <mask>


def modification_times(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_finished_data_are_kept_without_importing_torch(tmp_path, build, monkeypatch):
    content = build()
    times = modification_times(tmp_path / "out")
    monkeypatch.setattr(download, "_download_with_pip", None)

    assert build(archive=None) == content

    assert modification_times(tmp_path / "out") == times
    program = (
        "import sys; from pathlib import Path; from data_prep import demo\n"
        "from data_prep.published_files import *\n"
        f"demo.ARCHIVE = {demo.ARCHIVE!r}\n"
        f"demo.build_demo(Path({str(tmp_path / 'out')!r}), None, {VOCAB_SIZE})\n"
        "assert not {'torch', 'fairseq', 'sentencepiece'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_interrupted_build_is_not_finished_and_starts_over(tmp_path, build, monkeypatch):
    build(out=tmp_path / "whole")
    out = tmp_path / "out"
    replace = os.replace
    remaining = 0

    def replace_some(source, target):
        nonlocal remaining
        if remaining == 0:
            raise KeyboardInterrupt
        remaining -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_some)
    for written_files in itertools.count(step=4):
        remaining = written_files
        try:
            build()
            break
        except KeyboardInterrupt:
            assert "manifest.json" not in read_files(out)
    assert written_files > 20
    assert read_files(out) == read_files(tmp_path / "whole")


def test_interrupted_overwrite_is_not_finished(tmp_path, build, monkeypatch):
    content = build()
    with monkeypatch.context() as context:
        context.setattr(manifest, "finish_build", None)
        with pytest.raises(TypeError):
            build(overwrite=True)

    assert "manifest.json" not in read_files(tmp_path / "out")
    assert build() == content


def test_changed_settings_are_rejected_without_overwrite(tmp_path, build):
    build()
    files = read_files(tmp_path / "out")

    with pytest.raises(UserError, match=f"vocab_size = {VOCAB_SIZE}, not 140.*--overwrite"):
        build(vocab_size=140)

    assert read_files(tmp_path / "out") == files


def test_failed_overwrite_keeps_old_data(tmp_path, build):
    build()
    files = read_files(tmp_path / "out")

    with pytest.raises(UserError, match="cannot train 5 pieces"):
        build(vocab_size=5, overwrite=True)

    assert read_files(tmp_path / "out") == files


def test_overwrite_keeps_unrelated_files(tmp_path, build):
    build()
    (tmp_path / "out/notes.txt").write_text("a file of the user")

    content = build(vocab_size=140, overwrite=True)

    assert content["settings"]["vocab_size"] == 140
    assert (tmp_path / "out/notes.txt").exists()


def test_overwrite_deletes_files_that_only_earlier_builds_wrote(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "notes.txt").write_text("a file of the user")

    def build_files(files, write):
        return manifest.build_directory(out, {}, files, read=lambda: files, write=write, overwrite=True)

    def write_files(files):
        for name in files:
            (out / name).write_text(name)
        return {}

    def fail(files):
        write_files(files)
        raise KeyboardInterrupt

    build_files(["train.bin", "test.bin"], write_files)
    content = json.loads((out / "manifest.json").read_text())
    content["files"]["../notes.txt"] = {}
    (out / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(KeyboardInterrupt):
        build_files(["train.bin", "valid.bin"], fail)
    assert set(read_files(out)) == {"train.bin", "valid.bin", "unfinished"}
    build_files(["train.bin"], write_files)

    assert set(read_files(out)) == {"train.bin", "manifest.json"}
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"files": 1}', '{"files": [1, ".", "/"]}'])
def test_overwrite_accepts_damaged_manifest(damaged, tmp_path):
    (tmp_path / "manifest.json").write_text(damaged)

    manifest.build_directory(tmp_path, {}, [], read=lambda: None, write=lambda _: {}, overwrite=True)

    assert json.loads((tmp_path / "manifest.json").read_text()) == {"settings": {}, "files": {}}


def test_files_without_manifest_are_rejected(tmp_path, build):
    (tmp_path / "out/lm").mkdir(parents=True)
    (tmp_path / "out/lm/train.bin").write_bytes(b"of the user")

    with pytest.raises(UserError, match="not built here"):
        build()

    assert (tmp_path / "out/lm/train.bin").read_bytes() == b"of the user"


def test_damaged_result_is_rejected(tmp_path, build):
    build()
    (tmp_path / "out/lm/train.bin").write_bytes(b"")

    with pytest.raises(UserError, match=r"train\.bin"):
        build()
    build(overwrite=True)
    (tmp_path / "out/manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json"):
        build()


def test_second_build_of_same_directory_is_rejected(tmp_path, build):
    with manifest.output_directory(tmp_path / "out"), pytest.raises(UserError, match="another run"):
        build()

    assert not (tmp_path / "out").exists()
