"""Measure what a classifier of pairs needs of its softmax attention: cut the attention, and compare the outputs.

    python -m scripts.research.cut_softmax runs/qnli16/checkpoint_last.pt data-bin/qnli16 --rows 200

The tokens of the first text attend to all tokens, and all tokens attend to the first text. A token of the second text
otherwise attends only to tokens near it, by softmax: to its block, to a window around it, or to its sentence. Nothing
is trained. The first table has the accuracy on rows of `test`, the share of rows with the same answer as without a cut,
and the mean KL divergence of the class probabilities in bits. The second table has the attention of an average token of
the second text without a cut, by layer: to the first text, to its own sentence, and to other sentences.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lln_fairseq.attention.context import Context, first_segment_lengths
from lln_fairseq.command import run_main
from lln_fairseq.inference.evaluate import SplitOutputs, compute_scores, score_batches
from lln_fairseq.inference.text_model import load_text_model
from lln_fairseq.linearize.attention_transfer import recorded, swapped_attention
from lln_fairseq.linearize.task_rows import TaskRows, encoder_tokens
from lln_fairseq.linearize.teacher import require_softmax
from lln_fairseq.ops import reference
from lln_fairseq.terminal import at_least_one, program_parser, text_table

SPLIT = "test"
TOKENS_PER_BATCH = 4096
SENTENCE_ENDS = (".", "?", "!")
Near = Callable[[Tensor], Tensor]  # token ids (B, N) -> bool, broadcasts to (B, N, N): may query i attend to key j?


class CutSoftmax(nn.Module):
    """Softmax attention over the pairs of query and key that `allowed`, bool (B, 1, N, N), marks."""

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self.allowed = allowed

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        return reference.softmax_matrix(q, k, context.padding, self.allowed.to(q.device)) @ v


def same_block(size: int) -> Near:
    """Return the rule for blocks of `size` tokens, which are counted from the start of the row, as in the kernels."""

    def near(tokens: Tensor) -> Tensor:
        block = torch.arange(tokens.shape[1]) // size
        return block[:, None] == block

    return near


def within_window(reach: int) -> Near:
    """Return the rule for the token itself and `reach` tokens on each side of it."""

    def near(tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1])
        return (position[:, None] - position).abs() <= reach

    return near


def same_sentence(ends: Tensor) -> Near:
    """Return the rule for sentences; `ends` has the ids of the tokens that end one."""

    def near(tokens: Tensor) -> Tensor:
        number = sentence_numbers(tokens, ends)
        return number[:, :, None] == number[:, None, :]

    return near


def sentence_numbers(tokens: Tensor, ends: Tensor) -> Tensor:
    """Return the number of the sentence of every token, (B, N). A sentence includes the token that ends it."""
    is_end = torch.isin(tokens, ends).long()
    return is_end.cumsum(dim=1) - is_end


class Cuts:
    """Computes the outputs of a classifier on the first rows of a split, with and without cuts."""

    def __init__(self, checkpoint: str, data: str, rows: int) -> None:
        text_model = load_text_model(checkpoint, data)
        self.model = text_model.model
        self.task = text_model.task
        self.layers = list(self.model.encoder.sentence_encoder.layers)
        dataset = TaskRows(self.task, SPLIT, self.task.max_positions())
        numbers = np.arange(min(rows, len(dataset)))
        self.samples = [dataset.sample(batch) for batch in dataset.batches(numbers, TOKENS_PER_BATCH)]
        dictionary = self.task.source_dictionary
        self.pad = dictionary.pad()
        self.eos = dictionary.eos()
        lines = text_model.ids.encode_lines([f"a{end}" for end in SENTENCE_ENDS])
        self.ends = torch.stack([ids[-2] for ids in lines])  # the last id is that of </s>

    def first_text(self, tokens: Tensor) -> Tensor:
        """Return which tokens (B, N) belong to the first text, bool (B, N)."""
        return torch.arange(tokens.shape[1]) < first_segment_lengths(tokens, self.eos)[:, None]

    def allowed_pairs(self, tokens: Tensor, near: Near) -> Tensor:
        """Return the pairs of query and key that a cut leaves, bool (B, 1, N, N)."""
        is_first = self.first_text(tokens)
        allowed = near(tokens) | is_first[:, None, :] | is_first[:, :, None]
        return allowed[:, None]

    def outputs(self, near: Near | None, softmax_layer: int | None = None) -> SplitOutputs:
        """Compute the outputs with a cut in every layer but `softmax_layer`, which keeps its full softmax.

        None for `near` cuts nothing. Afterwards, the model has its own attention again.
        """
        logits = []
        targets = []
        for sample in self.samples:
            attentions: list[nn.Module] = [layer.self_attn.attention for layer in self.layers]
            if near is not None:
                cut = CutSoftmax(self.allowed_pairs(encoder_tokens(sample, self.pad), near))
                attentions = [
                    attention if number == softmax_layer else cut for number, attention in enumerate(attentions)
                ]
            with swapped_attention(self.layers, attentions):
                part = score_batches(self.model, self.task, SPLIT, [sample])
            assert part.targets is not None
            logits.append(part.logits)
            targets.append(part.targets)
        return SplitOutputs(SPLIT, torch.cat(logits), torch.cat(targets))

    @torch.no_grad()
    def attention_shares(self) -> list[list[float]]:
        """Return for every layer what percentage of their attention the tokens of the second text give away on average.

        Returns: for each layer, the percentages for the first text, the own sentence and other sentences, the mean over
            these tokens and the heads.
        """
        sums = torch.zeros(len(self.layers), 3)
        count = 0
        for sample in self.samples:
            tokens = encoder_tokens(sample, self.pad)
            is_first = self.first_text(tokens)
            is_query = (~is_first & tokens.ne(self.pad))[:, None, :, None]
            own = self.allowed_pairs(tokens, same_sentence(self.ends)) & ~is_first[:, None, None, :]
            with recorded(self.layers) as calls:
                score_batches(self.model, self.task, SPLIT, [sample])
            for layer, call in enumerate(calls):
                weights = reference.softmax_matrix(call.q, call.k, call.context.padding).cpu() * is_query
                to_first = (weights * is_first[:, None, None, :]).sum()
                to_own = (weights * own).sum()
                sums[layer] += torch.stack([to_first, to_own, weights.sum() - to_first - to_own])
            count += int(is_query.sum()) * calls[0].q.shape[1]
        return (100 * sums / count).tolist()


def compare(task: Any, outputs: SplitOutputs, original: SplitOutputs) -> dict[str, float]:
    """Return the accuracy, the percentage of rows with the original answer, and KL(original ‖ cut) in bits."""
    log_p = original.logits.log_softmax(dim=-1)
    log_q = outputs.logits.log_softmax(dim=-1)
    same = outputs.logits.argmax(dim=-1) == original.logits.argmax(dim=-1)
    return {
        "accuracy": 100 * compute_scores(task, outputs)["accuracy"],
        "same": 100 * same.double().mean().item(),
        "divergence": (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean().item() / math.log(2),
    }


def run_cuts(args: argparse.Namespace) -> None:
    require_softmax(Path(args.checkpoint))
    cuts = Cuts(args.checkpoint, args.data, args.rows)
    original = cuts.outputs(None)
    sentence = same_sentence(cuts.ends)
    patterns: dict[str, Near] = {
        "blocks of 32": same_block(32),
        "blocks of 64": same_block(64),
        "blocks of 128": same_block(128),
        "32 tokens on each side": within_window(32),
        "64 tokens on each side": within_window(64),
        "the own sentence": sentence,
    }
    results = {"no cut": compare(cuts.task, original, original)}
    for name, near in patterns.items():
        results[name] = compare(cuts.task, cuts.outputs(near), original)
        print(name, results[name], flush=True)
    for layer in range(len(cuts.layers)):
        name = f"blocks of 32, softmax in layer {layer}"
        results[name] = compare(cuts.task, cuts.outputs(same_block(32), layer), original)
        print(name, results[name], flush=True)
    shares = cuts.attention_shares()
    rows = [["", "accuracy [%]", "same answer [%]", "divergence [bits]"]]
    for name, values in results.items():
        rows.append([name, f"{values['accuracy']:.1f}", f"{values['same']:.1f}", f"{values['divergence']:.3f}"])
    print(text_table(rows))
    rows = [["layer", "first text [%]", "own sentence [%]", "other sentences [%]"]]
    for layer, of_layer in enumerate(shares):
        rows.append([str(layer), *(f"{share:.1f}" for share in of_layer)])
    print(text_table(rows))
    if args.json:
        content = {"rows": len(original.logits), "cuts": results, "attention_shares": shares}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = program_parser("python -m scripts.research.cut_softmax", __doc__)
    parser.add_argument("checkpoint", help="a fine-tuned classifier of pairs with softmax attention")
    parser.add_argument("data", help="the data directory of its task")
    parser.add_argument("--rows", type=at_least_one, default=200, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    args = parser.parse_args(argv)
    return run_main(lambda: run_cuts(args))


if __name__ == "__main__":
    sys.exit(main())
