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
import math
from pathlib import Path

from lln_fairseq.attention import MECHANISMS, reject_layer_mechanism
from lln_fairseq.attention.registry import parse_config, parse_options
from lln_fairseq.checkpoints.compatibility import is_finetuned
from lln_fairseq.conversion.convert import CHECKPOINT, finetuning_command
from lln_fairseq.conversion.from_fairseq import read_fairseq_checkpoint
from lln_fairseq.errors import user_errors
from lln_fairseq.linearize import teacher
from lln_fairseq.linearize.classifier import ClassifierLinearization
from lln_fairseq.linearize.dev_scores import format_score
from lln_fairseq.linearize.progress import Progress
from lln_fairseq.linearize.softmax_layers import resolve_softmax_layers
from lln_fairseq.linearize.stages import Linearization
from lln_fairseq.linearize.text_encoder import HELD_OUT_COUNT, TextLinearization
from lln_fairseq.linearize.write import write_linear_model
from lln_fairseq.models.lln_roberta import RobertaConfig
from lln_fairseq.training.malloc import disable_malloc_trim
from lln_fairseq.training.recipes import attention_of_layout, layout_names


def linearize(args: argparse.Namespace) -> None:
    """Write OUT/model.pt, and next to it what the same command needs to resume. Do nothing if OUT is complete.

    In `args`, the parsed command line, `option` is replaced by all options of the attention, `steps` by 0 if the
    attention has nothing to learn in the transfer, and `softmax_layers` by numbers.
    """
    with user_errors():
        reject_layer_mechanism(args.attention, "cannot replace a teacher's attention")
        options = {**MECHANISMS[args.attention].cls.linearize_options, **args.option}
        args.option = vars(parse_config(args.attention, options))  # the checkpoint must state all options
    skips_transfer = args.steps > 0 and not MECHANISMS[args.attention].cls.learns_transfer
    if skips_transfer:
        args.steps = 0
    layers = teacher.require_softmax(args.teacher)
    args.softmax_layers = resolve_softmax_layers(args.softmax_layers, layers)
    progress = Progress(args)
    if progress.complete:
        for label, score in progress.scores.items():
            print(format_score(label, score))
        print(f"{args.out / CHECKPOINT} is complete")
        return
    if skips_transfer and not args.distill:
        print(f"{args.attention} has nothing to learn in the transfer: --distill 400 would train all layers")
    model, task = teacher.load_teacher(args.teacher, args.data)
    encoder = None
    if not is_finetuned(task.cfg._name):
        encoder = read_fairseq_checkpoint(args.teacher, teacher.find_dictionary(args.teacher, task))
    run: Linearization
    if encoder is None and teacher.is_task_data(args.data):
        run = ClassifierLinearization(args, progress, model, task)
    else:
        run = TextLinearization(args, progress, model, task)
    progress.create_directory()  # not earlier, so that bad input creates nothing
    run.train()
    write_linear_model(
        model,
        task,
        encoder,
        args.attention,
        args.option,
        progress.softmax_layers or [],
        args.teacher,
        args.data,
        args.out,
    )
    if encoder is not None:
        for note in encoder.notes:
            print(note)
        print("to fine-tune it, with TASK one of configs/glue:")
        print(finetuning_command(args.out / CHECKPOINT, encoder.options["max_positions"]))
    progress.finish()
    print(f"{args.out / CHECKPOINT}: {args.attention}")


def main(argv: list[str]) -> None:
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
    default_options = " ".join(f"{key}={value}" for key, value in MECHANISMS[default].cls.linearize_options.items())
    attention = parser.add_mutually_exclusive_group()
    attention.add_argument("--attention", choices=sorted(MECHANISMS), default=default, help="(default: %(default)s)")
    attention.add_argument(
        "--layout", choices=layout_names(), help="an attention with its options: a file of configs/layout"
    )
    parser.add_argument(
        "--option",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help=f"options of the attention, as in docs/attentions.md (default for {default}: {default_options})",
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
        help="layers that keep softmax, counted from 0: 1,2; or every:4 for 3, 7, 11, ...; or how many, best:2, to "
        "choose those that bring the model nearest to the teacher (default: none)",
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
    if args.layout is not None:
        args.attention, options, layers = attention_of_layout(args.layout)
        args.option = {**options, **args.option}
        args.softmax_layers = args.softmax_layers or layers or ""
    del args.layout  # it is not a setting of its own
    disable_malloc_trim()
    linearize(args)
