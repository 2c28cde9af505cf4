"""Measure time and peak memory of a training iteration, by attention and length (Table 2) or by task (Table 4).

    python -m scripts.benchmarks.model --preset tiny --json table2.json
    python -m scripts.benchmarks.model --tasks text listops retrieval pathfinder image --json table4.json

An iteration is a forward pass, a backward pass and an optimizer step. Without --tasks, it is masked language modeling
with a RoBERTa on random tokens, 15% of which are masked. With --tasks, it is classification with the model in
configs/model/lra.yaml, at the lengths of the Long Range Arena's tasks and their batch sizes divided by --divide.

All attentions are timed in turn, repeat by repeat, and the tables show the medians. Each has a model and optimizer
of its own in memory: give fewer --attentions if they do not fit. `softmax` is torch's fused kernel, which fairseq's own
RoBERTa also calls with torch 2. `softmax_matrix` builds the N x N matrix, as fairseq did when the paper was written.
A layout of configs/layout is named like an attention. As in fairseq, half precision has float32 master weights, but
the loss scale of float16 is constant. Peak memory is that of a model alone, as torch reports it on a GPU; on a CPU it
is the peak of the resident set of a child process.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lln_fairseq
from lln_fairseq.attention import MECHANISMS
from lln_fairseq.command import run_main
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.provenance import describe_provenance, write_result
from lln_fairseq.terminal import at_least_one, program_parser, text_table
from lln_fairseq.timing import Spread, can_measure_resident_peak, interleaved
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import (
    OutOfMemory,
    add_device_options,
    attention_options,
    device_name,
    model_argument,
    peak_memory,
)

SOFTMAX = "softmax"
MATRIX = "softmax_matrix"
PAPER_ROWS = ("nystrom:conv_kernel=33", "flash:form=quadratic")  # Nyströmformer as in the paper, and FLASH-Quad
RECIPE_ROWS = ("softmax:dropout=0.1", "lln_diag:dropout=0.1")  # with the recipes' attention dropout
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SMALL_VOCABULARY = 4000  # vocabulary size of the presets nano and tiny
VOCABULARY = 50265
FIRST_WORD = 4  # after fairseq's four special symbols
MASKED_FRACTION = 0.15
LOSS_SCALE = 128.0  # for float16


class Task(NamedTuple):
    """The sizes of a task of the Long Range Arena, as in configs/lra. A sample has one or two sequences."""

    length: int
    batch: int
    classes: int
    sequences: int = 1


TASKS = {
    "text": Task(4096, 32, 2),
    "listops": Task(2048, 32, 10),
    "retrieval": Task(4096, 16, 2, sequences=2),
    "pathfinder": Task(1024, 128, 2),
    "image": Task(1024, 256, 10),
}
TASK_ATTENTIONS = (  # with the options of Skyformer's code base, which the paper used
    SOFTMAX,
    "lln",
    "lln_diag",
    "performer:num_features=128",
    "reformer:hashes=2",
    "skyformer:landmarks=128",
    "nystrom:landmarks=128",
)
TASK_VOCABULARY = 264  # bytes or pixels, and special symbols
HEAD = "head"

Values = dict[tuple[str, str], float | None]  # by attention and column; None if memory ran out


@dataclass
class Row:
    """The results of one attention at one length or task, which is the title of its column."""

    attention: str
    column: str
    time: Spread | None = None  # of an iteration in ms; None if it was not measured
    tokens_per_second: float | None = None  # at the median time
    memory: int | None = None  # peak in bytes; None if it was not measured
    oom: bool = False  # memory ran out, and nothing was measured


class MatrixSoftmax(nn.Module):
    """Wraps a softmax attention so that it builds the N x N matrix with torch's reference implementation."""

    def __init__(self, softmax: nn.Module) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, *args: Tensor | None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.softmax(*args)


class Adam:
    """AdamW with the settings of the recipes, for at least one parameter, all of one dtype.

    As with fairseq's --fp16, parameters in half precision have one flat float32 copy. AdamW updates this copy, and the
    result is copied to the parameters.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.half_parameters: list[nn.Parameter] = []
        self.masters = parameters
        self.loss_scale = LOSS_SCALE if parameters[0].dtype == torch.float16 else 1.0
        if parameters[0].dtype != torch.float32:
            self.half_parameters = parameters
            self.masters = [nn.Parameter(torch.cat([p.detach().float().flatten() for p in parameters]))]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, fused=True
        )

    def step(self) -> None:
        """Update the parameters. Scaled gradients are divided by the loss scale, and missing ones count as 0."""
        if self.half_parameters:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.half_parameters]
            self.masters[0].grad = torch.cat([g.flatten() for g in gradients]).float().div_(self.loss_scale)
        self.optimizer.step()
        if self.half_parameters:
            parts = self.masters[0].detach().split([p.numel() for p in self.half_parameters])
            for parameter, part in zip(self.half_parameters, parts, strict=True):
                parameter.data.copy_(part.view_as(parameter))

    def zero_grad(self) -> None:
        for parameter in (*self.masters, *self.half_parameters):
            parameter.grad = None


class Training:
    """Masked language modeling of one RoBERTa on one batch of random tokens.

    `name` is an attention spec or "softmax_matrix", and `length` the tokens per sequence. The constructor seeds torch's
    generators, so all attentions start with the same random numbers.
    """

    def __init__(self, name: str, length: int, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.args = args
        self.shape = (args.batch, length)
        model = build_model(name, length, args, **self.model_options())
        self.model = self.add_head(model).to(device=args.device, dtype=DTYPES[args.dtype]).train()
        self.adam = Adam(list(self.model.parameters()))
        self.make_batch()

    def model_options(self) -> dict[str, Any]:
        return {}

    def add_head(self, model: Any) -> Any:
        return model

    def make_batch(self) -> None:
        """Set the random words and masked positions, of which the first one of each sequence is always masked."""
        masked = (torch.rand(self.shape) < MASKED_FRACTION).index_fill_(1, torch.tensor([0]), True)
        self.masked = masked.to(self.args.device)
        self.words = self.random_words()

    def random_words(self) -> Tensor:
        return torch.randint(FIRST_WORD, self.args.vocabulary, self.shape).to(self.args.device)

    def count_tokens(self) -> int:
        return self.words.numel()

    def loss(self) -> Tensor:
        logits, _ = self.model(src_tokens=self.words, masked_tokens=self.masked)
        return F.cross_entropy(logits.float(), self.words[self.masked])

    def iteration(self) -> None:
        (self.loss() * self.adam.loss_scale).backward()
        self.adam.step()
        self.adam.zero_grad()  # a model that waits for its turn holds no gradients


class TaskTraining(Training):
    """Classification with the model in configs/model/lra.yaml on one random batch of the task args.task."""

    def model_options(self) -> dict[str, Any]:
        return {
            "encoder_normalize_before": True,
            "activation_dropout": self.args.dropout,
            "pooling": "mean",
            "pooler_dim": 128,
            "pooler_activation_fn": "relu",
            "linear_init": "torch",
            "two_towers": TASKS[self.args.task].sequences == 2,
        }

    def add_head(self, model: Any) -> Any:
        model.register_classification_head(HEAD, num_classes=TASKS[self.args.task].classes)
        return model

    def make_batch(self) -> None:
        task = TASKS[self.args.task]
        names = ("src_tokens", "other_tokens")[: task.sequences]
        self.inputs = {name: self.random_words() for name in names}
        self.labels = torch.randint(task.classes, (self.args.batch,), device=self.args.device)

    def count_tokens(self) -> int:
        return sum(words.numel() for words in self.inputs.values())

    def loss(self) -> Tensor:
        logits, _ = self.model(**self.inputs, features_only=True, classification_head_name=HEAD)
        return F.cross_entropy(logits.float(), self.labels)


def build_model(name: str, length: int, args: argparse.Namespace, **further: Any) -> Any:
    """Build RoBERTa with an attention, in float32 on the CPU. `further` are other options of the model."""
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    from fairseq.data import Dictionary
    from omegaconf import OmegaConf

    from lln_fairseq.models.lln_roberta import SIZE_FIELDS, LLNRobertaModel

    dictionary = Dictionary()
    for word in range(args.vocabulary - len(dictionary)):
        dictionary.add_symbol(str(word))
    options = further | dict(zip(SIZE_FIELDS, PRESETS[args.preset], strict=True))
    options |= {"max_positions": length, "dropout": args.dropout, "attention_dropout": args.attention_dropout}
    options |= attention_options(SOFTMAX if name == MATRIX else name)
    model = LLNRobertaModel.build_model(OmegaConf.create(options), SimpleNamespace(source_dictionary=dictionary))
    if name == MATRIX:
        for layer in model.encoder.sentence_encoder.layers:
            layer.self_attn.attention = MatrixSoftmax(layer.self_attn.attention)
    return model


def train_twice(name: str, length: int, args: argparse.Namespace) -> None:
    """Build a model and train it: the second iteration needs as much memory as all later ones."""
    training = args.training(name, length, args)
    training.iteration()
    training.iteration()


def prepare_training(name: str, length: int, args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that builds a model and runs two iterations, to measure their memory.

    A small model is trained first, so that the libraries that are loaded on first use are not measured.
    """
    torch.set_num_threads(args.threads)
    train_twice(name, 64, argparse.Namespace(**vars(args) | {"preset": "small", "batch": 1}))
    return functools.partial(train_twice, name, length, args)


def measure_column(column: str, length: int, args: argparse.Namespace) -> list[Row]:
    """Measure all attentions at one length. A row that runs out of memory is not timed.

    The memory is measured first, of each model by itself. For the timing, all models are held at once.
    """
    rows = [Row(name, column) for name in args.attentions]
    if args.memory:
        for row in rows:
            try:
                row.memory = peak_memory(args.device, prepare_training, row.attention, length, args)
            except OutOfMemory:
                row.oom = True
    trainings = {row.attention: args.training(row.attention, length, args) for row in rows if not row.oom}
    runs = {name: training.iteration for name, training in trainings.items()}
    times = interleaved(runs, args.device, args.repeats)
    for row in rows:
        if row.attention in trainings:
            row.time = Spread.of(times[row.attention])
            row.tokens_per_second = 1e3 * trainings[row.attention].count_tokens() / row.time.median
    return rows


def grid(head: str, columns: Sequence[str], cells: Mapping[tuple[str, str], str]) -> str:
    """Return a table with a line above it. `cells` are by row and column; missing ones are left empty."""
    lines = [["", *columns]]
    for name in dict.fromkeys(name for name, _ in cells):
        lines.append([name, *(cells.get((name, column), "") for column in columns)])
    return f"{head}\n{text_table(lines)}"


def ratios(values: Values) -> Values:
    """Return the ratios to softmax at the same length or task."""
    result: Values = {}
    for (name, column), value in values.items():
        baseline = values.get((SOFTMAX, column))
        result[name, column] = value / baseline if value and baseline else None
    return result


def results_text(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the settings in a line, and tables of times and memory, both also as a multiple of softmax's."""
    columns = list(dict.fromkeys(row.column for row in rows))
    times: Values = {}
    memory: Values = {}
    time_cells: dict[tuple[str, str], str] = {}
    speed_cells: dict[tuple[str, str], str] = {}
    memory_cells: dict[tuple[str, str], str] = {}
    for row in rows:
        key = (row.attention, row.column)
        times[key] = row.time.median if row.time else None
        memory[key] = row.memory
        time_cells[key] = row.time.text(1) if row.time else "OOM"
        if row.tokens_per_second is not None:
            speed_cells[key] = f"{row.tokens_per_second:,.0f}"
        if row.memory or row.oom:
            memory_cells[key] = f"{row.memory / 1e9:.3f}" if row.memory else "OOM"
    parts = [", ".join(f"{name} {value}" for name, value in settings.items())]
    tables = [("time [ms/iteration], median (fastest-slowest)", time_cells, ratios(times))]
    if any(row.memory for row in rows):
        tables.append(("peak memory [GB]", memory_cells, ratios(memory)))
    for title, cells, multiples in tables:
        parts.append(grid(title, columns, cells))
        texts = {key: "-" if value is None else f"{value:.2f}" for key, value in multiples.items()}
        parts.append(grid(f"as a multiple of {SOFTMAX}", columns, texts))
    parts.append(grid("tokens per second", columns, speed_cells))
    return "\n\n".join(parts)


def matrix_argument(text: str) -> str:
    """Return "softmax_matrix", or what model_argument returns."""
    return text if text == MATRIX else model_argument(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments, fill in the defaults that depend on others, and set torch's number of threads.

    The namespace also has `training`, `batch`, `vocabulary` and `attention_dropout`, which no option sets.
    """
    parser = program_parser("python -m scripts.benchmarks.model", __doc__)
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--attentions",
        nargs="+",
        type=matrix_argument,
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"default: all, and {MATRIX}; with --tasks: {', '.join(TASK_ATTENTIONS)}",
    )
    parser.add_argument("--lengths", nargs="+", type=at_least_one, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--preset", choices=PRESETS, default="base" if has_gpu else "tiny")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="measure the Long Range Arena's model on these tasks")
    divisor = 1 if has_gpu else 16
    parser.add_argument("--divide", type=at_least_one, default=divisor, help="the batch sizes of --tasks (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=1, help="tokens per iteration at every length (default: 1 sequence)"
    )
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads(), help="threads on a CPU")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    add_device_options(parser, DTYPES)
    parser.set_defaults(training=Training)
    args = parser.parse_args(argv)
    args.vocabulary = SMALL_VOCABULARY if args.preset in ("nano", "tiny") else VOCABULARY
    args.batch = f"{args.tokens} tokens" if args.tokens > 1 else 1
    if args.tasks:
        args.training = TaskTraining
        args.preset = "lra"
        args.vocabulary = TASK_VOCABULARY
        args.batch = f"/ {args.divide}"  # of each task
        args.attentions = args.attentions or list(TASK_ATTENTIONS)
    if not args.attentions:
        others = [name for name in sorted(MECHANISMS) if name != SOFTMAX]
        args.attentions = [MATRIX, SOFTMAX, *others, *PAPER_ROWS]
        if not has_gpu:
            args.attentions += RECIPE_ROWS  # the other rows have no attention dropout on a CPU
    on_gpu = args.device == "cuda"
    if args.dtype is None:
        args.dtype = "float16" if on_gpu else "float32"
    # On a CPU, torch's fused softmax has no dropout and would build the matrix.
    args.attention_dropout = 0.1 if on_gpu else 0.0
    args.memory = args.memory and (on_gpu or can_measure_resident_peak())
    torch.set_num_threads(args.threads)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # otherwise softmax_matrix would compute in float32
    return args


def benchmark(args: argparse.Namespace) -> None:
    """Measure everything and print the tables. The JSON file, if requested, is written after each length or task."""
    disable_malloc_trim()
    provenance = describe_provenance()
    settings = {"device": device_name(args.device), "torch": torch.__version__, "model": "fairseq's RoBERTa"}
    for key in ("preset", "batch", "vocabulary", "dropout", "attention_dropout", "dtype"):
        settings[key] = getattr(args, key)
    columns = {}
    for length in args.lengths:
        batch = max(1, args.tokens // length)
        columns[str(length)] = (length, argparse.Namespace(**vars(args) | {"batch": batch}))
    if args.tasks:
        columns = {}
        for task in args.tasks:
            of_task = {"task": task, "batch": max(TASKS[task].batch // args.divide, 1)}
            columns[task] = (TASKS[task].length, argparse.Namespace(**vars(args) | of_task))
    rows: list[Row] = []
    for column, (length, column_args) in columns.items():
        rows += measure_column(column, length, column_args)
        print(f"{column} done", file=sys.stderr)
        if args.json:
            content = {"settings": settings, "rows": [asdict(row) for row in rows]}
            write_result(args.json, content, provenance)
    print(results_text(settings, rows))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_main(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
