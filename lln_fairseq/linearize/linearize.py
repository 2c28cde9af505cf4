"""Replace the softmax attention of a trained encoder with a linear attention, and train that to match.

    lln-fairseq linearize TEACHER DATA OUT --attention lln_diag --option mix=joint_offset gain=learned

TEACHER is a checkpoint with softmax attention, from a training run or `lln-fairseq convert`. DATA is a directory of
text that was binarized with the teacher's tokenizer. OUT/model.pt becomes an ordinary checkpoint of the encoder, which
can be trained, evaluated and exported. If its attention is set back to `softmax`, it computes the same as the teacher,
unless --distill trained all layers after the transfer. Give an interrupted command again to resume it.

See lln_fairseq/linearize/attention_transfer.py and distillation.py for the two stages.
"""

import argparse
import copy
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from lln_fairseq.attention import MECHANISMS, reject_layer_mechanism
from lln_fairseq.attention.registry import checked_config, parse_options
from lln_fairseq.checkpoints.config import STOCK_ATTENTION, stored_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily, load_plain_data, verify_checksums
from lln_fairseq.checkpoints.saving import lock_directory
from lln_fairseq.conversion.convert import CHECKPOINT, write_converted_encoder
from lln_fairseq.conversion.directory import write_large
from lln_fairseq.conversion.encoder import ImportedEncoder
from lln_fairseq.conversion.from_fairseq import read_fairseq_checkpoint
from lln_fairseq.data.checks import check_lines
from lln_fairseq.data.files import atomic_path
from lln_fairseq.errors import InputError, first_line, input_errors
from lln_fairseq.inference.loading import load_model
from lln_fairseq.linearize.attention_transfer import LayerwiseTrainer, TokenStream
from lln_fairseq.linearize.distillation import Distillation
from lln_fairseq.linearize.layerwise import HeldOutSet, Quality, Students, print_transfer_report
from lln_fairseq.models.lln_roberta import RobertaConfig
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.training.run_identity import data_hash, file_hash

PROGRESS = "linearize.pt"  # the file next to model.pt from which a run resumes
SECOND_STAGE = ("distill", "distill_lr")  # settings that a run may change until the second stage has begun
LR_OPTIONS = {"transfer": "--lr", "distillation": "--distill-lr"}  # by stage
LOG_INTERVAL = 10  # steps
SAVE_INTERVAL = 50  # steps
HELD_OUT_COUNT = 64  # held-out texts of each length
SHORT_LENGTH = 128  # tokens: results are reported for this length and for the longest
MAX_TOKENS = 50_000_000  # that are read of each split of DATA


def linearize(args: argparse.Namespace) -> None:
    """Write OUT/model.pt, and next to it what the same command needs to resume. Do nothing if OUT is complete.

    Args:
        args: the parsed command line; its `option` is replaced by all options of the attention, with their defaults

    Raises: InputError if the options, the teacher, the data or OUT cannot be used, or if the training diverges.
    """
    with input_errors():
        reject_layer_mechanism(args.attention, "cannot replace a teacher's attention")
        args.option = vars(checked_config(args.attention, args.option))  # the checkpoint must state all options
    _require_softmax(args.teacher)
    progress = Progress(args)
    if progress.complete:
        print(f"{args.out / CHECKPOINT} is complete")
        return
    model, task = load_model(str(args.teacher))
    encoder = read_fairseq_checkpoint(args.teacher)
    train = read_texts(args.data, "train", task.source_dictionary)
    valid = read_texts(args.data, "valid", task.source_dictionary)
    students = Students(model, args.attention, args.option, args.lr, args.steps, args.seed)
    longest = args.length or model.max_positions()
    if longest > model.max_positions():
        raise InputError(f"--length is {longest}, but {args.teacher} has {model.max_positions()} positions")
    lengths = sorted({min(SHORT_LENGTH, longest), longest})
    held_out = [HeldOutSet(model, valid, HELD_OUT_COUNT, length) for length in lengths]
    quality_before = [texts.evaluate(students) for texts in held_out]
    progress.create_directory()  # not earlier, so that bad input creates nothing
    with SummaryWriter(str(args.out / "tensorboard")) as writer:
        progress.train("transfer", students, train, longest, writer)
        _evaluate_transfer(students, held_out, quality_before)
        teacher = copy.deepcopy(model) if args.distill else None
        encoder.parameters |= students.fold()
        if teacher is not None:
            distillation = Distillation(teacher, model, args.distill_lr, args.distill, args.seed)
            similarity_before = [texts.similarity() for texts in held_out]
            progress.train("distillation", distillation, train, longest, writer)
            _evaluate_distillation(held_out, similarity_before)
            for name, parameter in model.state_dict().items():
                if name in encoder.parameters:
                    encoder.parameters[name] = parameter.cpu()
    for key, value in args.option.items():
        encoder.options[f"{args.attention}_{key}"] = value
    _write_model(encoder, args.attention, args.out)
    progress.finish()
    for note in encoder.notes:
        print(note)
    print(f"{args.out / CHECKPOINT}: {args.attention}")


def _require_softmax(teacher: Path) -> None:
    """Raise InputError if the checkpoint has another attention than softmax, or cannot be read."""
    options = stored_options(load_checkpoint_lazily(str(teacher)))["model"]
    attention = options.get("attention", STOCK_ATTENTION)
    if attention != STOCK_ATTENTION:
        raise InputError(f"{teacher} has {attention} attention, but a teacher must have softmax: give another TEACHER")


def _evaluate_transfer(students: Students, held_out: list[HeldOutSet], before: list[Quality]) -> None:
    """Print the result of the transfer on held-out texts. Raises: InputError if it is not finite."""
    after = [texts.evaluate(students) for texts in held_out]
    for quality in after:
        assert_finite(quality.errors, "transfer", "on held-out texts")
    print_transfer_report(students, held_out, before, after)


def _evaluate_distillation(held_out: list[HeldOutSet], before: list[tuple[float, float]]) -> None:
    """Print the result of the distillation on held-out texts. Raises: InputError if it is not finite.

    Args:
        before: the results of `HeldOutSet.similarity` before the distillation
    """
    after = [texts.similarity() for texts in held_out]
    assert_finite([cosine for cosine, _ in after], "distillation", "on held-out texts")
    for texts, start, end in zip(held_out, before, after, strict=True):
        print(f"held-out texts of {texts.length} tokens, compared with the teacher: before -> after the distillation")
        print(f"  cosine of the texts' vectors    {start[0]:.3f} -> {end[0]:.3f}")
        print(f"  same nearest text               {start[1]:.2f} -> {end[1]:.2f}")


def _write_model(encoder: ImportedEncoder, attention: str, out: Path) -> None:
    """Write the checkpoint and the files that belong to it into `out`, which may hold other files.

    The checkpoint is moved there last, so that it is never there without the other files.
    """
    part = out / "part"
    part.mkdir(exist_ok=True)
    write_converted_encoder(encoder, attention, part)
    for path in sorted(part.iterdir(), key=lambda path: path.name == CHECKPOINT):
        path.replace(out / path.name)
    part.rmdir()


class Progress:
    """The training state of both stages, saved in OUT/linearize.pt and restored from it.

    The file stays there after the end, because a later run may add the second stage to a finished first one.

    Attributes:
        complete: True if OUT holds the finished model of these settings
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the progress of an earlier run, if OUT holds one.

        Raises: InputError if OUT holds a run with other settings, or another model.
        """
        self.args = args
        self.file = args.out / PROGRESS
        self.stages: dict[str, Any] = {}  # states of the trainers, by stage
        self.complete = False
        hashes = {"teacher": file_hash(str(args.teacher)), "data": data_hash([str(args.data)])}
        settings = vars(args) | hashes
        self.settings = {key: str(value) for key, value in settings.items() if key != "out"}
        model = args.out / CHECKPOINT
        out_is_teacher = args.teacher.resolve().parent == args.out.resolve()
        if out_is_teacher or (model.exists() and not self.file.exists()):
            raise InputError(f"{args.out} holds another model: give another OUT")
        if self.file.exists():
            self._load(model)

    def _load(self, model: Path) -> None:
        """Load the saved progress. Raises: InputError if a setting differs that the run can no longer change."""
        saved = load_plain_data(str(self.file))
        verify_checksums(str(self.file))
        self.stages = saved["stages"]
        differing = [key for key, value in self.settings.items() if saved["settings"].get(key) != value]
        fixed = differing
        if "distillation" not in self.stages:
            fixed = [key for key in differing if key not in SECOND_STAGE]
        if fixed:
            raise InputError(f"{self.args.out} holds a run with another {', another '.join(fixed)}: give another OUT")
        self.complete = saved.get("complete") is True and not differing and model.exists()

    def create_directory(self) -> None:
        """Create OUT and lock it as long as this object lives.

        Raises: InputError if another conversion is running in it.
        """
        self.args.out.mkdir(parents=True, exist_ok=True)
        self.lock = lock_directory(self.args.out, "conversion", "OUT")

    def finish(self) -> None:
        """Record that the model has been written."""
        self.complete = True
        self._save()

    def train(
        self, name: str, trainer: LayerwiseTrainer, texts: TokenStream, longest: int, writer: SummaryWriter
    ) -> None:
        """Train a stage to its end, starting where an earlier run last saved it.

        Args:
            name: the stage, one of LR_OPTIONS
            longest: tokens of the longest texts

        Raises: InputError if an error is not finite.
        """
        if name in self.stages:
            trainer.restore(self.stages[name])
        recent_errors: deque[list[float]] = deque(maxlen=LOG_INTERVAL)
        with tqdm(total=trainer.steps, initial=trainer.step, desc=name, disable=None) as bar:
            while trainer.step < trainer.steps:
                recent_errors.append(trainer.train_step(texts, self.args.tokens, longest))
                assert_finite(recent_errors[-1], name, f"in step {trainer.step}")
                bar.update()
                is_last = trainer.step == trainer.steps
                if is_last or trainer.step % LOG_INTERVAL == 0:
                    layer_errors = _root_means(recent_errors)
                    summary = f"relative error {sum(layer_errors) / len(layer_errors):.3f}"
                    bar.set_postfix_str(summary)
                    for layer, layer_error in enumerate(layer_errors):
                        writer.add_scalar(f"{name}_error/layer_{layer:02d}", layer_error, trainer.step)
                if is_last or trainer.step % SAVE_INTERVAL == 0:
                    self.stages[name] = trainer.state()
                    self.complete = False
                    self._save()
                    if bar.disable:
                        print(f"{name}: step {trainer.step} of {trainer.steps}, {summary}", flush=True)

    def _save(self) -> None:
        """Write OUT/linearize.pt; the old one stays whole if that fails."""
        state = {"settings": self.settings, "stages": self.stages, "complete": self.complete}
        with atomic_path(self.file) as part:
            write_large(part, lambda path: torch.save(state, path))


def _root_means(errors: Sequence[Sequence[float]]) -> list[float]:
    """Return the root of the mean of the squared errors of each layer; errors are by step, then by layer."""
    return [math.sqrt(sum(squares) / len(errors)) for squares in zip(*errors, strict=True)]


def assert_finite(values: list[float], stage: str, where: str) -> None:
    """Raise InputError if a value that a stage computed is not finite.

    Args:
        stage: "transfer" or "distillation"
        where: when or on what the values were computed, for the message
    """
    if not all(map(math.isfinite, values)):
        raise InputError(
            f"the {stage} {where} diverged to NaN or infinity: try a lower {LR_OPTIONS[stage]} and another OUT"
        )


def read_texts(data: Path, split: str, dictionary: Any) -> TokenStream:
    """Read the token ids of a split, as one stream of at most about MAX_TOKENS ids.

    Args:
        data: a directory binarized for masked_lm, or for sentence_prediction, of which the first sentences are read
        split: "train" or "valid"
        dictionary: the teacher's dictionary, whose symbols the data must have

    Raises: InputError if the data is missing, damaged or empty, or has another dictionary.
    """
    from fairseq.data import Dictionary, data_utils

    directory = data / "input0" if (data / "input0").is_dir() else data
    dictionary_file = directory / "dict.txt"
    if not dictionary_file.is_file():
        raise InputError(f"{data} is not a binarized data directory: {dictionary_file} is missing")
    check_lines(str(directory / split), dictionary_file)
    teacher_symbols = [symbol for symbol in dictionary.symbols if symbol != "<mask>"]
    if Dictionary.load(str(dictionary_file)).symbols != teacher_symbols:
        raise InputError(f"the dictionary of {data} is not the teacher's: binarize with the teacher's tokenizer")
    try:
        dataset = data_utils.load_indexed_dataset(str(directory / split), dictionary)
    except Exception as error:  # fairseq's readers raise many kinds of exceptions on damaged files
        raise InputError(f"cannot load split '{split}' of {data}: {first_line(error)}") from error
    if dataset is None or len(dataset) == 0:
        raise InputError(f"{data} has no text in its split '{split}'")
    rows = []
    num_tokens = 0
    for number in range(len(dataset)):
        rows.append(dataset[number])
        num_tokens += len(rows[-1])
        if num_tokens >= MAX_TOKENS:
            break
    return TokenStream(torch.cat(rows).long(), dictionary.bos(), dictionary.eos())


def main(argv: list[str]) -> None:
    """Run `lln-fairseq linearize` with the arguments that follow the program's name."""
    parser = argparse.ArgumentParser(
        prog="lln-fairseq linearize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("teacher", type=Path, help="a checkpoint with softmax attention")
    parser.add_argument("data", type=Path, help="a directory of text, binarized with the teacher's tokenizer")
    parser.add_argument("out", type=Path, help="the directory to write model.pt to")
    default = RobertaConfig.attention
    parser.add_argument("--attention", choices=sorted(MECHANISMS), default=default, help="(default: %(default)s)")
    parser.add_argument(
        "--option",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="options of the attention, as in docs/attentions.md: mix=joint_offset",
    )
    parser.add_argument("--steps", type=int, default=400, help="updates of the transfer (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per update (default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens of the longest texts (default: the model's positions)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of the transfer (default: %(default)s)")
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
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.steps, args.distill) < 0 or args.tokens < 1 or (args.length is not None and args.length < 3):
        parser.error("--steps and --distill must be at least 0, --tokens at least 1, and --length at least 3")
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
