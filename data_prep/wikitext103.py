"""Encode WikiText-103, or other text in its format, for fairseq's masked_lm task.

    python -m data_prep.wikitext103 --out data-bin/wikitext-103 --tokenizer gpt2

The program reads wiki.train.raw, wiki.valid.raw and wiki.test.raw, which may be compressed as .xz or .gz. It downloads
the published zip archive, unless --source names a copy of this archive, another archive, or a directory. As in
fairseq's recipe, every line is stripped and becomes one sample, including headings and blank lines. A blank line
becomes a sample of only </s>, and `--sample-break-mode complete_doc` treats it as the end of a document. A document is
a section, or a whole article with --articles. Text is read, encoded and written as a stream.

    OUT/dict.txt, {train,valid,test}.{bin,idx}    for --task masked_lm
    OUT/encoder.json, vocab.bpe or spm.model      the tokenizer; `--tokenizer OUT` selects it for other data
    OUT/manifest.json                             written last: settings, sources, tokenizer, counts, checksums
"""

import argparse
import math
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.terminal import print_status
from lln_fairseq.text.binary_format import binarize
from lln_fairseq.text.parallel_encoder import ParallelEncoder
from lln_fairseq.text.read_lines import SPLITS, read_lines
from lln_fairseq.text.tokenizers import TOKENIZER_FILES, VOCAB_SIZE, train_on_corpus
from lln_fairseq.text.vocabulary import DICTIONARY, Vocabulary, new_vocabulary

from . import manifest
from .archives import FileTree
from .command import add_build_options, run_build
from .directories import split_files
from .download import fetch_tree, load_tokenizer
from .published_files import FILES

FORMAT = 1  # increase it when the same settings give another result, so that old directories are rejected
MB = 10**6
# The values of --tokenizer that train a SentencePiece model, and the kind of this model.
TRAINED_TOKENIZERS = {
    "sentencepiece": "bpe",
    "sentencepiece-bpe": "bpe",
    "sentencepiece-unigram": "unigram",
    "sentencepiece-char": "char",
}

ARTICLE_TITLE = re.compile(r"= (?!=).*(?<!=) =")  # headings of sections have more than one = on each side
ARCHIVE = FILES["wikitext-103-raw-v1.zip"]


class WikiTextCorpus:
    """Reads the text files of the three splits from an archive or a directory. A missing file raises UserError.

    `train_bytes` limits the train split to its first lines with at most this many bytes in total. With `articles`,
    there are blank lines only between articles, see `article_lines`.
    """

    def __init__(self, tree: FileTree, train_bytes: int | None = None, articles: bool = False) -> None:
        self.tree = tree
        self.train_bytes = train_bytes
        self.articles = articles
        self.members: dict[str, str] = {}
        for split in SPLITS:
            member = tree.find(f"wiki.{split}.raw")
            if member is None:
                raise UserError(f"{tree.where} has no wiki.{split}.raw (nor .xz, .gz)")
            self.members[split] = member

    def lines(self, split: str) -> Generator[str, None, None]:
        """Yield the stripped lines of a split as a stream. Raises UserError for a line that is not UTF-8."""
        member = self.members[split]
        limit = None
        if split == "train":
            limit = self.train_bytes
        with self.tree.open(member) as stream:
            lines = (line.strip() for line in read_lines(stream, f"{self.tree.where}: {member}", limit))
            if self.articles:
                yield from article_lines(lines)
            else:
                yield from lines

    def count_lines(self, split: str) -> int:
        """Return the number of lines of a split. Raise UserError if a line is not UTF-8, or all lines are blank.

        This reads the whole split, so that bad input is detected before anything is written.
        """
        count = 0
        has_text = False
        has_blank_line = False
        with closing(self.lines(split)) as lines:
            for line in lines:
                count += 1
                if line:
                    has_text = True
                else:
                    has_blank_line = True
        if not has_text:
            message = f"{self.tree.where}: {self.members[split]} has no text"
            if split == "train" and self.train_bytes:
                message += " within --limit-mb"
            raise UserError(message)
        if self.articles and not has_blank_line:
            raise UserError(
                f"{self.tree.where}: {self.members[split]} has no title, a line `= Title =`: without --articles, the "
                "blank lines of the text separate its documents"
            )
        return count


def article_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with a blank line before every article, including the first, and without all other blank lines.

    An article begins with its title, a line of the form `= Title =` that is the first line or follows a blank line.
    """
    follows_blank_line = True
    for line in lines:
        if follows_blank_line and ARTICLE_TITLE.fullmatch(line):
            yield ""
        if line:
            yield line
        follows_blank_line = not line


def wikitext_result_files(tokenizer_kind: str) -> list[str]:
    """Return the paths of all result files except manifest.json, relative to OUT. The tokenizer's files come first."""
    names = [*TOKENIZER_FILES[tokenizer_kind], DICTIONARY]
    return names + split_files("", SPLITS)


def train_vocabulary(corpus: WikiTextCorpus, tokenizer: str, vocab_size: int) -> Vocabulary:
    """Train a SentencePiece model of `vocab_size` pieces on the train text. `tokenizer` is in TRAINED_TOKENIZERS."""
    with closing(corpus.lines("train")) as lines:
        return new_vocabulary(train_on_corpus(lines, vocab_size, TRAINED_TOKENIZERS[tokenizer]))


def build_wikitext(
    out: Path,
    tokenizer: str,
    source: Path | None = None,
    vocab_size: int = VOCAB_SIZE,
    limit_mb: float | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    articles: bool = False,
) -> dict[str, Any]:
    """Build the data set in `out` and return its manifest. A finished directory with the same settings is kept.

    The arguments are the options of the program. `tokenizer` is one that load_tokenizer accepts, or a key of
    TRAINED_TOKENIZERS. `workers` None uses all cores.
    """
    if limit_mb is not None and not 0 < limit_mb < math.inf:
        raise UserError(f"--limit-mb must be more than 0 and finite, got {limit_mb}")
    given_vocabulary = None
    tokenizer_setting: Any = {"train": TRAINED_TOKENIZERS.get(tokenizer), "vocab_size": vocab_size}
    tokenizer_kind = "sentencepiece"
    if tokenizer not in TRAINED_TOKENIZERS:
        given_vocabulary = load_tokenizer(tokenizer)
        tokenizer_setting = given_vocabulary.identity
        tokenizer_kind = given_vocabulary.tokenizer.kind
    # The published archive is not downloaded yet, because the result may already be finished.
    given_tree = None
    is_published = True
    checksums = {ARCHIVE.name: ARCHIVE.sha256}
    if source is not None:
        given_tree, is_published = fetch_tree([ARCHIVE], source)
        if not is_published:
            checksums = given_tree.checksums(list(WikiTextCorpus(given_tree).members.values()))
    settings: dict[str, Any] = {
        "program": "data_prep.wikitext103",
        "format": FORMAT,
        "source": checksums,
        "limit_mb": limit_mb,
        "tokenizer": tokenizer_setting,
    }
    if articles:
        settings["articles"] = True

    train_bytes = None
    if limit_mb is not None:
        train_bytes = int(limit_mb * MB)

    def read() -> tuple[WikiTextCorpus, dict[str, int], Vocabulary]:
        tree = given_tree
        if tree is None:
            tree, _ = fetch_tree([ARCHIVE], None)
        print_status(f"reading {tree.where}")
        corpus = WikiTextCorpus(tree, train_bytes, articles)
        line_counts = {split: corpus.count_lines(split) for split in SPLITS}
        if given_vocabulary is not None:
            return corpus, line_counts, given_vocabulary
        return corpus, line_counts, train_vocabulary(corpus, tokenizer, vocab_size)

    def write(data: tuple[WikiTextCorpus, dict[str, int], Vocabulary]) -> dict[str, Any]:
        corpus, line_counts, vocabulary = data
        datasets = write_wikitext(out, corpus, line_counts, vocabulary, workers, count_symbols=given_vocabulary is None)
        sources = []
        for name, sha256 in checksums.items():
            sources.append({"name": name, "sha256": sha256, "published": is_published})
        return {
            "sources": sources,
            "tokenizer": vocabulary.record(),
            "counts": line_counts,
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "sentencepiece", "tiktoken", "tokenizers", "torch", "numpy"]),
        }

    return manifest.build_directory(out, settings, wikitext_result_files(tokenizer_kind), read, write, overwrite)


def write_wikitext(
    out: Path,
    corpus: WikiTextCorpus,
    line_counts: dict[str, int],
    vocabulary: Vocabulary,
    workers: int | None,
    count_symbols: bool,
) -> dict[str, dict[str, int]]:
    """Write the tokenizer, the data sets and dict.txt, in this order, and return the counts of each data set by split.

    `line_counts` has the number of lines of each split to write, and a wrong one raises UserError. dict.txt has the
    symbol counts of the train text if `count_symbols` is True, otherwise those of the vocabulary's dictionary.
    """
    for name, content in vocabulary.tokenizer.files.items():
        write_bytes(out / name, content)
    datasets = {}
    with ParallelEncoder(vocabulary, workers) as encoder:
        for split, num_lines in line_counts.items():
            print_status(f"encoding {split}: {num_lines} lines")
            blocks = _encoded_blocks(encoder, corpus, split, num_lines)
            datasets[split] = binarize(blocks, vocabulary.size, out / split, num_lines)
    if count_symbols:
        vocabulary = vocabulary.with_counts(datasets["train"].by_id)
    write_bytes(out / DICTIONARY, vocabulary.dictionary.encode())
    return {split: counts.record() for split, counts in datasets.items()}


def _encoded_blocks(encoder: ParallelEncoder, corpus: WikiTextCorpus, split: str, num_lines: int) -> Iterator[Any]:
    """Yield a split in encoded blocks, and show a progress bar of its `num_lines` lines."""
    from tqdm import tqdm

    with closing(corpus.lines(split)) as lines:
        yield from encoder.blocks(tqdm(lines, desc=split, total=num_lines, unit=" lines", leave=False, disable=None))


def summarize_wikitext(content: dict[str, Any]) -> str:
    """Return the counts of a manifest as text, one line per split."""
    lines = []
    for split, counts in content["datasets"].items():
        mean = counts["tokens"] / counts["samples"]
        lines.append(
            f"{split:5}  {counts['samples']} lines, {counts['tokens']} tokens ({mean:.0f} on average), "
            f"{counts['unknown']} unknown, longest text {counts['longest']}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_prep.wikitext103", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("data-bin/wikitext-103"), help="output directory (default: %(default)s)"
    )
    parser.add_argument(
        "--source", type=Path, help=f"local copy of {ARCHIVE.name}, another archive, or a directory (default: download)"
    )
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        help="gpt2 (default); sentencepiece-bpe, sentencepiece-unigram or sentencepiece-char (single characters), to "
        "train one on the text; a SentencePiece model; or the directory of a tokenizer or of prepared data",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=VOCAB_SIZE,
        help="number of pieces of a trained tokenizer, the maximum for sentencepiece-char (%(default)s)",
    )
    parser.add_argument(
        "--articles",
        action="store_true",
        help="write blank lines only between articles, so that --sample-break-mode complete_doc does not split them",
    )
    parser.add_argument(
        "--limit-mb", type=float, metavar="MB", help="use only the first MB megabytes of the train text"
    )
    add_build_options(parser)
    return run_build(partial(build_wikitext, **vars(parser.parse_args(argv))), summarize_wikitext)


if __name__ == "__main__":
    sys.exit(main())
