"""Give a trained softmax encoder a linear attention, in minutes (see lln_fairseq/linearize/attention_transfer.py).

    python -m lln_fairseq linearize TEACHER DATA OUT --attention lln_diag --option mix=joint_offset gain=learned

TEACHER is a checkpoint with softmax attention, of a training or of `lln-fairseq convert`; DATA a directory of text that
was binarised for it. OUT/model.pt is an ordinary checkpoint of the encoder: it trains, is evaluated and exported, and
with `softmax` it still computes what the teacher computes, unless --distill has trained all layers after the transfer
(see lln_fairseq/linearize/distillation.py). The same command goes on after an interruption.
"""

import argparse
import copy
import math
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from lln_fairseq.attention import MECHANISMS, require_attention
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
from lln_fairseq.linearize.layerwise import HeldOutSet, Students, report
from lln_fairseq.models.lln_roberta import RobertaConfig
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.training.run_identity import data_hash, file_hash

PROGRESS = "linearize.pt"  # beside model.pt: goes on from there
SECOND_STAGE = ("distill", "distill_lr")  # settings that a run may change before that stage has begun
RATES = {"transfer": "--lr", "distillation": "--distill-lr"}
LOG_INTERVAL, SAVE_INTERVAL = 10, 50  # steps
COUNT = 64  # of the held-out texts
SHOWN = 128  # tokens: results are shown at this length and at the longest
MOST_TOKENS = 50_000_000  # that are read of DATA


def linearize(args: argparse.Namespace) -> None:
    """Write OUT/model.pt, and next to it what the same command needs to resume.

    Raises: InputError if the options, the teacher, the data or OUT cannot be used, or if the training diverges.
    """
    with input_errors():
        require_attention(args.attention, "cannot take the place of a teacher's attention")
        args.option = vars(checked_config(args.attention, args.option))  # all of them: the checkpoint says what it has
    attention = stored_options(load_checkpoint_lazily(str(args.teacher)))["model"].get("attention", STOCK_ATTENTION)
    if attention != STOCK_ATTENTION:
        raise InputError(f"{args.teacher} has {attention} attention, and a teacher has softmax")
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
        raise InputError(f"--length is {longest}, and {args.teacher} has {model.max_positions()} positions")
    held_out = [HeldOutSet(model, valid, COUNT, length) for length in sorted({min(SHOWN, longest), longest})]
    before_transfer = [texts.evaluate(students) for texts in held_out]
    progress.begin()
    with SummaryWriter(str(args.out / "tensorboard")) as writer:
        progress.train("transfer", students, train, longest, writer)
        after_transfer = [texts.evaluate(students) for texts in held_out]
        for quality in after_transfer:
            assert_finite(quality.errors, "transfer", "on held-out texts")
        report(students, held_out, before_transfer, after_transfer)
        teacher = copy.deepcopy(model) if args.distill else None
        encoder.parameters |= students.fold()
        if teacher:
            before = [texts.similarity() for texts in held_out]
            distillation = Distillation(teacher, model, args.distill_lr, args.distill, args.seed)
            progress.train("distillation", distillation, train, longest, writer)
            after = [texts.similarity() for texts in held_out]
            assert_finite([cosine for cosine, _ in after], "distillation", "on held-out texts")
            report_distillation(held_out, before, after)
            encoder.parameters |= {
                name: x.cpu() for name, x in model.state_dict().items() if name in encoder.parameters
            }
    encoder.options |= {f"{args.attention}_{key}": value for key, value in args.option.items()}
    write_beside(encoder, args.attention, args.out)
    progress.finish()
    for note in encoder.notes:
        print(note)
    print(f"{args.out / CHECKPOINT}: {args.attention}")


def write_beside(encoder: ImportedEncoder, attention: str, out: Path) -> None:
    """Puts the checkpoint and what belongs to it into a directory that holds other files, the checkpoint last."""
    part = out / "part"
    part.mkdir(exist_ok=True)
    write_converted_encoder(encoder, attention, part)
    for path in sorted(part.iterdir(), key=lambda path: path.name == CHECKPOINT):
        path.replace(out / path.name)
    part.rmdir()


class Progress:
    """How far the stages are, in OUT/linearize.pt, which stays there: a second stage may follow a finished first."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises: InputError where OUT holds a run with other settings, or another model."""
        self.args, self.file, self.stages, self.complete = args, args.out / PROGRESS, {}, False
        content = {"teacher": file_hash(str(args.teacher)), "data": data_hash([str(args.data)])}
        self.settings = {key: str(value) for key, value in (vars(args) | content).items() if key != "out"}
        there, model = self.file.exists(), args.out / CHECKPOINT
        if args.teacher.resolve().parent == args.out.resolve() or (model.exists() and not there):
            raise InputError(f"{args.out} holds another model: give another OUT")
        if there:
            saved = load_plain_data(str(self.file))
            verify_checksums(str(self.file))
            self.stages = saved["stages"]
            differing = [key for key, value in self.settings.items() if saved["settings"].get(key) != value]
            if fixed := [key for key in differing if key not in SECOND_STAGE or "distillation" in self.stages]:
                raise InputError(f"{args.out} holds a run with another {', another '.join(fixed)}: give another OUT")
            self.complete = saved.get("complete") is True and not differing and model.exists()

    def begin(self) -> None:
        """Makes OUT. Raises: InputError where a conversion is running in it."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        self.lock = lock_directory(self.args.out, "conversion", "OUT")  # as long as this lives

    def finish(self) -> None:
        """The model is written."""
        self.complete = True
        self._save()

    def train(
        self, name: str, stage: LayerwiseTrainer, texts: TokenStream, longest: int, writer: SummaryWriter
    ) -> None:
        """Train a stage to its end, from where an earlier run stopped."""
        if name in self.stages:
            stage.restore(self.stages[name])
        errors: deque[list[float]] = deque(maxlen=LOG_INTERVAL)
        with tqdm(total=stage.steps, initial=stage.step, desc=name, disable=None) as bar:
            while stage.step < stage.steps:
                errors.append(stage.train_step(texts, self.args.tokens, longest))
                assert_finite(errors[-1], name, f"in step {stage.step}")
                bar.update()
                last = stage.step == stage.steps
                if last or stage.step % LOG_INTERVAL == 0:
                    by_layer = [math.sqrt(sum(squares) / len(errors)) for squares in zip(*errors, strict=True)]
                    shown = f"relative error {sum(by_layer) / len(by_layer):.3f}"
                    bar.set_postfix_str(shown)
                    for layer, layer_error in enumerate(by_layer):
                        writer.add_scalar(f"{name}_error/layer_{layer:02d}", layer_error, stage.step)
                if last or stage.step % SAVE_INTERVAL == 0:
                    self.stages[name] = stage.state()
                    self.complete = False
                    self._save()
                    if bar.disable:
                        print(f"{name}: step {stage.step} of {stage.steps}, {shown}", flush=True)

    def _save(self) -> None:
        state = {"settings": self.settings, "stages": self.stages, "complete": self.complete}
        with atomic_path(self.file) as part:
            write_large(part, lambda path: torch.save(state, path))


def assert_finite(values: list[float], stage: str, where: str) -> None:
    """Raises: InputError where what a stage gives is not finite."""
    if not all(map(math.isfinite, values)):
        raise InputError(f"the {stage} {where} gives what is not finite: try a lower {RATES[stage]} and another OUT")


def report_distillation(
    held_out: list[HeldOutSet], before: list[tuple[float, float]], after: list[tuple[float, float]]
) -> None:
    for texts, was, now in zip(held_out, before, after, strict=True):
        print(f"held-out texts of {texts.length} tokens, after the distillation")
        print(f"  cosine of the texts' vectors    {was[0]:.3f} -> {now[0]:.3f}")
        print(f"  same nearest text               {was[1]:.2f} -> {now[1]:.2f}")


def read_texts(data: Path, split: str, dictionary: Any) -> TokenStream:
    """The tokens of a split of a directory for masked_lm, or of the first sentences of one for sentence_prediction."""
    from fairseq.data import Dictionary, data_utils

    folder = data / "input0" if (data / "input0").is_dir() else data
    if not (folder / "dict.txt").is_file():
        raise InputError(f"{data} is not a binarised data directory: {folder / 'dict.txt'} is missing")
    check_lines(str(folder / split), folder / "dict.txt")
    if Dictionary.load(str(folder / "dict.txt")).symbols != [s for s in dictionary.symbols if s != "<mask>"]:
        raise InputError(f"the dictionary of {data} is not the teacher's: binarise with the teacher's tokenizer")
    try:
        dataset = data_utils.load_indexed_dataset(str(folder / split), dictionary)
    except Exception as error:  # fairseq's readers end in many ways on what has no format of theirs
        raise InputError(f"cannot load split '{split}' of {data}: {first_line(error)}") from error
    if dataset is None or len(dataset) == 0:
        raise InputError(f"{data} has no text in its split '{split}'")
    rows, count = [], 0
    for number in range(len(dataset)):
        rows.append(dataset[number])
        count += len(rows[-1])
        if count >= MOST_TOKENS:
            break
    return TokenStream(torch.cat(rows).long(), dictionary.bos(), dictionary.eos())


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq linearize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("teacher", type=Path, help="a checkpoint with softmax attention")
    parser.add_argument("data", type=Path, help="a directory of text, binarised with the teacher's tokenizer")
    parser.add_argument("out", type=Path, help="a directory for model.pt")
    default = RobertaConfig.attention
    parser.add_argument("--attention", choices=sorted(MECHANISMS), default=default, help="(%(default)s)")
    parser.add_argument("--option", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
                        help="options of the attention, as in docs/attentions.md: mix=joint_offset")  # fmt: skip
    parser.add_argument("--steps", type=int, default=400, help="updates (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each update (%(default)s)")
    parser.add_argument("--length", type=int, help="of the longest texts (default: the model's positions)")
    parser.add_argument("--lr", type=float, default=0.01, help="of Adam (%(default)s)")
    parser.add_argument("--distill", type=int, default=0, metavar="STEPS",
                        help="updates of all layers on the teacher's states, afterwards (%(default)s)")  # fmt: skip
    parser.add_argument("--distill-lr", type=float, default=3e-5, help="of that stage's Adam (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    if min(args.steps, args.distill) < 0 or args.tokens < 1 or (args.length is not None and args.length < 3):
        parser.error("--steps and --distill must be at least 0, --tokens 1, --length 3")
    if not all(0 < lr < math.inf for lr in (args.lr, args.distill_lr)):
        parser.error("--lr and --distill-lr must be above 0 and finite")
    if not 0 <= args.seed < 2**64:
        parser.error("--seed must be from 0 to 2**64 - 1")
    try:
        args.option = parse_options(args.option)
    except ValueError:
        parser.error("--option takes KEY=VALUE, as in mix=joint_offset")
    disable_malloc_trim()
    linearize(args)
