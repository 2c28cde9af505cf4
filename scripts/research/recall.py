"""Train small encoders to recall values by their keys, and compare attentions: multi-query associative recall.

    python -m scripts.research.recall runs/recall --attentions softmax,lln_diag --tasks 64x4 128x8 --widths 64 \\
        --rates 1e-3 3e-3 --seeds 1 2 --previous-token

The task is the one of Zoology (arXiv 2312.04927) and Based (arXiv 2402.18510), for an encoder. A row starts with pairs
of a key and a value, which are random tokens. Later, every key occurs once more, followed by <mask>, and the model
predicts the value that belongs to it. The places of these queries are drawn from a power law that prefers early ones.
The remaining tokens are 0, or random with --filler random. The task 64x4 has rows of 64 tokens with 4 pairs.

The model has two pre-norm attention layers without MLPs, learned positions, and a tied output projection. To recall a
value, the first layer must attend from <mask> and from each value to the key before it. Softmax attention did not learn
this in two epochs of 64x4. With --previous-token, every token gets a learned projection of the one before it, as from a
short convolution.

Training ends when --target percent of the answers on held-out rows are correct, or after --epochs. For every attention,
the tables show the learning rate with the highest mean accuracy over the seeds after the last epoch, on the same
held-out rows, and the lowest and highest accuracy of a seed. A pair and its query are in the same block if their tokens
are among the same 32 tokens of the row, counted from its start. "Other block" means all other queries, and "beyond"
those that are more than two blocks behind, where two layers with a window of one block on each side cannot reach them.
Finished runs in OUT are skipped, so you can run an interrupted command again.
"""

import argparse
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln_fairseq.command import run_main
from lln_fairseq.terminal import at_least_one, program_parser, progress_bar, text_table
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.research.small_models import (
    DEVICE,
    AttentionLayer,
    Trainer,
    batches,
    build_layer_attentions,
    file_name,
    finish_run,
    matrix_attentions_argument,
    predict_targets,
)
from scripts.research.summaries import mean_and_range

VOCABULARY = 8192  # 0 is the filler, the lower half are keys, and the upper half values
FIRST_VALUE = VOCABULARY // 2
MASK = VOCABULARY  # an input token that is never predicted
POWER = 0.01  # the power law of Zoology: the weight of the n-th place is n ** (POWER - 1)
BLOCK = 32  # tokens; the tables distinguish queries in the block of their pair from all others
HELD_OUT_ROWS = 3000
LAYERS = 2
WEIGHT_DECAY = 0.1
PARTS = ("all", "same block", "other block", "beyond")  # the queries that the columns of the tables are about


@dataclass
class RecallSettings:
    """The settings on which the result of a run depends."""

    attention: str  # an attention spec
    softmax_last: bool  # the last layer computes softmax instead
    length: int  # tokens of a row
    pairs: int  # of a key and a value in a row, which is also the number of queries
    filler: str  # the tokens between pairs and queries: "zeros" or "random"
    rows: int  # for training
    width: int  # features of a token
    head_dim: int
    previous_token: bool  # adds a projection of the previous token to every token, before the first layer
    lr: float  # the highest; it falls to 0 along a cosine over all epochs
    batch: int  # rows per update
    epochs: int  # at most
    target: float  # accuracy in percent that ends the training
    seed: int  # of the initial parameters and of the order of the rows

    @property
    def name(self) -> str:
        """The attention and the settings that can have several values in one command. It names the result file, too."""
        return f"{self.length}x{self.pairs}, width {self.width}, {self.attention}, lr {self.lr:g}, seed {self.seed}"


class RecallRows(NamedTuple):
    """Rows of the task. R is the number of rows, N the number of tokens and P the number of pairs of a row."""

    tokens: Tensor  # int64 (R, N), the inputs
    masks: Tensor  # int64 (R, P), the position of the <mask> that asks for each pair
    values: Tensor  # int64 (R, P), the value of each pair, which is the token to predict at its <mask>

    def block_distances(self) -> Tensor:
        """Return how many blocks each query is behind its pair, int64 (R, P). A pair is never cut by a block's end."""
        pair_positions = 2 * torch.arange(self.masks.shape[1])
        return self.masks // BLOCK - pair_positions // BLOCK


def draw_distinct(rows: int, count: int, low: int, high: int, generator: torch.Generator) -> Tensor:
    """Draw rows of distinct integers from `low` to `high` - 1, uniformly. Return them as int64 (rows, count)."""
    drawn = torch.randint(low, high, (rows, count), generator=generator)
    while True:
        in_order = drawn.sort(dim=1).values
        repeats = (in_order.diff(dim=1) == 0).any(dim=1)
        if not repeats.any():
            return drawn
        drawn[repeats] = torch.randint(low, high, (int(repeats.sum()), count), generator=generator)


def make_rows(rows: int, length: int, pairs: int, filler: str, seed: int) -> RecallRows:
    """Make random rows of the task. `length` must be an even number of at least 4 * pairs."""
    generator = torch.Generator().manual_seed(seed)
    if filler == "random":
        tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    else:
        tokens = torch.zeros(rows, length, dtype=torch.long)
    keys = draw_distinct(rows, pairs, 1, FIRST_VALUE, generator)
    values = draw_distinct(rows, pairs, FIRST_VALUE, VOCABULARY, generator)
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    places = torch.arange(1, length // 2 - pairs + 1)  # a place has two tokens, for a key and its <mask>
    weights = places.double() ** (POWER - 1)
    drawn_places = torch.multinomial(weights.expand(rows, -1), pairs, generator=generator)
    masks = 2 * pairs + 2 * drawn_places + 1
    tokens.scatter_(1, masks - 1, keys)
    tokens.scatter_(1, masks, MASK)
    return RecallRows(tokens, masks, values)


class PreviousToken(nn.Module):
    """Adds a linear projection of the previous token to every token of `width` features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens with the projections, (B, N, C). The token before the first one counts as 0."""
        previous = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + self.projection(previous)


class RecallModel(nn.Module):
    """An encoder that predicts the tokens at given positions."""

    def __init__(self, settings: RecallSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 1, settings.width)
        self.positions = nn.Embedding(settings.length, settings.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.layers = nn.Sequential()
        if settings.previous_token:
            self.layers.append(PreviousToken(settings.width))
        heads = settings.width // settings.head_dim
        attentions = list(build_layer_attentions(settings.attention, LAYERS, heads, settings.head_dim, settings.length))
        if settings.softmax_last:
            attentions[-1:] = build_layer_attentions("softmax", 1, heads, settings.head_dim, settings.length)
        for attention in attentions:
            self.layers.append(AttentionLayer(settings.width, attention))
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, tokens: Tensor, masks: Tensor) -> Tensor:
        """Return the logits (B, P, VOCABULARY) of tokens (B, N) at the positions `masks`, (B, P), only."""
        x = self.layers(self.embedding(tokens) + self.positions.weight)
        masked = x.gather(1, masks[:, :, None].expand(-1, -1, x.shape[-1]))
        return F.linear(self.norm(masked), self.embedding.weight[:VOCABULARY])


def recall_accuracy(model: nn.Module, rows: RecallRows, batch: int) -> dict[str, float]:
    """Return the accuracy in percent for each of PARTS, and leave the model in evaluation mode.

    A part without queries is left out.
    """
    correct = predict_targets(model, batches(rows, batch)) == rows.values
    distances = rows.block_distances()
    parts = (correct, correct[distances == 0], correct[distances > 0], correct[distances > LAYERS])
    accuracies = {}
    for name, answers in zip(PARTS, parts, strict=True):
        if answers.numel():
            accuracies[name] = 100 * answers.double().mean().item()
    return accuracies


def train(settings: RecallSettings, train_rows: RecallRows, held_out: RecallRows) -> dict[str, Any]:
    """Train a model, and return its "history": the "loss" in bits per query, "accuracy" and "seconds" of every epoch.

    Training also ends after an epoch whose loss is not finite, as happens if the learning rate is too high.
    """
    torch.manual_seed(settings.seed)
    model = RecallModel(settings).to(DEVICE)
    updates = math.ceil(settings.rows / settings.batch)  # of an epoch

    def lr_factor(update: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * (update // updates) / settings.epochs))

    trainer = Trainer(model, settings.lr, WEIGHT_DECAY, lr_factor)
    history: list[dict[str, Any]] = []
    while len(history) < settings.epochs:
        start = time.perf_counter()
        name = f"{settings.name}, epoch {len(history) + 1}"
        with progress_bar(name, updates, "update") as bar:
            order = torch.randperm(settings.rows)
            loss = trainer.train_epoch(batches(train_rows, settings.batch, order), bar) / math.log(2)
        accuracy = recall_accuracy(model, held_out, settings.batch)
        history.append({"loss": loss, "accuracy": accuracy, "seconds": time.perf_counter() - start})
        print(f"{name}: loss {loss:.2f} bits, accuracy {accuracy['all']:.1f} %", flush=True)
        if accuracy["all"] >= settings.target or not math.isfinite(loss):
            break
    return {"history": history}


def best_rate_row(attention: str, histories: dict[float, list[list[dict[str, Any]]]]) -> list[str]:
    """Return the cells of a row: the attention, its best learning rate, the accuracies, and the epochs of each seed.

    The best rate has the highest mean accuracy over the seeds after the last epoch. `histories` are those of all seeds,
    by learning rate.
    """

    def mean_accuracy(rate: float) -> float:
        return statistics.mean(history[-1]["accuracy"]["all"] for history in histories[rate])

    best_rate = max(histories, key=mean_accuracy)
    row = [attention, f"{best_rate:g}"]
    finals = [history[-1]["accuracy"] for history in histories[best_rate]]
    for part in PARTS:
        row.append(mean_and_range([final[part] for final in finals if part in final]) or "–")
    row.append(", ".join(str(len(history)) for history in histories[best_rate]))
    return row


def run_experiment(args: argparse.Namespace) -> None:
    """Finish all runs, and print a table for each task and width."""
    disable_malloc_trim()
    names = ("softmax_last", "filler", "rows", "head_dim", "previous_token", "batch", "epochs", "target")
    options = {name: getattr(args, name) for name in names}
    tables = []
    for length, pairs in args.tasks:
        train_rows = make_rows(args.rows, length, pairs, args.filler, seed=0)
        held_out = make_rows(HELD_OUT_ROWS, length, pairs, args.filler, seed=1)
        for width in args.widths:
            table = [["attention", "lr", *PARTS, "epochs"]]
            for attention in args.attentions:
                histories: dict[float, list[list[dict[str, Any]]]] = {}
                for rate, seed in itertools.product(args.rates, args.seeds):
                    settings = RecallSettings(
                        attention=attention, length=length, pairs=pairs, width=width, lr=rate, seed=seed, **options
                    )
                    file = args.out / f"{file_name(settings.name)}.json"
                    result = finish_run(file, settings, partial(train, settings, train_rows, held_out))
                    histories.setdefault(rate, []).append(result["history"])
                table.append(best_rate_row(attention, histories))
            tables.append(f"{length} tokens, {pairs} pairs, width {width}: accuracy [%]\n{text_table(table)}")
    print("\n" + "\n\n".join(tables))


def task_argument(text: str) -> tuple[int, int]:
    """Convert an argument LENGTHxPAIRS to both numbers, as a `type` of argparse."""
    match = re.fullmatch(r"(\d+)x([1-9]\d*)", text)
    if match:
        length = int(match[1])
        pairs = int(match[2])
        if length % 2 == 0 and length >= 4 * pairs:
            return length, pairs
    raise argparse.ArgumentTypeError(f"must be LENGTHxPAIRS with an even LENGTH of at least 4 * PAIRS, got '{text}'")


def main(argv: Sequence[str] | None = None) -> int:
    parser = program_parser("python -m scripts.research.recall", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the results, one JSON file for each run")
    parser.add_argument(
        "--attentions",
        type=matrix_attentions_argument,
        default=["softmax", "lln_diag"],
        metavar="NAME[:OPTION=VALUE,...],...",
        help="attentions to compare (default: softmax,lln_diag)",
    )
    parser.add_argument("--softmax-last", action="store_true", help="the last layer of every model computes softmax")
    parser.add_argument(
        "--tasks",
        type=task_argument,
        nargs="+",
        default=[(64, 4), (128, 8), (256, 16)],
        metavar="LENGTHxPAIRS",
        help="default: 64x4 128x8 256x16",
    )
    parser.add_argument("--filler", choices=["zeros", "random"], default="zeros", help="default: %(default)s")
    parser.add_argument("--rows", type=at_least_one, default=100_000, help="training rows (%(default)s)")
    parser.add_argument("--widths", type=at_least_one, nargs="+", default=[64, 128], help="features of a token")
    parser.add_argument("--head-dim", type=at_least_one, default=32, help="features of a head (%(default)s)")
    parser.add_argument("--previous-token", action="store_true", help="see above")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3], help="learning rates (%(default)s)")
    parser.add_argument("--batch", type=at_least_one, default=64, help="rows per update (%(default)s)")
    parser.add_argument("--epochs", type=at_least_one, default=8, help="largest number of epochs (%(default)s)")
    parser.add_argument("--target", type=float, default=99.0, help="accuracy in %% that ends a run (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args(argv)
    for width in args.widths:
        if width % args.head_dim:
            parser.error(f"--widths must be multiples of --head-dim {args.head_dim}, got {width}")
    return run_main(partial(run_experiment, args), "\ninterrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
