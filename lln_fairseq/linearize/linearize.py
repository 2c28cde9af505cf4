"""Replace the softmax attention of a trained encoder with a linear attention, and train that to match.

    lln-fairseq linearize TEACHER DATA OUT --attention lln_diag --option mix=joint_offset gain=learned

TEACHER is a checkpoint with softmax attention, from a training run or `lln-fairseq convert`. DATA is a directory of
text that was binarized with the teacher's tokenizer. OUT/model.pt becomes an ordinary checkpoint of the encoder, which
can be trained, evaluated and exported. If its attention is set back to `softmax`, it computes the same as the teacher,
unless --distill trained all layers after the transfer.

    lln-fairseq linearize runs/qnli/checkpoint_best.pt data-bin/glue/QNLI runs/qnli_linear \\
        --option mix=joint_offset gain=learned block_size=64

If TEACHER is a fine-tuned classifier and DATA the directory of its task, the rows of the task take the place of the
text, and the accuracy (Spearman's correlation for a regression) is printed for each stage. OUT/model.pt is then a
classifier of the same task.

The stages, in this order: the transfer (--steps), the choice of layers that keep softmax (--softmax-layers) and the
distillation (--distill). Give an interrupted command again to resume it, or a finished one with another stage to
continue it.

See lln_fairseq/linearize/attention_transfer.py, softmax_layers.py and distillation.py for the stages.
"""

import argparse
import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from lln_fairseq.attention import MECHANISMS, reject_layer_mechanism
from lln_fairseq.attention.registry import parse_config, parse_options
from lln_fairseq.checkpoints.compatibility import is_finetuned
from lln_fairseq.conversion.convert import CHECKPOINT, finetuning_command, write_converted_encoder
from lln_fairseq.conversion.encoder import ImportedEncoder
from lln_fairseq.conversion.from_fairseq import read_fairseq_checkpoint
from lln_fairseq.errors import UserError, first_line, user_errors
from lln_fairseq.linearize import softmax_layers, teacher
from lln_fairseq.linearize.attention_transfer import TokenStream
from lln_fairseq.linearize.dev_scores import DevScores, format_score
from lln_fairseq.linearize.distillation import Distillation
from lln_fairseq.linearize.layerwise import HeldOutSet, Students
from lln_fairseq.linearize.progress import Progress
from lln_fairseq.linearize.reports import DevReport, HeldOutReport
from lln_fairseq.linearize.task_rows import TaskRows
from lln_fairseq.models.lln_roberta import RobertaConfig
from lln_fairseq.text.checks import check_lines
from lln_fairseq.training.malloc import disable_malloc_trim

HELD_OUT_COUNT = 64  # held-out texts of each length, unless --evaluate-texts gives another number
FEWEST_HELD_OUT = 8  # texts of the longest length
SHORT_LENGTH = 128  # tokens: results are reported for this length, for MEDIUM_LENGTH and for the longest
MEDIUM_LENGTH = 512  # there are fewer texts of longer lengths, with as many tokens in total
MAX_TOKENS = 50_000_000  # that are read of each split of DATA


def linearize(args: argparse.Namespace) -> None:
    """Write OUT/model.pt, and next to it what the same command needs to resume. Do nothing if OUT is complete.

    Args:
        args: the parsed command line; its `option` is replaced by all options of the attention, with their defaults

    Raises: UserError if the options, the teacher, the data or OUT cannot be used, or if the training diverges.
    """
    with user_errors():
        reject_layer_mechanism(args.attention, "cannot replace a teacher's attention")
        options = {**linearize_options(args.attention), **args.option}
        args.option = vars(parse_config(args.attention, options))  # the checkpoint must state all options
    teacher.require_softmax(args.teacher)
    progress = Progress(args)
    if progress.complete:
        for label, score in progress.scores.items():
            print(format_score(label, score))
        print(f"{args.out / CHECKPOINT} is complete")
        return
    run = Linearization(args, progress)
    progress.create_directory()  # not earlier, so that bad input creates nothing
    with SummaryWriter(str(args.out / "tensorboard")) as writer:
        run.train(writer)
    run.write_model()
    progress.finish()
    print(f"{args.out / CHECKPOINT}: {args.attention}")


def linearize_options(attention: str) -> Mapping[str, Any]:
    """Return the options of an attention that are used unless the command line gives other values."""
    return MECHANISMS[attention].cls.linearize_options


class Linearization:
    """A run of linearize: the teacher, its data, and the model that becomes linear."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        """Load the teacher and the data, and build the students.

        Raises: UserError if the files are incompatible with each other or with the options.
        """
        self.args = args
        self.progress = progress
        self.model, self.task = teacher.load_teacher(args.teacher, args.data)
        self.is_finetuned = is_finetuned(self.task.cfg._name)
        self.has_rows = self.is_finetuned and teacher.is_task_data(args.data)
        if args.evaluate_texts is not None and self.has_rows:
            raise UserError("--evaluate-texts is for plain text as DATA: give --evaluate-rows for the rows of a task")
        if args.evaluate_rows is not None and not self.has_rows:
            raise UserError("--evaluate-rows is for a fine-tuned TEACHER with the DATA of its task: leave it out")
        layers = self.model.encoder.sentence_encoder.layers
        self.softmax_layers = softmax_layers.parse_layers(args.softmax_layers, len(layers), args.attention)
        self.encoder: ImportedEncoder | None = None
        if not self.is_finetuned:
            dictionary = teacher.find_dictionary(args.teacher, self.task)
            self.encoder = read_fairseq_checkpoint(args.teacher, dictionary)
        positions = self.model.max_positions()
        if self.has_rows:
            positions = min(positions, self.task.max_positions())
        self.longest = args.length or positions
        if self.longest > positions:
            raise UserError(f"--length is {self.longest}, but {args.teacher} has {positions} positions")
        self.train_data: TokenStream | TaskRows
        if self.has_rows:
            self.train_data = TaskRows(self.task, "train", self.longest)
            valid_rows = TaskRows(self.task, "valid", positions)
        else:
            self.train_data = read_texts(args.data, "train", self.task.source_dictionary)
            valid_texts = read_texts(args.data, "valid", self.task.source_dictionary)
        self.students = Students(self.model, args.attention, args.option, args.lr, args.steps, args.seed)
        self._print_summary(len(layers))
        self.report: HeldOutReport | DevReport
        if self.has_rows:
            self._report_rows_left_out()
            scores = DevScores(self.model, self.task, valid_rows, args.evaluate_rows, progress.scores)
            self.report = DevReport(scores, args.attention)
        else:
            held_out = []
            for length in held_out_lengths(self.longest):
                count = held_out_count(args.evaluate_texts or HELD_OUT_COUNT, length)
                held_out.append(HeldOutSet(self.model, valid_texts, count, length))
            self.report = HeldOutReport(held_out)

    def _print_summary(self, layers: int) -> None:
        """Print what the run will do."""
        args = self.args
        width = self.model.args.encoder_embed_dim
        options = [f"{key}={value}" for key, value in args.option.items() if value is not None]
        if isinstance(self.train_data, TaskRows):
            size = f"{len(self.train_data):,} rows"
        else:
            size = f"{len(self.train_data.tokens):,} tokens"
        steps = {"transfer": args.steps, "distillation": args.distill}
        stages = [f"{name} ({count:,} steps)" for name, count in steps.items() if count]
        print(f"teacher    {args.teacher}: layers {layers}, width {width}, texts of up to {self.longest:,} tokens")
        print(f"attention  softmax -> {' '.join([args.attention, *options])}")
        print(f"data       {args.data}: {size} in train")
        print(f"stages     {', '.join(stages) or 'none'}, about {args.tokens:,} tokens per step")
        print(f"writes     {args.out / CHECKPOINT}")
        print(f"watch      tensorboard --logdir {args.out / 'tensorboard'}", flush=True)

    def _report_rows_left_out(self) -> None:
        """Print how many rows are too long to train on, if there are any."""
        assert isinstance(self.train_data, TaskRows)
        too_long = np.count_nonzero(self.train_data.lengths > self.longest)
        if too_long:
            print(f"left out of the training: {too_long} rows of more than {self.longest} tokens")

    def train(self, writer: SummaryWriter) -> None:
        """Train all stages, and report the result of each."""
        args = self.args
        self.report.before_transfer(self.students)
        self._train_stage("transfer", self.students, writer)
        self.report.after_transfer(self.students)
        self._save_scores()
        self._choose_softmax_layers()
        original = None
        if args.distill:
            original = copy.deepcopy(self.model)
        changed = self.students.fold(self.progress.softmax_layers or ())
        if self.encoder is not None:
            self.encoder.parameters |= changed
        if args.distill:
            self.report.before_stage()
            distillation = Distillation(original, self.model, args.distill_lr, args.distill, args.seed)
            self._train_stage("distillation", distillation, writer)
            self.report.after_stage("distillation")
            self._save_scores()
            self._take_over_parameters()

    def _train_stage(self, name: str, trainer: Any, writer: SummaryWriter) -> None:
        """Train a stage to its end, or what is missing of it."""
        self.progress.train(name, trainer, self.train_data, self.longest, writer)

    def _choose_softmax_layers(self) -> None:
        """Choose the layers that keep softmax as --softmax-layers says, unless an earlier run did, and report them."""
        if not self.softmax_layers:
            return
        if isinstance(self.softmax_layers, list):
            self.progress.softmax_layers = self.softmax_layers
        elif self.progress.softmax_layers is None:
            self.progress.softmax_layers = self._find_best_layers(self.softmax_layers)
            if self.progress.stages:
                self.progress.save()
        chosen = self.progress.softmax_layers
        self.report.with_softmax_layers(softmax_layers.mixed_attentions(self.students, chosen), chosen)
        self._save_scores()

    def _find_best_layers(self, count: int) -> list[int]:
        """Return the layers, in increasing order, in which softmax brings the model closest to the teacher."""
        if isinstance(self.train_data, TaskRows):
            distance = softmax_layers.classifier_distance(self.model, self.task, self.train_data)
        else:
            distance = softmax_layers.encoder_distance(self.model, self.train_data, self.longest)
        return sorted(softmax_layers.find_best_layers(count, self.students, distance))

    def _save_scores(self) -> None:
        """Save the scores of the dev rows, unless no step has been saved: then other settings may still be used."""
        if self.has_rows and self.progress.stages:
            self.progress.save()

    def _take_over_parameters(self) -> None:
        """Copy the model's parameters to the encoder that will be written."""
        if self.encoder is None:
            return
        for name, parameter in self.model.state_dict().items():
            if name in self.encoder.parameters:
                self.encoder.parameters[name] = parameter.cpu()

    def write_model(self) -> None:
        """Write OUT/model.pt and the files that belong to it, and print notes about it."""
        args = self.args
        options = {f"{args.attention}_{key}": value for key, value in args.option.items()}
        if self.progress.softmax_layers:
            options["softmax_layers"] = ",".join(str(layer) for layer in self.progress.softmax_layers)
        if self.encoder is None:
            options["attention"] = args.attention
            teacher.write_classifier(self.model, self.task, options, args.teacher, args.data, args.out)
            return
        self.encoder.options |= options
        _write_encoder(self.encoder, args.attention, args.out)
        for note in self.encoder.notes:
            print(note)
        print("to fine-tune it, with TASK one of configs/glue:")
        print(finetuning_command(args.out / CHECKPOINT, self.encoder.options["max_positions"]))


def _write_encoder(encoder: ImportedEncoder, attention: str, out: Path) -> None:
    """Write the checkpoint and the files that belong to it into `out`, which may hold other files.

    The checkpoint is moved there last, so that it is never there without the other files.
    """
    part = out / "part"
    part.mkdir(exist_ok=True)
    write_converted_encoder(encoder, attention, part)
    for path in sorted(part.iterdir(), key=lambda path: path.name == CHECKPOINT):
        path.replace(out / path.name)
    part.rmdir()


def held_out_lengths(longest: int) -> list[int]:
    """Return the lengths of the held-out texts in tokens: SHORT_LENGTH, MEDIUM_LENGTH and `longest`, if not longer."""
    return sorted({min(length, longest) for length in (SHORT_LENGTH, MEDIUM_LENGTH, longest)})


def held_out_count(count: int, length: int) -> int:
    """Return the number of held-out texts of a length.

    Args:
        count: the number of texts of at most MEDIUM_LENGTH tokens; there are fewer longer ones, with as many tokens in
            total, but at least FEWEST_HELD_OUT or `count`
        length: tokens per text
    """
    if length <= MEDIUM_LENGTH:
        return count
    return max(count * MEDIUM_LENGTH // length, min(count, FEWEST_HELD_OUT))


def read_texts(data: Path, split: str, dictionary: Any) -> TokenStream:
    """Read the token ids of a split, as one stream of at most about MAX_TOKENS ids.

    Args:
        data: a directory binarized for masked_lm, or for sentence_prediction, of which the first sentences are read
        split: "train" or "valid"
        dictionary: the teacher's dictionary, whose symbols the data must have

    Raises: UserError if the data is missing, damaged or empty, or has another dictionary.
    """
    from fairseq.data import Dictionary, data_utils

    directory = data / "input0" if (data / "input0").is_dir() else data
    dictionary_file = directory / "dict.txt"
    if not dictionary_file.is_file():
        raise UserError(f"{data} is not a binarized data directory: {dictionary_file} is missing")
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


def format_options(attention: str) -> str:
    """Return the result of `linearize_options` in the form of the command line: mix=joint_offset block_size=64."""
    return " ".join(f"{key}={value}" for key, value in linearize_options(attention).items())


def main(argv: list[str]) -> None:
    """Run `lln-fairseq linearize` with the arguments that follow the program's name."""
    parser = argparse.ArgumentParser(
        prog="lln-fairseq linearize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("teacher", type=Path, help="a checkpoint with softmax attention, pre-trained or fine-tuned")
    parser.add_argument(
        "data",
        type=Path,
        help="a directory of text, binarized with the teacher's tokenizer; for a fine-tuned teacher, its task's data",
    )
    parser.add_argument("out", type=Path, help="the directory to write model.pt to")
    default = RobertaConfig.attention
    parser.add_argument("--attention", choices=sorted(MECHANISMS), default=default, help="(default: %(default)s)")
    parser.add_argument(
        "--option",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help=f"options of the attention, as in docs/attentions.md (default for {default}: {format_options(default)})",
    )
    parser.add_argument("--steps", type=int, default=400, help="updates of the transfer (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per update (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, help="tokens of the longest texts to train on (default: the model's positions)"
    )
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of the transfer (default: %(default)s)")
    parser.add_argument(
        "--softmax-layers",
        default="",
        metavar="LAYERS",
        help="layers that keep softmax, counted from 0: 1,2; or how many, best:2, to choose those that bring the model "
        "nearest to the teacher (default: none)",
    )
    parser.add_argument(
        "--distill",
        type=int,
        default=0,
        metavar="STEPS",
        help="updates of all layers on the teacher's hidden states, after the transfer (default: %(default)s)",
    )
    parser.add_argument(
        "--distill-lr", type=float, default=3e-5, help="learning rate of the distillation (default: %(default)s)"
    )
    parser.add_argument(
        "--evaluate-rows",
        type=int,
        metavar="N",
        help="score a classifier on the first N rows of the split valid (default: all rows)",
    )
    parser.add_argument(
        "--evaluate-texts",
        type=int,
        metavar="N",
        help="compare an encoder with its teacher on N held-out texts of 128 and of 512 tokens, and on fewer of the "
        f"longest length (default: {HELD_OUT_COUNT})",
    )
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.steps, args.distill) < 0:
        parser.error("--steps and --distill must be at least 0")
    if args.tokens < 1 or (args.length is not None and args.length < 3):
        parser.error("--tokens must be at least 1, and --length at least 3")
    if args.evaluate_rows is not None and args.evaluate_rows < 1:
        parser.error(f"--evaluate-rows must be at least 1, got {args.evaluate_rows}")
    if args.evaluate_texts is not None and args.evaluate_texts < 2:
        parser.error(f"--evaluate-texts must be at least 2, to compare neighbors, got {args.evaluate_texts}")
    if not all(0 < lr < math.inf for lr in (args.lr, args.distill_lr)):
        parser.error("--lr and --distill-lr must be positive and finite")
    if not 0 <= args.seed < 2**64:
        parser.error("--seed must be from 0 to 2**64 - 1")
    try:
        args.option = parse_options(args.option)
    except ValueError:
        parser.error("--option must be KEY=VALUE, as in mix=joint_offset")
    disable_malloc_trim()
    linearize(args)
