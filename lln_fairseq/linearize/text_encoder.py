"""The linearization of an encoder on text. The encoder may be that of a fine-tuned model, which keeps its heads."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.checkpoints.compatibility import check_tokenizer
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.linearize.attention_transfer import TokenStream
from lln_fairseq.linearize.progress import Progress, assert_finite
from lln_fairseq.linearize.softmax_layers import Distance, encoder_distance, layer_list, mixed_attentions
from lln_fairseq.linearize.stages import Linearization
from lln_fairseq.linearize.students import HeldOutSet
from lln_fairseq.models import LLNRobertaModel
from lln_fairseq.text.checks import check_lines, require_binarized
from lln_fairseq.text.vocabulary import recorded_identity

HELD_OUT_COUNT = 64  # held-out texts of each length, unless --evaluate-texts gives another number
FEWEST_HELD_OUT = 8  # texts of the longest length
SHORT_LENGTH = 128  # tokens: results are reported for this length, for MEDIUM_LENGTH and for the longest
MEDIUM_LENGTH = 512  # there are fewer texts of longer lengths, with as many tokens in total
MAX_TOKENS = 50_000_000  # that are read of each split of DATA


class TextLinearization(Linearization):
    """Trains on the split "train", and compares each stage with the teacher on held-out texts of the split "valid"."""

    def __init__(self, args: argparse.Namespace, progress: Progress, model: LLNRobertaModel, task: Any) -> None:
        """Read the text, print a summary of the run, and compute the teacher's vectors of the held-out texts.

        `task` is the teacher's, whose dictionary and tokenizer the text must have.
        """
        if args.evaluate_rows is not None:
            raise UserError("--evaluate-rows is for a fine-tuned TEACHER with the DATA of its task: leave it out")
        super().__init__(args, progress, model, model.max_positions())
        self.train_texts = read_texts(args.data, "train", task.source_dictionary)
        valid_texts = read_texts(args.data, "valid", task.source_dictionary)
        teacher = str(args.teacher)
        identity = recorded_identity(text_directory(args.data))
        check_tokenizer(load_checkpoint_lazily(teacher), identity, str(args.data), teacher)
        self.print_summary(f"{len(self.train_texts.tokens):,} tokens")
        self.held_out = []
        for length in held_out_lengths(self.longest):
            count = held_out_count(args.evaluate_texts or HELD_OUT_COUNT, length)
            self.held_out.append(HeldOutSet(model, valid_texts, count, length))

    def train(self) -> None:
        students = self.students
        qualities = [[texts.evaluate(students)] for texts in self.held_out]
        heading = "without a transfer"
        if students.steps:
            self.progress.train("transfer", students, self.train_texts, self.longest)
            for texts, measured in zip(self.held_out, qualities, strict=True):
                measured.append(texts.evaluate(students))
            heading = "before -> after the transfer"
        for texts, measured in zip(self.held_out, qualities, strict=True):
            assert_finite(measured[-1].errors, "transfer", "on held-out texts")
            print_similarity(texts.length, heading, [(quality.cosine, quality.same_neighbor) for quality in measured])
            for layer, errors in enumerate(zip(*(quality.errors for quality in measured), strict=True)):
                print(f"  relative error of layer {layer:2d}       {' -> '.join(f'{error:.3f}' for error in errors)}")
            for name, branch in students.branches().items():
                cosine, same_neighbor = texts.similarity(branch)
                print(f"  {name:12s} cosine {cosine:.3f}, same nearest text {same_neighbor:.2f}")

        if self.args.softmax_layers:
            layers = self.choose_softmax_layers()
            attentions = mixed_attentions(students, layers)
            print(f"with softmax in {layer_list(layers)}")
            for texts in self.held_out:
                cosine, same_neighbor = texts.similarity(attentions)
                print(f"  {texts.length} tokens: cosine {cosine:.3f}, same nearest text {same_neighbor:.2f}")

        distillation = self.fold()
        if distillation is not None:
            similarities_before = [texts.similarity() for texts in self.held_out]
            self.progress.train("distillation", distillation, self.train_texts, self.longest)
            similarities = [texts.similarity() for texts in self.held_out]
            assert_finite([cosine for cosine, _ in similarities], "distillation", "on held-out texts")
            for texts, start, end in zip(self.held_out, similarities_before, similarities, strict=True):
                print_similarity(texts.length, "before -> after the distillation", [start, end])

    def distance(self) -> Distance:
        return encoder_distance(self.model, self.train_texts, self.longest)


def print_similarity(length: int, heading: str, similarities: Sequence[tuple[float, float]]) -> None:
    """Print what `HeldOutSet.similarity` returned for texts of a length: once, or before and after a stage."""
    print(f"held-out texts of {length} tokens, compared with the teacher: {heading}")
    print(f"  cosine of the texts' vectors    {' -> '.join(f'{cosine:.3f}' for cosine, _ in similarities)}")
    print(f"  same nearest text               {' -> '.join(f'{same:.2f}' for _, same in similarities)}")


def held_out_lengths(longest: int) -> list[int]:
    """Return the lengths of the held-out texts in tokens: SHORT_LENGTH, MEDIUM_LENGTH and `longest`, if not longer."""
    return sorted({min(length, longest) for length in (SHORT_LENGTH, MEDIUM_LENGTH, longest)})


def held_out_count(count: int, length: int) -> int:
    """Return the number of held-out texts of a length, `count` up to MEDIUM_LENGTH tokens.

    There are fewer longer ones, with as many tokens in total, but at least FEWEST_HELD_OUT or `count`.
    """
    if length <= MEDIUM_LENGTH:
        return count
    return max(count * MEDIUM_LENGTH // length, min(count, FEWEST_HELD_OUT))


def text_directory(data: Path) -> Path:
    """Return DATA, or the directory of the first sentences if it is binarized for sentence_prediction."""
    first = data / "input0"
    return first if first.is_dir() else data


def read_texts(data: Path, split: str, dictionary: Any) -> TokenStream:
    """Read the token ids of a split, as one stream of at most about MAX_TOKENS ids.

    Of data for sentence_prediction, the first sentences are read. UserError is raised if the data is missing, damaged
    or empty, or has another dictionary than the teacher's.
    """
    from fairseq.data import Dictionary, data_utils

    directory = text_directory(data)
    dictionary_file = directory / "dict.txt"
    require_binarized(directory, "dict.txt")
    check_lines(str(directory / split), dictionary_file)
    teacher_symbols = [symbol for symbol in dictionary.symbols if symbol != "<mask>"]
    if Dictionary.load(str(dictionary_file)).symbols != teacher_symbols:
        raise UserError(f"the dictionary of {data} is not the teacher's: binarize with the teacher's tokenizer")
    try:
        dataset = data_utils.load_indexed_dataset(str(directory / split), dictionary)
    except Exception as error:  # fairseq's readers raise many kinds of exceptions on damaged files
        raise UserError(f"cannot load split '{split}' of {data}: {first_line(error)}") from error
    if dataset is None or len(dataset) == 0:
        raise UserError(f"{data} has no text in its split '{split}'")
    rows = []
    num_tokens = 0
    for number in range(len(dataset)):
        rows.append(dataset[number])
        num_tokens += len(rows[-1])
        if num_tokens >= MAX_TOKENS:
            break
    return TokenStream(torch.cat(rows).long(), dictionary.bos(), dictionary.eos())
