"""The demo data set from a small archive: what is in it, that fairseq loads it, and that it survives interruption."""

import csv
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from data_prep import demo
from lln_fairseq.data import download, manifest
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.text import SPLITS, sentence_key
from lln_fairseq.data.tokenizers import load_sentencepiece
from tests.data_prep.conftest import BAD, GOOD, MOVIES, VOCAB_SIZE, decode, tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path, archive):
    """build() with the small archive, into tmp_path / "out" unless it says otherwise."""

    def call(out=tmp_path / "out", archive=archive, vocab_size=VOCAB_SIZE, overwrite=False, **options):
        return demo.build(out, archive, vocab_size, overwrite, **options)

    return call


def read_tsv(out, name):
    with (out / f"raw/SST-2/{name}.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_layout_counts_and_labels(tmp_path, build):
    content = build()
    out = tmp_path / "out"
    assert set(tree(out)) == {*demo.result_files(demo.TRAINED), "manifest.json"}
    assert json.loads((out / "manifest.json").read_text(encoding="utf-8")) == content
    assert (out / "lm/dict.txt").read_bytes() == (out / "sentiment/input0/dict.txt").read_bytes()
    assert (out / "sentiment/label/dict.txt").read_text().split("\n")[0].startswith("0 ")

    counts = content["counts"]["sentiment"]
    rows = [row for name in ("train", "dev", "test") for row in read_tsv(out, name)]
    assert len(rows) == sum(counts[split][label] for split in SPLITS for label in "01")
    # 200 fake rows, of which 29 neutral; then one of seven is a copy, one is empty, two are neutral
    assert counts["left_out"] == {"empty": 1, "repeated": 2, "neutral": 29 + 2}
    assert len(rows) == len(MOVIES) - 1 - 2 - 31
    for row in rows:
        words = set(row["sentence"].split())
        assert {"0": words & set(GOOD), "1": words & set(BAD)}[row["label"]] == set()
    texts = {row["sentence"] for row in rows}
    assert {'A "double" quoted & café film.', "Told twice, gladly!"} <= texts
    assert not any(text.startswith(("Loved", "Exactly")) for text in texts)
    # 5 lines of paper.txt, the shouted sentences of posts.txt (those of goods.txt came first), "Loved and hated."
    assert content["counts"]["lm"]["left_out"] == {"empty": 1, "repeated": 5 + 60 + 1}
    assert sum(content["counts"]["lm"][split] for split in SPLITS) == sum(content["counts"]["snippets"].values()) - 67


def folded(text):
    """What the demo's tokenizer keeps of a text."""
    return unicodedata.normalize("NFKC", text).casefold()


def test_with_the_tokenizer_of_another_model(tmp_path, build):
    build(out=tmp_path / "other", vocab_size=VOCAB_SIZE + 5)
    content = build(tokenizer=str(tmp_path / "other"))
    out, other = tree(tmp_path / "out"), tree(tmp_path / "other")
    assert {name: out[name] for name in out if name != "manifest.json"} == {
        name: other[name] for name in other if name != "manifest.json"
    }
    assert build(tokenizer=str(tmp_path / "other")) == content
    with pytest.raises(DataError, match="was built with tokenizer"):
        build()
    with pytest.raises(DataError, match="no such file"):
        build(out=tmp_path / "new", tokenizer=str(tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()


def test_no_sentence_in_two_splits(tmp_path, build):
    build()
    out = tmp_path / "out"
    task = MaskedLMTask.setup_task(MaskedLMConfig(data=str(out / "lm")))
    keys = {}
    for split, name in demo.GLUE_NAMES.items():
        samples = demo_samples(out, "lm", split)
        texts = [decode(load_sentencepiece(out / "spm.model"), task.dictionary.string(s).split()) for s in samples]
        keys[split] = {sentence_key(text) for text in texts}
        # every sentence of the task is in the same split of the corpus, so it is in no other
        assert {sentence_key(row["sentence"]) for row in read_tsv(out, name)} <= keys[split]
    assert not keys["train"] & keys["valid"]
    assert not keys["train"] & keys["test"]
    assert not keys["valid"] & keys["test"]


def demo_samples(out, folder, split):
    from fairseq.data import indexed_dataset

    dataset = indexed_dataset.make_dataset(str(out / folder / split), impl="mmap")
    return [dataset[i] for i in range(len(dataset))]


def test_fairseq_tasks_load_it_and_label_k_is_class_k(tmp_path, build):
    build()
    out = tmp_path / "out"
    config = SentencePredictionConfig(data=str(out / "sentiment"), num_classes=2, init_token=0, no_shuffle=True, seed=1)
    config.regression_target = False  # else taken from the criterion
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
            if task.dictionary.unk() not in tokens:  # characters of dev and test that train does not have
                assert decode(tokenizer, task.dictionary.string(tokens).split()) == folded(row["sentence"])
    assert len(task.dictionary) % 8 == 0  # with <mask>


def test_rerun_is_a_no_op_without_torch(tmp_path, build, monkeypatch):
    content = build()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    monkeypatch.setattr(download, "_download_with_pip", None)
    assert build(archive=None) == content
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    program = (
        "import sys; from pathlib import Path; from data_prep import demo\n"
        "from lln_fairseq.data.published_files import *\n"
        f"demo.ARCHIVE = {demo.ARCHIVE!r}\n"
        f"demo.build(Path({str(tmp_path / 'out')!r}), None, {VOCAB_SIZE})\n"
        "assert not {'torch', 'fairseq', 'sentencepiece'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_interrupted_anywhere_and_run_again_gives_the_same_bytes(tmp_path, build, monkeypatch):
    build(out=tmp_path / "whole")
    whole, replace = tree(tmp_path / "whole"), os.replace
    out, step = tmp_path / "out", 0
    done = False
    while not done:
        left = step % 7  # the run is stopped after 0 to 6 files more, and goes on from what there is

        def limited(source, target):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            replace(source, target)

        monkeypatch.setattr(os, "replace", limited)
        try:
            build()
            done = True
        except KeyboardInterrupt:
            there = tree(out) if out.exists() else {}
            assert "manifest.json" not in there
            assert {name: whole[name] for name in there if name != "build.json"} == {
                name: data for name, data in there.items() if name != "build.json"
            }
        step += 1
        assert step < 100
    assert tree(out) == whole


def test_killed_while_overwriting_is_not_finished(tmp_path, build, monkeypatch):
    build()
    monkeypatch.setattr(manifest, "_write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(overwrite=True)
    assert tree(tmp_path / "out") == {}


def test_other_settings_are_refused_unless_overwritten(tmp_path, build):
    build()
    before = tree(tmp_path / "out")
    with pytest.raises(DataError, match=f"vocab_size = {VOCAB_SIZE}, not 140.*--overwrite"):
        build(vocab_size=140)
    assert tree(tmp_path / "out") == before
    with pytest.raises(DataError, match="cannot train 5 pieces"):
        build(vocab_size=5, overwrite=True)
    assert tree(tmp_path / "out") == before  # not even then is the old result lost
    (tmp_path / "out/notes.txt").write_text("the user's own")
    assert build(vocab_size=140, overwrite=True)["settings"]["vocab_size"] == 140
    assert (tmp_path / "out/notes.txt").exists()


def test_other_settings_are_refused_for_an_unfinished_build_too(tmp_path, build):
    build()
    content = json.loads((tmp_path / "out/manifest.json").read_text())
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/build.json").write_text(json.dumps(content["settings"]))
    with pytest.raises(DataError, match="vocab_size"):
        build(vocab_size=140)
    (tmp_path / "out/build.json").unlink()
    with pytest.raises(DataError, match="was not built here"):
        build()


def test_damaged_result_is_noticed(tmp_path, build):
    build()
    (tmp_path / "out/lm/train.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.bin is missing or not the file"):
        build()
    build(overwrite=True)
    (tmp_path / "out/manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json cannot be read"):
        build()


def test_two_runs_at_once(tmp_path, build):
    with manifest.output_directory(tmp_path / "out"), pytest.raises(DataError, match="another run"):
        build()
    assert not (tmp_path / "out").exists()
