"""The stages of a linearization, which those of a text encoder and of a classifier share."""

import argparse
import copy
import shlex

from lln_fairseq.conversion.convert import CHECKPOINT
from lln_fairseq.errors import UserError
from lln_fairseq.linearize.distillation import Distillation
from lln_fairseq.linearize.progress import Progress
from lln_fairseq.linearize.softmax_layers import BEST, Distance, find_best_layers
from lln_fairseq.linearize.students import Students
from lln_fairseq.models import LLNRobertaModel
from lln_fairseq.models.options import parse_softmax_layers


class Linearization:
    """Base class of the linearizations. A subclass loads the data, and trains and reports the stages in `train`.

    Attributes:
        model: the teacher, until `fold` turns it into the linear model in place
        longest: the number of tokens of the longest texts to train on
    """

    def __init__(
        self, args: argparse.Namespace, progress: Progress, model: LLNRobertaModel, max_positions: int
    ) -> None:
        """Check --length, and build the students. `max_positions` limits --length."""
        self.args = args
        self.progress = progress
        self.model = model
        self.longest = args.length or max_positions
        if self.longest > max_positions:
            raise UserError(f"--length is {self.longest}, but {args.teacher} has {max_positions} positions")
        self.students = Students(model, args.attention, args.option, args.lr, args.steps, args.seed)

    def train(self) -> None:
        """Train all stages, or what an earlier run left of them, and report the result of each.

        `model` is the linear model afterwards. Raises UserError if a stage diverges.
        """
        raise NotImplementedError

    def distance(self) -> Distance:
        """Compute the teacher's outputs, and return the distance from them that `choose_softmax_layers` minimizes."""
        raise NotImplementedError

    def print_summary(self, size: str) -> None:
        """Print what the run will do. `size` is that of the training data, with its unit."""
        args = self.args
        layers = len(self.students.layers)
        width = self.model.args.encoder_embed_dim
        options = [f"{key}={value}" for key, value in args.option.items() if value is not None]
        steps = {"transfer": args.steps, "distillation": args.distill}
        stages = [f"{name} ({count:,} steps)" for name, count in steps.items() if count]
        print(f"teacher    {args.teacher}: layers {layers}, width {width}, texts of up to {self.longest:,} tokens")
        print(f"attention  softmax -> {' '.join([args.attention, *options])}")
        print(f"data       {args.data}: {size} in train")
        print(f"stages     {', '.join(stages) or 'none'}, about {args.tokens:,} tokens per step")
        print(f"writes     {args.out / CHECKPOINT}")
        print(f"watch      tensorboard --logdir {shlex.quote(str(args.out / 'tensorboard'))}", flush=True)

    def choose_softmax_layers(self) -> list[int]:
        """Return the layers that keep softmax, in increasing order, and record them in the progress.

        --softmax-layers names them, an earlier run chose them, or this call chooses the best ones. Call it only if
        --softmax-layers was given.
        """
        best = BEST.fullmatch(self.args.softmax_layers)
        if best is None:
            self.progress.softmax_layers = list(parse_softmax_layers(self.args.softmax_layers))
        elif self.progress.softmax_layers is None:
            chosen = find_best_layers(int(best[1]), self.students, self.distance())
            self.progress.softmax_layers = sorted(chosen)
            self.progress.save_if_trained()
        return self.progress.softmax_layers

    def fold(self) -> Distillation | None:
        """Turn the model into the linear one in place, and return its trainer for the distillation.

        The result is None without --distill.
        """
        args = self.args
        softmax_layers = self.progress.softmax_layers or ()
        if not args.distill:
            self.students.fold(softmax_layers)
            return None
        teacher = copy.deepcopy(self.model)
        self.students.fold(softmax_layers)
        return Distillation(teacher, self.model, args.distill_lr, args.distill, args.seed)
