"""Texts to the samples that a task makes of its data, and to batches of samples of like length."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.data.encode import encode_block
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.special_symbols import MASK

Text = str | Sequence[str]  # a pair is a tuple of two
BATCH_TOKENS = 8192  # padding included; a longer text is a batch of its own
PART_TEXTS, PART_CHARACTERS = 2048, 1 << 20  # that are tokenized together and sorted by length
BEFORE = "\ue000"  # a character of no language, in front of what continues a line


class TextIds:
    """Samples as fairseq's data sets give them: the same ids in the same order, cut at the same length."""

    def __init__(self, task: Any, vocabulary: Any, longest: int) -> None:
        self.vocabulary, self.longest = vocabulary, longest
        dictionary = task.source_dictionary
        self.mask = dictionary.index(MASK)
        # Of a task of sentences both are options; a language model's samples begin with <s>.
        self.init = getattr(task.cfg, "init_token", dictionary.bos())
        self.separator = getattr(task.cfg, "separator_token", None)
        self.strips = getattr(task.cfg, "strip_eos", False)

    def samples(self, rows: Sequence[Sequence[str]]) -> list[Tensor]:
        """The ids of each row of one text, or of two."""
        starts = (self.init, self.separator)[: len(rows[0])]
        parts = [[self._with(start, ids) for ids in self.lines(column)]
                 for start, column in zip(starts, zip(*rows, strict=True), strict=True)]  # fmt: skip
        return [torch.cat(row)[: self.longest] for row in zip(*parts, strict=True)]

    def masked(self, left: str, right: str) -> Tensor:
        """The ids of left<mask>right. A space before <mask> belongs to the word that takes its place."""
        before, mark, after = self.lines([left.strip(), BEFORE, BEFORE + right.rstrip()])
        if not torch.equal(after[: len(mark) - 1], mark[:-1]):  # 1: </s>
            (after,), mark = self.lines([right.strip()]), mark[-1:]
        ids = torch.cat([before[:-1], torch.tensor([self.mask]), after[len(mark) - 1 :]])
        return self._with(self.init, ids)[: self.longest]

    def lines(self, lines: Sequence[str]) -> list[Tensor]:
        """The ids of each line with </s>, as they are in the data, or without it where the task leaves it out."""
        lines = [line.replace("\n", " ").strip() for line in lines]
        for line in lines:
            check_characters(line)
        block = encode_block(self.vocabulary.tokenizer, self.vocabulary.table, lines)
        ids, lengths = map(torch.from_numpy, block)
        found = ids.long().split(lengths.tolist())
        return [line[:-1] for line in found] if self.strips else list(found)

    @staticmethod
    def _with(start: int | None, ids: Tensor) -> Tensor:
        return ids if start is None else torch.cat([torch.tensor([start]), ids])


def rows_of(texts: Iterable[Text], inputs: int) -> Iterator[tuple[str, ...]]:
    """The texts in tuples of one, or the pairs where `inputs` is 2. Raises: DataError for what is neither."""
    for text in texts:
        row = (text,) if isinstance(text, str) else tuple(text) if isinstance(text, list | tuple) else ()
        if len(row) != inputs or not all(isinstance(part, str) for part in row):
            wanted = "a pair of texts, a tuple of two" if inputs == 2 else "one text, a string"
            raise DataError(f"the model takes {wanted}, and got {text!r:.80}")
        yield row


def check_characters(text: str) -> None:
    """Raises: DataError for half of a character, which Python's strings may hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a text holds half of a character ({error.reason}): {text!r:.80}") from error


def parts_of(rows: Iterable[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    """The rows in lists of bounded size."""
    part: list[Sequence[str]] = []
    size = 0
    for row in rows:
        part.append(row)
        size += sum(map(len, row))
        if len(part) == PART_TEXTS or size >= PART_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part


def batches_of(samples: Sequence[Tensor]) -> Iterator[list[int]]:
    """The numbers of the samples in batches of like length, at most BATCH_TOKENS with their padding."""
    batch: list[int] = []
    for number in sorted(range(len(samples)), key=lambda number: len(samples[number])):
        if batch and (len(batch) + 1) * len(samples[number]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
