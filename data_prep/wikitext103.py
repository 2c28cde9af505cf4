"""WikiText-103 (or text files like it), from the published archive to data for fairseq's masked_lm task.

    python -m data_prep.wikitext103 --out data-bin/wikitext-103 --tokenizer gpt2

Reads wiki.train.raw, wiki.valid.raw and wiki.test.raw (each may be .xz or .gz) from the published zip, which is
fetched, or from --source: that file, another archive, or a directory. As in fairseq's recipe every line is stripped
and becomes one sample; headings and blank lines stay (a blank line is a sample of </s> alone, the end of a document
to --sample-break-mode complete_doc: of a section, with --articles of an article). Text is read, encoded and written
as a stream.

    OUT/dict.txt, {train,valid,test}.{bin,idx}    for --task masked_lm
    OUT/encoder.json, vocab.bpe or spm.model      the tokenizer; `--tokenizer OUT` gives other data the same
    OUT/manifest.json                             last file written: settings, sources, tokenizer, counts, checksums
"""

import argparse
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from lln_fairseq.data import manifest
from lln_fairseq.data.archives import FileTree
from lln_fairseq.data.binary_format import binarize, dataset_files
from lln_fairseq.data.download import fetch_tree
from lln_fairseq.data.encode import ParallelEncoder, usable_cores
from lln_fairseq.data.files import write_bytes
from lln_fairseq.data.published_files import FILES
from lln_fairseq.data.reporting import DataError, print_status
from lln_fairseq.data.text import SPLITS, read_lines
from lln_fairseq.data.tokenizers import TOKENIZER_FILES, VOCAB_SIZE, load_sentencepiece, train_on_corpus
from lln_fairseq.data.vocabulary import DICTIONARY, Vocabulary, load_vocabulary, new_vocabulary

from .command import run_command

FORMAT = 1  # raise it when the same settings give another result: old directories are then refused, not mixed
MB = 10**6
TRAINED = {"sentencepiece": "bpe", "sentencepiece-bpe": "bpe", "sentencepiece-unigram": "unigram"}

TITLE = re.compile(r"= (?!=).*(?<!=) =")  # sections have several of them
ARCHIVE = FILES["wikitext-103-raw-v1.zip"]


class Corpus:
    """The three files of text; `train_bytes` limits how much of train is used, `articles`: see article_lines."""

    def __init__(self, tree: FileTree, train_bytes: int | None = None, articles: bool = False) -> None:
        self.tree, self.train_bytes, self.articles = tree, train_bytes, articles
        self.members: dict[str, str] = {}
        for split in SPLITS:
            member = tree.find(f"wiki.{split}.raw")
            if member is None:
                raise DataError(f"{tree.where} has no wiki.{split}.raw (nor .xz, .gz)")
            self.members[split] = member

    def lines(self, split: str) -> Generator[str, None, None]:
        """The stripped lines, as a stream. Raises DataError for a line that is not UTF-8."""
        member = self.members[split]
        with self.tree.open(member) as stream:
            limit = self.train_bytes if split == "train" else None
            lines = (line.strip() for line in read_lines(stream, f"{self.tree.where}: {member}", limit))
            yield from article_lines(lines) if self.articles else lines

    def count_lines(self, split: str) -> int:
        """Number of lines; reads them all, so what is wrong shows before anything is built."""
        with closing(self.lines(split)) as lines:
            number, text = 0, False
            for line in lines:
                number += 1
                text = text or bool(line)
        if not text:
            limited = " within --limit-mb" if split == "train" and self.train_bytes else ""
            raise DataError(f"{self.tree.where}: {self.members[split]} has no text{limited}")
        return number


def article_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines with a blank one before each article's title alone; the files have them around every heading."""
    is_after_blank = True
    for line in lines:
        if is_after_blank and TITLE.fullmatch(line):
            yield ""
        if line:
            yield line
        is_after_blank = not line


def result_files(kind: str) -> list[str]:
    """Every file of the result relative to OUT, the manifest excepted."""
    names = [*TOKENIZER_FILES[kind], DICTIONARY]
    return names + [str(file) for split in SPLITS for file in dataset_files(Path(split))]


def train_vocabulary(out: Path, corpus: Corpus, tokenizer: str, vocab_size: int, keep: bool) -> Vocabulary:
    """A SentencePiece model trained on the train text; with `keep`, that of an unfinished run where there is one."""
    if keep and (out / "spm.model").is_file():
        return new_vocabulary(load_sentencepiece(out / "spm.model"))
    with closing(corpus.lines("train")) as lines:
        return new_vocabulary(train_on_corpus(lines, vocab_size, TRAINED[tokenizer]))


def build(
    out: Path,
    tokenizer: str,
    source: Path | None = None,
    vocab_size: int = VOCAB_SIZE,
    limit_mb: float | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    articles: bool = False,
) -> dict[str, Any]:
    """Build the data set in `out` and return its manifest; a finished one with the same settings is kept.

    `tokenizer`: "sentencepiece-bpe" or "sentencepiece-unigram" (trained here, `vocab_size` pieces), or what
    vocabulary.load_vocabulary takes. `source`: archive or directory instead of the published archive. `limit_mb`:
    use the first so many 10^6 bytes of train. `workers`: processes, default all cores. `articles`: blank lines part
    articles, and not sections too. Raises DataError.
    """
    if limit_mb is not None and limit_mb <= 0:
        raise DataError(f"--limit-mb {limit_mb}: expected more than 0")
    given = None if tokenizer in TRAINED else load_vocabulary(tokenizer)
    tree = None  # nothing is fetched for a result that turns out to be finished
    published = True
    if source is not None:
        tree, published = fetch_tree([ARCHIVE], source)
    sources = {ARCHIVE.name: ARCHIVE.sha256}
    if tree is not None and not published:
        sources = tree.checksums(list(Corpus(tree).members.values()))
    settings = {
        "program": "data_prep.wikitext103",
        "format": FORMAT,
        "source": sources,
        "limit_mb": limit_mb,
        "tokenizer": given.identity if given else {"train": TRAINED[tokenizer], "vocab_size": vocab_size},
        **({"articles": True} if articles else {}),
    }

    def read() -> tuple[Corpus, dict[str, int], Vocabulary]:
        found = tree or fetch_tree([ARCHIVE], None)[0]
        corpus = Corpus(found, int(limit_mb * MB) if limit_mb else None, articles)
        print_status(f"reading {found.where}")
        lines = {split: corpus.count_lines(split) for split in SPLITS}
        resume = not overwrite and manifest.is_under_way(out)
        vocabulary = given or train_vocabulary(out, corpus, tokenizer, vocab_size, keep=resume)
        return corpus, lines, vocabulary

    def write(data: tuple[Corpus, dict[str, int], Vocabulary]) -> dict[str, Any]:
        corpus, lines, vocabulary = data
        datasets = write_result(out, corpus, vocabulary, lines, workers, counted=given is None)
        return {
            "sources": [{"name": n, "sha256": s, "published": published} for n, s in sources.items()],
            "tokenizer": vocabulary.record(),
            "counts": lines,
            "datasets": datasets,
            "versions": manifest.versions(["ve-fairseq", "sentencepiece", "tiktoken", "tokenizers", "torch", "numpy"]),
        }

    files = result_files(given.tokenizer.kind if given else "sentencepiece")
    return manifest.build_directory(out, settings, files, read, write, overwrite)


def write_result(
    out: Path, corpus: Corpus, vocabulary: Vocabulary, lines: dict[str, int], workers: int | None, counted: bool
) -> dict[str, dict[str, int]]:
    """Write tokenizer, datasets and dict.txt; return the counts read back by split.

    With `counted` dict.txt gets the counts of the train text; a dictionary that the user gave is kept to the byte.
    """
    for name, data in vocabulary.tokenizer.files.items():
        write_bytes(out / name, data)
    datasets = {}
    with ParallelEncoder(vocabulary, workers) as encoder:
        for split in SPLITS:
            print_status(f"encoding {split}: {lines[split]} lines")
            blocks = partial(_blocks, encoder, corpus, split, lines[split])
            datasets[split] = binarize(blocks, vocabulary.size, out / split, lines[split])
    if counted:
        vocabulary = vocabulary.with_counts(datasets["train"].by_id)
    write_bytes(out / DICTIONARY, vocabulary.dictionary.encode())
    return {split: counts.record() for split, counts in datasets.items()}


def _blocks(encoder: ParallelEncoder, corpus: Corpus, split: str, total: int) -> Iterator[Any]:
    from tqdm import tqdm

    with closing(corpus.lines(split)) as lines:
        yield from encoder.blocks(tqdm(lines, desc=split, total=total, unit=" lines", leave=False, disable=None))


def summary(content: dict[str, Any]) -> str:
    """The manifest's counts as lines for the terminal."""
    return "\n".join(
        f"{split:5}  {d['samples']} lines, {d['tokens']} tokens, {d['unknown']} unknown, longest {d['longest']}"
        for split, d in content["datasets"].items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (0, 1 for a failure, 2 for wrong usage, 130 for Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.wikitext103", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data-bin/wikitext-103"), help="directory (%(default)s)")
    parser.add_argument("--source", type=Path, help=f"local {ARCHIVE.name}, another archive or a directory")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        help="gpt2 (default); sentencepiece-bpe or sentencepiece-unigram: trained on the text; or the directory of "
        "other data, of a tokenizer, or a SentencePiece model",
    )
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="pieces of a trained one (%(default)s)")
    parser.add_argument("--articles", action="store_true", help="blank lines between whole articles alone, which "
                        "--sample-break-mode complete_doc then keeps together")  # fmt: skip
    parser.add_argument("--limit-mb", type=float, help="use only the first so many MB of train, for trials")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes (default: cores, %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="build anew what is in the output directory")
    a = parser.parse_args(argv)
    arguments = (a.out, a.tokenizer, a.source, a.vocab_size, a.limit_mb, a.workers, a.overwrite, a.articles)
    return run_command(lambda: print_status(summary(build(*arguments))))


if __name__ == "__main__":
    sys.exit(main())
