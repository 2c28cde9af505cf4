"""Make the samples of texts for prediction: the token ids that a task's data set would have, cut and in batches."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln_fairseq.errors import UserError
from lln_fairseq.text.parallel_encoder import encode_block
from lln_fairseq.text.read_lines import LINE_BREAKS
from lln_fairseq.text.special_symbols import EOS, MASK

Text = str | Sequence[str]  # one text, or a pair of texts as a tuple or list
BATCH_TOKENS = 8192  # padding included; a longer sample becomes a batch of its own
CHUNK_TEXTS = 2048  # number of rows that are tokenized and sorted by length together
CHUNK_CHARACTERS = 1 << 20
CONTINUATION = "\ue000"  # a private-use character, prepended to text that continues a line
ON_LONG = ("truncate", "error")  # what can be done with a text that is longer than the model takes
END = "end"
ROW = "row"
ON_ERROR = (END, ROW)  # whether a text with an error ends everything, or gets the error as its output


class LongTextError(UserError):
    """A text is longer than the model takes. It has number `index`, from 0, among the texts, and `length` tokens.

    The special tokens count. `longest` is the number of tokens that the model takes.
    """

    def __init__(self, name: str, index: int, length: int, longest: int) -> None:
        super().__init__(f"{name} has {length} tokens, but the model takes at most {longest}")
        self.index = index
        self.length = length
        self.longest = longest


class LengthLimit:
    """Cuts samples to the longest sequence of a model with `cut_sample`, or rejects longer ones, and counts the cuts.

    `on_long` is one of ON_LONG, and `name` what an error calls a sample; {index} stands for its position.

    Attributes:
        samples: the number of samples so far.
        cut_samples: the number of samples that were cut.
        dropped_tokens: the number of tokens that were cut off.
    """

    def __init__(self, longest: int, on_long: str = "truncate", name: str = "texts[{index}]") -> None:
        if on_long not in ON_LONG:
            raise UserError(f"on_long must be one of {', '.join(ON_LONG)}, got {on_long!r}")
        self.longest = longest
        self.on_long = on_long
        self.name = name
        self.samples = 0
        self.cut_samples = 0
        self.dropped_tokens = 0

    def apply(self, samples: Iterable[Tensor]) -> list[Tensor]:
        """Return the samples (N,), each cut to `longest` tokens, or raise LongTextError if on_long="error"."""
        samples = list(samples)
        if self.on_long == "error":
            for index, sample in enumerate(samples, start=self.samples):
                if len(sample) > self.longest:
                    raise LongTextError(self.name.format(index=index), index, len(sample), self.longest)
        for sample in samples:
            excess = max(len(sample) - self.longest, 0)
            self.cut_samples += excess > 0
            self.dropped_tokens += excess
        self.samples += len(samples)
        return [cut_sample(sample, self.longest) for sample in samples]

    def message(self) -> str:
        """Return a line that says how much was cut, or "" if nothing was."""
        if self.cut_samples == 0:
            return ""
        return (
            f"cut {self.cut_samples} of {self.samples} texts to the {self.longest} tokens that the model takes: "
            f"{self.dropped_tokens} tokens were dropped"
        )


def cut_sample(sample: Tensor, longest: int) -> Tensor:
    """Return a sample (N,) cut to `longest` tokens as tokenizers of Hugging Face do, with `truncation=True`.

    Each text keeps the special tokens around it. A pair loses tokens at the end of its longer text, and if that is not
    enough, both texts get half of the room. A sample that does not end with </s>, because the task strips it, loses its
    last tokens.
    """
    if len(sample) <= longest:
        return sample
    ends = sample.eq(EOS).nonzero().view(-1).tolist()
    last = len(sample) - 1
    if last not in ends:
        return sample[:longest]
    first_end = ends[0]
    if first_end == last:
        return torch.cat([sample[: longest - 1], sample[last:]])
    second_start = first_end + 1
    if second_start in ends and second_start < last:  # the separator of RoBERTa's pairs
        second_start += 1
    first = sample[:first_end]  # with <s>
    second = sample[second_start:last]
    separators = sample[first_end:second_start]
    first_length, second_length = _share_room(len(first) - 1, len(second), longest - len(separators) - 2)
    parts = [first[: 1 + first_length], separators, second[:second_length], sample[last:]]
    return torch.cat(parts)[:longest]


def _share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts with these numbers of tokens are kept if `room` remain, `longest_first`."""
    room = max(room, 0)
    shorter = min(first, second, room // 2)
    if first > second:
        return room - shorter, shorter
    return shorter, room - shorter


class SampleEncoder:
    """Encodes texts into the samples that the training data would have for them, but does not cut long ones.

    `task` determines the dictionary and the tokens at the ends of a sample.
    """

    def __init__(self, task: Any, vocabulary: Any) -> None:
        self.vocabulary = vocabulary
        dictionary = task.source_dictionary
        self.mask = dictionary.index(MASK)
        # Sentence tasks have these options. The samples of a language model begin with <s>.
        self.init_token = getattr(task.cfg, "init_token", dictionary.bos())
        self.separator_token = getattr(task.cfg, "separator_token", None)
        self.strip_eos = getattr(task.cfg, "strip_eos", False)

    def encode_rows(self, rows: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return the ids of each row, int64 (N,). A row has one text, or two, whose ids are concatenated."""
        joined: list[list[Tensor]] = [[] for _ in rows]
        for column, first_token in enumerate((self.init_token, self.separator_token)):
            numbers = [number for number, row in enumerate(rows) if column < len(row)]
            texts = [rows[number][column] for number in numbers]
            for number, ids in zip(numbers, self.encode_lines(texts), strict=True):
                joined[number].append(_prepend(first_token, ids))
        return [torch.cat(parts) for parts in joined]

    def token_offsets(self, text: str, longest: int) -> Tensor:
        """Return the start and the end of each token of a row with one text, in characters of the text, int64 (N, 2).

        The tokens are those of `encode_rows`, cut to `longest`. text[start:end] is the text of the token without white
        space around it. A token that encodes only some of a character's bytes has the whole character. A special token
        has (0, 0), and a token that stands for white space only is empty.
        """
        line = as_line(text)
        # The place in the text of each character of the line before it was stripped.
        places = [match.start() for match in re.finditer(rf"{LINE_BREAKS.pattern}|.", text)]
        places.append(len(text))
        joined = LINE_BREAKS.sub(" ", text)
        indent = len(joined) - len(joined.lstrip())
        offsets = []
        if self.init_token is not None:
            offsets.append((0, 0))
        for start, end in self.vocabulary.tokenizer.token_spans(line):
            token = line[start:end]
            start += len(token) - len(token.lstrip())
            end = start + len(token.strip())
            offsets.append((places[indent + start], places[indent + end]))
        if not self.strip_eos:
            offsets = [*offsets[: longest - 1], (0, 0)]
        return torch.tensor(offsets[:longest], dtype=torch.int64).view(-1, 2)

    def encode_masked(self, left: str, right: str) -> Tensor:
        """Return the ids of the text left<mask>right, int64 (N,).

        A tokenizer.json with <mask> encodes the whole text, white space at its ends included. With other tokenizers,
        white space before <mask> is dropped, because it belongs to the masked word, and the text after <mask> is
        encoded as the continuation of a line. The task must not strip </s>.
        """
        check_characters(left + right)
        masked = self.vocabulary.tokenizer.encode_masked(LINE_BREAKS.sub(" ", left), LINE_BREAKS.sub(" ", right))
        if masked is not None:
            tokenizer_ids, place = masked
            ids = torch.tensor([*self.vocabulary.table[tokenizer_ids].tolist(), EOS])
            ids[place] = self.mask
            return _prepend(self.init_token, ids)
        # A tokenizer treats the start of a line in a special way. A character in front of `right` prevents that, and
        # its ids are removed again. They cannot be removed if the tokenizer merged them with the text that follows.
        continuation = CONTINUATION + right.rstrip()
        before, marker, after = self.encode_lines([left.strip(), CONTINUATION, continuation])
        marker_ids = marker[:-1]  # without the last id, which is </s>
        _, marker_end = self.vocabulary.tokenizer.token_spans(continuation)[len(marker_ids) - 1]
        if torch.equal(after[: len(marker_ids)], marker_ids) and marker_end == len(CONTINUATION):
            after = after[len(marker_ids) :]
        elif marker_end > len(CONTINUATION):  # SentencePiece joins all text without a piece, which may follow "▁"
            (after,) = self.encode_lines([right.strip()])
            if torch.equal(after[: len(marker_ids) - 1], marker_ids[:-1]):
                after = after[len(marker_ids) - 1 :]
        else:
            (after,) = self.encode_lines([right.strip()])
        ids = torch.cat([before[:-1], torch.tensor([self.mask]), after])
        return _prepend(self.init_token, ids)

    def encode_lines(self, lines: Sequence[str]) -> list[Tensor]:
        """Return the ids of each line, int64 (N,), with </s> unless the task strips it.

        Each run of line breaks inside a line becomes a space, and white space at the ends is removed. UserError is
        raised if a line contains a lone surrogate, or the tokenizer cannot encode it.
        """
        lines = [as_line(line) for line in lines]
        ids, lengths = encode_block(self.vocabulary, lines)
        encoded = torch.from_numpy(ids).long().split(lengths.tolist())
        if self.strip_eos:
            return [line[:-1] for line in encoded]
        return list(encoded)


def _prepend(token: int | None, ids: Tensor) -> Tensor:
    if token is None:
        return ids
    return torch.cat([torch.tensor([token]), ids])


def as_line(text: str) -> str:
    """Return a text as the line that a file of training data would have for it. A lone surrogate raises UserError."""
    line = LINE_BREAKS.sub(" ", text).strip()
    check_characters(line)
    return line


def texts_to_rows(texts: Iterable[Text], inputs: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield each text as a tuple of one string, or each pair of texts as a tuple of two.

    An item whose number of strings is not among `inputs` raises UserError.
    """
    for index, text in enumerate(texts):
        row: tuple[str, ...] = ()
        if isinstance(text, str):
            row = (text,)
        elif isinstance(text, list | tuple):
            row = tuple(text)
        if len(row) not in inputs or not all(isinstance(part, str) for part in row):
            forms = {1: "one text, a string", 2: "a pair of texts, a tuple of two"}
            expected = " or ".join(forms[count] for count in inputs)
            raise UserError(f"texts[{index}] must be {expected}, got {text!r:.80}")
        yield row


def check_characters(text: str) -> None:
    """Raise UserError if the text contains a lone surrogate (half of a UTF-16 pair), which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"a text contains half of a character ({error.reason}): {text!r:.80}") from error


def split_into_chunks(
    rows: Iterable[Sequence[str]], max_characters: int = CHUNK_CHARACTERS
) -> Iterator[list[Sequence[str]]]:
    """Yield lists of consecutive rows, of CHUNK_TEXTS rows or ending with the row that reaches `max_characters`.

    Rows are read as needed. The last list may be shorter.
    """
    chunk: list[Sequence[str]] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += sum(map(len, row))
        if len(chunk) == CHUNK_TEXTS or characters >= max_characters:
            yield chunk
            chunk = []
            characters = 0
    if chunk:
        yield chunk


def isolate_errors(function: Callable[[Sequence[Any]], list[Any]], rows: Sequence[Any]) -> list[Any]:
    """Return function(rows), with a UserError in place of the output of each row for which it raises one.

    The rows are divided in halves until those that raise it are alone.
    """
    try:
        return function(rows)
    except UserError as error:
        if len(rows) == 1:
            return [error]
    half = len(rows) // 2
    return isolate_errors(function, rows[:half]) + isolate_errors(function, rows[half:])


def batch_by_length(lengths: Sequence[int] | np.ndarray, batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of samples of similar length, shortest first, as lists of indices into `lengths`.

    A batch has at most `batch_tokens` tokens, padding included. A longer sample becomes a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
