"""Build the small default data set: real text with human sentiment labels, small enough for a laptop.

    python -m data_prep.demo --out data-bin/demo

The data comes from the source distribution of the Python package vaderSentiment 3.3.2 (MIT), a .tar.gz archive. It
contains the rated snippets of Hutto & Gilbert (ICWSM 2014) in four UTF-8 files. Every line has an id, a score and a
text, separated by tabs. The score is the mean of about 20 ratings between -4 and 4.

The sentiment task consists of the sentences of the movie reviews. It has the layout of GLUE's SST-2, except that
test.tsv has labels too. Copies of a sentence become one row with the mean of their scores. A score above 0.5 is label 1
(positive), a score below -0.5 is label 0 (negative). Sentences with a score in between are left out.

The language-model corpus consists of the texts of all four files in order, one snippet per line, without exact
repetitions. It has no empty lines between documents. So pre-train with --sample-break-mode eos, one snippet per
sample, or complete, which fills each sample with whole lines.

A sentence is in the same split (train, valid or test) of the task and of the corpus, see `assign_split`. So neither the
tokenizer nor pre-training sees a sentence of the task's dev or test set.

    OUT/manifest.json                     written last: settings, sources, tokenizer, counts, checksums
    OUT/spm.model, spm.vocab              SentencePiece, trained on the train text; or the files of --tokenizer
    OUT/raw/SST-2/{train,dev,test}.tsv    sentence, label
    OUT/lm/                               dict.txt and train, valid, test for --task masked_lm
    OUT/sentiment/{input0,label}/         the same for --task sentence_prediction; label k is class k
"""

import argparse
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.files import write_bytes
from lln_fairseq.terminal import print_status
from lln_fairseq.text.binary_format import binarize
from lln_fairseq.text.parallel_encoder import ParallelEncoder
from lln_fairseq.text.read_lines import SPLITS, assign_split, clean_text, sentence_key
from lln_fairseq.text.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lln_fairseq.text.vocabulary import Vocabulary, new_vocabulary

from . import manifest
from .command import run_build
from .directories import directory_files, write_labels
from .download import check_file, fetch_file, load_tokenizer
from .published_files import FILES

FORMAT = 2  # increase it when the same settings give another result, so that old directories are rejected
NEUTRAL_SCORE = 0.5
VOCABULARY_FILE = "spm.vocab"
TRAINED_FILES = ("spm.model", VOCABULARY_FILE)
LABELS = ("0", "1")  # negative, positive; class k of the model is LABELS[k]
TOKENIZER_KIND = "sentencepiece-unigram-folded"
VOCAB_SIZE = 6000
GLUE_NAMES = {"train": "train", "valid": "dev", "test": "test"}

Lines = dict[str, list[str]]  # texts by split
LabeledRows = dict[str, list[tuple[str, str]]]  # (sentence, label) by split

ARCHIVE = FILES["vaderSentiment-3.3.2.tar.gz"]
INNER_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MOVIES = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
MEMBERS = (
    MOVIES,
    "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt",
    "hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt",
    "hutto_ICWSM_2014/tweets_GroundTruth.txt",
)


@dataclass(frozen=True)
class Snippet:
    """One line of a source file: the mean score of its raters, and the cleaned text, which may be empty."""

    score: float
    text: str


@dataclass(frozen=True)
class DemoSource:
    """The texts of the vaderSentiment archive: the corpus lines, the task rows, and their counts for the manifest."""

    lines: Lines
    rows: LabeledRows
    counts: dict[str, Any]


def parse_snippets(content: bytes) -> list[Snippet]:
    snippets = []
    for line in content.decode("utf-8-sig").removesuffix("\n").split("\n"):
        _, score, text = line.split("\t")
        snippets.append(Snippet(float(score), clean_text(text)))
    return snippets


def make_sentiment_task(snippets: Sequence[Snippet]) -> tuple[LabeledRows, dict[str, Any]]:
    """Return the rows of the sentiment task by split, and their counts for the manifest.

    Snippets without text are left out. Snippets with the same `sentence_key` become one row with their mean score and
    the text of the first of them. The counts are {split: {label: rows}}; their entry "left_out" has the numbers of
    "empty" snippets, of "repeated" snippets and of "neutral" rows.
    """
    copies: dict[str, list[Snippet]] = {}
    for snippet in snippets:
        if snippet.text:
            copies.setdefault(sentence_key(snippet.text), []).append(snippet)
    rows: LabeledRows = {split: [] for split in SPLITS}
    neutral = 0
    for group in copies.values():
        text = group[0].text
        score = sum(snippet.score for snippet in group) / len(group)
        if abs(score) <= NEUTRAL_SCORE:
            neutral += 1
        elif score > 0:
            rows[assign_split(text)].append((text, LABELS[1]))
        else:
            rows[assign_split(text)].append((text, LABELS[0]))

    counts: dict[str, Any] = {}
    for split in SPLITS:
        label_counts = Counter(label for _, label in rows[split])
        counts[split] = {label: label_counts[label] for label in LABELS}
    num_texts = sum(len(group) for group in copies.values())
    counts["left_out"] = {
        "empty": len(snippets) - num_texts,
        "repeated": num_texts - len(copies),
        "neutral": neutral,
    }
    return rows, counts


def make_corpus(snippets: Sequence[Snippet]) -> tuple[Lines, dict[str, int]]:
    """Return the corpus lines by split, in order, and the number of snippets that were left out for each reason.

    The reasons are "empty" and "repeated". Only exact repetitions are left out.
    """
    texts = [snippet.text for snippet in snippets if snippet.text]
    unique_texts = list(dict.fromkeys(texts))
    lines: Lines = {split: [] for split in SPLITS}
    for text in unique_texts:
        lines[assign_split(text)].append(text)
    return lines, {"empty": len(snippets) - len(texts), "repeated": len(texts) - len(unique_texts)}


def read_members(archive: Path) -> dict[str, bytes]:
    """Return the content of each file in MEMBERS by its name, from INNER_ARCHIVE inside the vaderSentiment archive."""
    contents = {}
    with tarfile.open(archive) as outer, tarfile.open(fileobj=outer.extractfile(INNER_ARCHIVE)) as inner:
        for name in MEMBERS:
            member = inner.extractfile(name)
            assert member is not None
            contents[name] = member.read()
    return contents


def read_demo_source(archive: Path) -> DemoSource:
    """Make the corpus and the sentiment task from the vaderSentiment archive.

    A damaged archive raises the exceptions of Python's tarfile and gzip modules.
    """
    print_status(f"reading {archive.name}")
    snippets = {name: parse_snippets(content) for name, content in read_members(archive).items()}
    all_snippets: list[Snippet] = []
    for name in MEMBERS:
        all_snippets += snippets[name]
    rows, sentiment_counts = make_sentiment_task(snippets[MOVIES])
    lines, left_out = make_corpus(all_snippets)
    lm_counts: dict[str, Any] = {split: len(lines[split]) for split in SPLITS}
    lm_counts["left_out"] = left_out
    counts = {
        "snippets": {name: len(snippets[name]) for name in MEMBERS},
        "sentiment": sentiment_counts,
        "lm": lm_counts,
    }
    return DemoSource(lines, rows, counts)


def demo_result_files(tokenizer_files: Sequence[str]) -> list[str]:
    """Return the paths of all result files except manifest.json, relative to OUT; the tokenizer's files come first."""
    names = list(tokenizer_files)
    names += [f"raw/SST-2/{glue_name}.tsv" for glue_name in GLUE_NAMES.values()]
    for directory in ("lm", "sentiment/input0", "sentiment/label"):
        names += directory_files(directory, SPLITS)
    return names


def build_demo(
    out: Path,
    archive: Path | None = None,
    vocab_size: int = VOCAB_SIZE,
    overwrite: bool = False,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Build the data set in `out` and return its manifest. A finished directory with the same settings is kept.

    The arguments are the options of the program. `vocab_size` is ignored if `tokenizer` is given.
    """
    given_vocabulary = None
    settings: dict[str, Any] = {
        "program": "data_prep.demo",
        "format": FORMAT,
        "archive_sha256": ARCHIVE.sha256,
        "neutral": NEUTRAL_SCORE,
    }
    if tokenizer:
        given_vocabulary = load_tokenizer(tokenizer)
        settings["tokenizer"] = given_vocabulary.identity
        tokenizer_files: Sequence[str] = list(given_vocabulary.tokenizer.files)
    else:
        settings["tokenizer"] = TOKENIZER_KIND
        settings["vocab_size"] = vocab_size
        tokenizer_files = TRAINED_FILES
    if archive is not None:
        check_file(archive, ARCHIVE)

    def read() -> tuple[DemoSource, Vocabulary]:
        source = read_demo_source(fetch_file(ARCHIVE, archive))
        if given_vocabulary is not None:
            return source, given_vocabulary
        return source, train_vocabulary(source.lines["train"], vocab_size)

    def write(data: tuple[DemoSource, Vocabulary]) -> dict[str, Any]:
        source, vocabulary = data
        vocabulary, datasets = write_demo(out, vocabulary, source.lines, source.rows)
        return {
            "sources": [{"name": ARCHIVE.name, "sha256": ARCHIVE.sha256, "members": list(MEMBERS)}],
            "tokenizer": vocabulary.record(directory="lm/"),
            "counts": source.counts,
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "sentencepiece", "torch", "numpy"]),
        }

    return manifest.build_directory(out, settings, demo_result_files(tokenizer_files), read, write, overwrite)


def train_vocabulary(lines: Sequence[str], vocab_size: int) -> Vocabulary:
    """Train a SentencePiece model on the lines, a case-insensitive unigram model.

    A case-sensitive BPE model would split sentences into more pieces. A logistic regression on these pieces would
    classify 2 to 3 % fewer of the task's dev sentences correctly.
    """
    print_status(f"training a SentencePiece model of {vocab_size} pieces on {len(lines)} lines")
    return new_vocabulary(SentencePieceTokenizer(train_sentencepiece(lines, vocab_size, "unigram", fold=True)))


def write_demo(
    out: Path, vocabulary: Vocabulary, lines: Lines, rows: LabeledRows
) -> tuple[Vocabulary, dict[str, dict[str, Any]]]:
    """Write every result file except the manifest.

    Returns the vocabulary, now with the symbol counts of the corpus's train text, and the counts of the data sets by
    directory and split, read back from the written files.
    """
    for name, content in vocabulary.tokenizer.files.items():
        write_bytes(out / name, content)
    if isinstance(vocabulary.tokenizer, SentencePieceTokenizer):
        write_bytes(out / VOCABULARY_FILE, vocabulary.tokenizer.vocabulary_text().encode())
    for split, glue_name in GLUE_NAMES.items():
        tsv = "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows[split])
        write_bytes(out / f"raw/SST-2/{glue_name}.tsv", tsv.encode())

    print_status("writing fairseq's data sets")
    sentences = {}
    labels = {}
    for split in SPLITS:
        sentences[split] = [text for text, _ in rows[split]]
        labels[split] = [label for _, label in rows[split]]
    datasets: dict[str, dict[str, Any]] = {"lm": {}, "sentiment/input0": {}}
    with ParallelEncoder(vocabulary) as encoder:
        for directory, samples in (("lm", lines), ("sentiment/input0", sentences)):
            for split in SPLITS:
                blocks = encoder.blocks(samples[split])
                counts = binarize(blocks, vocabulary.size, out / directory / split, len(samples[split]))
                datasets[directory][split] = counts.record()
                if directory == "lm" and split == "train":
                    symbol_counts = counts.by_id
    vocabulary = vocabulary.with_counts(symbol_counts)
    for directory in ("lm", "sentiment/input0"):
        write_bytes(out / directory / "dict.txt", vocabulary.dictionary.encode())
    datasets["sentiment/label"] = write_labels(out / "sentiment/label", LABELS, labels)
    return vocabulary, datasets


def summarize_demo(content: Mapping[str, Any]) -> str:
    """Return the counts of a manifest as text: one line per split, and two lines with the texts that were left out."""
    lines = []
    for split in SPLITS:
        lm = content["datasets"]["lm"][split]
        labels = content["counts"]["sentiment"][split]
        lines.append(
            f"{split:5}  lm: {lm['samples']} lines, {lm['tokens']} tokens, {lm['unknown']} unknown, "
            f"longest {lm['longest']}; sentiment: {labels['0']} negative, {labels['1']} positive"
        )
    for part in ("sentiment", "lm"):
        left_out = content["counts"][part]["left_out"]
        lines.append(f"left out of {part}: " + ", ".join(f"{number} {reason}" for reason, number in left_out.items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("data-bin/demo"), help="output directory (default: %(default)s)"
    )
    parser.add_argument("--archive", type=Path, help=f"local copy of {ARCHIVE.name} (default: download it with pip)")
    parser.add_argument(
        "--vocab-size", type=int, default=VOCAB_SIZE, help="number of SentencePiece pieces (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer",
        help="tokenizer of a pre-trained model: gpt2, or a directory (default: train one)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing result in the output directory")
    return run_build(partial(build_demo, **vars(parser.parse_args(argv))), summarize_demo)


if __name__ == "__main__":
    sys.exit(main())
