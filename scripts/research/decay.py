"""Measure attention that decays with the distance of two tokens: pre-train on characters, and recall values by keys.

    python -m scripts.research.decay characters runs/rotary corpus=characters model=tiny run=cpu model.rotary=true \
        --attentions decay:weights=lln softmax --seeds 1 2 3
    python -m scripts.research.decay recall runs/recall --attentions decay:weights=lln --tasks 128x8 --rates 1e-3
    python -m scripts.research.decay report

The attention `decay` has the matrix P_ij = w_ij λ^|i-j| / Σ_l w_il λ^|i-l|, in which every head learns its own
λ = exp(-1 / τ). Its option `weights` chooses w, see WEIGHTS. It computes all N² weights, because it is made to be
measured: it is registered by this program only, and the package does not have it.

`characters` trains a model for each attention and each seed, in OUT/ATTENTION/seedN, and writes the validation losses
in bits and the τ that the heads have learned to a file in --results. The last part of OUT names the group of these
runs, which have the same overrides. Other words are Hydra overrides. `report` prints the tables of these files, and
draws their losses in a picture next to --results. `recall` takes the arguments of scripts.research.recall, and `train`
those of lln_fairseq train. Run an interrupted command again to continue it.
"""

import itertools
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lln_fairseq
from lln_fairseq import __main__ as lln_program
from lln_fairseq.analysis.events import read_curves
from lln_fairseq.attention import ATTENTION_REGISTRY
from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, parse_attention_spec, register_attention
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.ops.formula import clear_padding
from lln_fairseq.ops.moment_matching import match_moments
from lln_fairseq.terminal import program_parser
from scripts.benchmarks.meter import attention_argument
from scripts.research import recall
from scripts.research.programs import write_result
from scripts.research.summaries import markdown, mean_and_range, read_results, save, select
from scripts.research.units import RESULTS
from scripts.training import call_logged, train_words

DECAY = "decay"
WEIGHTS = {
    "lln": "Σ_d e^{α q_id} e^{β k_jd}, with α and β of moment matching",
    "uniform": "1, so that attention does not depend on the content",
    "softmax": "e^{q_i·k_j / √D}",
    "blocks": "that of softmax within a block of BLOCK tokens, 0 elsewhere",
    "lln_blocks": "the average of LLN with decay and of softmax in blocks without decay",
    "lion_d": "φ(q_i)·φ(k_j) with φ(x) = (SiLU(x) + 1/2) / |SiLU(x) + 1/2|, which is LION-D of arXiv 2502.16249",
}
BLOCK = 32
INITIAL_TAU = (1.5, 4.0, 16.0, 256.0)  # tokens, for four heads; other numbers of heads are interpolated
TINY = 1e-37  # added to the weights of LLN, so that their logarithms are finite


@dataclass
class DecayConfig:
    weights: str = option("lln", "the weight of a query and a key at distance 0", tuple(WEIGHTS))


class DecayAttention(Attention):
    """Attention whose weights are multiplied by λ^|i-j|. The output is 0 if all keys of a query are padding."""

    def __init__(
        self, config: DecayConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float = 0.0
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.log_tau = nn.Parameter(initial_log_tau(num_heads))  # (H,)
        if config.weights == "lion_d":
            lion_lambda = torch.randn(num_heads).sigmoid()  # as in the published code of LION
            self.log_tau = nn.Parameter((-1 / lion_lambda.log()).log())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        return self.attention_matrix(q, k, context) @ v

    def attention_matrix(self, q: Tensor, k: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return P (B, H, N, N), or (1, H, N, N) if it is the same for all sequences."""
        index = torch.arange(q.shape[-2], device=q.device)
        log_decay = -(index[:, None] - index).abs() * (-self.log_tau).exp()[:, None, None]
        if self.config.weights == "lln_blocks":
            lln = normalize(lln_log_weights(q, k, context.padding) + log_decay, context.padding)
            return (lln + normalize(block_log_weights(q, k), context.padding)) / 2
        return normalize(self._log_weights(q, k, context.padding) + log_decay, context.padding)

    def _log_weights(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor:
        """Return log w, which broadcasts to (B, H, N, N)."""
        if self.config.weights == "lln":
            return lln_log_weights(q, k, padding)
        if self.config.weights == "softmax":
            return softmax_logits(q, k)
        if self.config.weights == "blocks":
            return block_log_weights(q, k)
        if self.config.weights == "lion_d":
            return (lion_features(q) @ lion_features(k).mT).log()
        return q.new_zeros(1, 1, 1, 1)


def initial_log_tau(num_heads: int) -> Tensor:
    """Return log τ of the heads, (H,): evenly spaced between the points of INITIAL_TAU."""
    log_tau = torch.tensor(INITIAL_TAU).log()
    return F.interpolate(log_tau[None, None], num_heads, mode="linear", align_corners=True)[0, 0]


def lln_log_weights(q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor:
    """Return log Σ_d e^{α q_id} e^{β k_jd}, (B, H, N, N), up to a number for each query, which cancels in P."""
    alpha, beta = match_moments(q, k, padding)
    y = beta[..., None, None] * k
    key_max = y.amax(dim=-2, keepdim=True)
    x = alpha[..., None, None] * q + key_max
    x = x - x.amax(dim=-1, keepdim=True)
    return (x.exp() @ (y - key_max).exp().mT + TINY).log()


def block_log_weights(q: Tensor, k: Tensor) -> Tensor:
    """Return the logits of softmax within blocks, and -inf elsewhere, (B, H, N, N)."""
    block = torch.arange(q.shape[-2], device=q.device) // BLOCK
    return softmax_logits(q, k).masked_fill(block[:, None] != block, float("-inf"))


def softmax_logits(q: Tensor, k: Tensor) -> Tensor:
    return (q / math.sqrt(q.shape[-1])) @ k.mT


def lion_features(x: Tensor) -> Tensor:
    return F.normalize(F.silu(x) + 0.5, dim=-1)


def normalize(log_weights: Tensor, padding: Tensor | None) -> Tensor:
    """Return the weights, whose logarithms are given, divided by their sums over the keys that are not padding.

    A query without such a key gets 0.
    """
    if padding is None:
        return log_weights.softmax(dim=-1)
    log_weights = log_weights.masked_fill(padding[:, None, None], float("-inf"))
    empty = (log_weights == float("-inf")).all(dim=-1, keepdim=True)
    return log_weights.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


def measure_characters(
    out: Path, attentions: Sequence[str], seeds: Sequence[int], overrides: Sequence[str], results: Path
) -> None:
    """Finish all runs, and write a file of results for each."""
    for seed, spec in itertools.product(seeds, attentions):
        name = re.sub(r"\W+", "-", spec)
        directory = out / name / f"seed{seed}"
        words = train_words("pretrain", directory, [*attention_words(spec), f"common.seed={seed}", *overrides])
        words[0] = "scripts.research.decay"
        call_logged(f"{spec}, seed {seed}", words, directory / "train.log")
        curve = read_curves(directory / "tensorboard")["valid/loss"]
        content = {
            "group": out.name,
            "attention": spec,
            "seed": seed,
            "overrides": [word for word in overrides if not word.startswith("task.data=")],
            "updates": curve.steps,
            "bits": [round(value, 4) for value in curve.values],
            "tau": learned_tau(directory / "checkpoint_last.pt"),
        }
        write_result(results / f"{out.name}_{name}_seed{seed}.json", content)


def attention_words(spec: str) -> list[str]:
    """Return the Hydra overrides that select an attention, also `decay`, which has no file in configs/."""
    name, options = parse_attention_spec(spec)
    settings = [f"model.{name}_{key}={value}" for key, value in options.items()]
    if name == DECAY:
        return ["attention=softmax", f"model.attention={name}", *(f"+{setting}" for setting in settings)]
    return [f"attention={name}", *settings]


def learned_tau(checkpoint: Path) -> list[list[float]]:
    """Return the τ of the heads in tokens, layer by layer, or [] for an attention without decay."""
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    from lln_fairseq.checkpoints.reading import load_checkpoint_lazily

    state = load_checkpoint_lazily(str(checkpoint))["model"]
    log_taus = [value for name, value in state.items() if name.endswith("log_tau")]
    return [[round(tau, 2) for tau in log_tau.exp().tolist()] for log_tau in log_taus]


def report(results: Path) -> None:
    """Print a table for each group of runs, and draw their losses in NAME.png beside the directory NAME."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for content in read_results(results):
        groups.setdefault(content["group"], []).append(content)
    if not groups:
        raise UserError(f"{results} has no results: run `python -m scripts.research.decay characters` first")
    size = (5.5 * len(groups), 4.5)
    figure, panels = plt.subplots(1, len(groups), figsize=size, sharey=True, squeeze=False)
    attentions = sorted({run["attention"] for runs in groups.values() for run in runs})
    for (group, runs), axes in zip(groups.items(), panels[0], strict=True):
        print(f"{group}: validation loss in bits\n{losses_table(runs)}\n")
        for run in runs:
            color = f"C{attentions.index(run['attention'])}"
            label = run["attention"] if run["seed"] == min(other["seed"] for other in runs) else None
            axes.plot(run["updates"], run["bits"], "o-", markersize=3, color=color, label=label)
        axes.set_title(group)
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0][0].set_ylabel("validation loss [bits per masked token]")
    save(figure, results.with_suffix(".png"))


def losses_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the means and ranges over the seeds, a row for each attention, at the updates that all runs have."""
    updates = sorted(set.intersection(*(set(run["updates"]) for run in runs)))
    rows = [["attention", "seeds", *map(str, updates)]]
    for attention in dict.fromkeys(run["attention"] for run in runs):
        of_attention = select(runs, attention=attention)
        row = [attention, str(len(of_attention))]
        for update in updates:
            row.append(mean_and_range([run["bits"][run["updates"].index(update)] for run in of_attention], 2))
        rows.append(row)
    return markdown(rows)


@contextmanager
def registered_decay() -> Iterator[None]:
    """Register the attention "decay" in the `with` block only, because other code lists the registry."""
    register_attention(DECAY, DecayConfig)(DecayAttention)
    try:
        yield
    finally:
        del ATTENTION_REGISTRY[DECAY]


def main(argv: Sequence[str] | None = None) -> int:
    with registered_decay():
        return run_command(list(sys.argv[1:] if argv is None else argv))


def run_command(arguments: list[str]) -> int:
    """Run the program's command, and return the exit code."""
    if arguments[:1] == ["train"]:
        return lln_program.main(arguments)
    if arguments[:1] == ["recall"]:
        return recall.main(arguments[1:])
    parser = program_parser("python -m scripts.research.decay", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    characters = commands.add_parser("characters", help="pre-train on characters")
    characters.add_argument("out", type=Path, metavar="OUT", help="directory of the runs")
    characters.add_argument(
        "--attentions",
        nargs="+",
        type=attention_argument,
        default=["decay:weights=lln"],
        metavar="NAME[:OPTION=VALUE,...]",
    )
    characters.add_argument("--seeds", nargs="+", type=int, default=[1], help="default: 1")
    reporting = commands.add_parser("report", help="print the tables and draw the picture")
    commands.add_parser("recall", help="recall values by keys, see scripts.research.recall")
    commands.add_parser("train", help="train one model, see lln_fairseq train")
    for command in (characters, reporting):
        command.add_argument("--results", type=Path, default=RESULTS / DECAY, help="(default: %(default)s)")
    args, overrides = parser.parse_known_args(arguments)
    if args.command == "report" and overrides:
        parser.error(f"unknown arguments: {' '.join(overrides)}")

    def run() -> None:
        if args.command == "report":
            report(args.results)
        else:
            measure_characters(args.out, args.attentions, args.seeds, overrides, args.results)

    return run_main(run, "\ninterrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
