"""What is left of a softmax encoder when a linear attention takes its place: by form, steps of transfer and length.

    python -m scripts.experiments.conversion TEACHER DATA OUT --steps 0 100 --lengths 64 128 512 --seeds 1 2

TEACHER and DATA as for lln-fairseq linearize. Every row is a transfer of its own, measured on the same held-out texts:
the cosine of mean-pooled vectors to the teacher's, for which share of the texts the nearest other text is the same,
and with --masked the share of masked tokens that the language model gets right. --whole takes every line of the data
as a text, not pieces of so many tokens: proteins, say. What is in OUT/conversion.json is not run again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import lln_fairseq
from lln_fairseq.command import UserError, run_main
from lln_fairseq.data.files import write_bytes
from lln_fairseq.linearize.attention_transfer import TokenStream, swapped_attention
from lln_fairseq.linearize.layerwise import SEED, HeldOutSet, Students
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.terminal import aligned, program_parser

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "LLN alone": ("lln", {}),
    "blocks alone": ("block_diag", {}),
    "average": ("lln_diag", {}),
    "joint": ("lln_diag", {"mix": "joint"}),
    "joint_offset": ("lln_diag", {"mix": "joint_offset"}),
    "joint_offset, entropy": ("lln_diag", {"mix": "joint_offset", "constants": "entropy"}),
    "joint_offset, gain": ("lln_diag", {"mix": "joint_offset", "gain": "learned"}),
}
WITHOUT_BLOCKS = ("lln",)
FIGURES = ("cosine", "neighbour", "masked")
MASKED = 0.15
FIRST_WORD = 4  # after fairseq's special symbols


class WholeTexts(TokenStream):
    """The lines of a stream, each with its </s>: those that fit, padded to one length."""

    def __init__(self, texts: TokenStream, pad: int) -> None:
        super().__init__(texts.tokens, texts.bos, texts.eos)
        ends = (texts.tokens == texts.eos).nonzero().flatten() + 1
        self.lines, self.pad = torch.tensor_split(texts.tokens, ends)[:-1], pad

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        fitting = [line for line in self.lines if len(line) < length]
        if not fitting:
            raise ValueError(f"no line has fewer than {length} tokens")
        batch = torch.full((count, length), self.pad)
        batch[:, 0] = self.bos
        for row, number in enumerate(torch.randint(len(fitting), (count,), generator=generator)):
            batch[row, 1 : len(fitting[number]) + 1] = fitting[number]
        return batch

    def mixed_batch(self, tokens: int, longest: int, generator: torch.Generator) -> Tensor:
        return self.batch(max(1, tokens // longest), longest, generator)


@torch.no_grad()
def masked_accuracy(model: Any, batches: Sequence[Tensor], mask: int) -> float:
    """The share of masked tokens that the language model's first guess restores."""
    generator, right = torch.Generator().manual_seed(SEED), []
    for tokens in batches:
        chosen = (torch.rand(tokens.shape, generator=generator) < MASKED) & (tokens >= FIRST_WORD)
        logits, _ = model(src_tokens=tokens.masked_fill(chosen, mask))
        right.append((logits.argmax(dim=-1) == tokens)[chosen])
    return torch.cat(right).double().mean().item()


class Conversion:
    """Rows of results by (variant, steps, seed), each a list of [cosine, same neighbour] by length."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, args.out / "conversion.json"
        args.out.mkdir(parents=True, exist_ok=True)
        self.settings = {
            key: getattr(args, key) for key in ("lengths", "tokens", "lr", "block_size", "masked", "whole")
        }
        self.settings["teacher"] = str(args.teacher)
        self.rows: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            saved = json.loads(self.file.read_text())
            if saved["settings"] != self.settings:
                raise UserError(f"{self.file} is of other settings: give another OUT")
            self.rows = saved["rows"]
        lln_fairseq.register()  # before fairseq is imported, which configures the root logger
        from lln_fairseq.inference.loading import load_model
        from lln_fairseq.linearize.linearize import HELD_OUT_COUNT, read_texts

        self.model, task = load_model(str(args.teacher))
        dictionary = task.source_dictionary
        self.train, valid = (read_texts(args.data, split, dictionary) for split in ("train", "valid"))
        if args.whole:
            self.train, valid = (WholeTexts(texts, dictionary.pad()) for texts in (self.train, valid))
        self.mask = dictionary.index("<mask>")
        self.held_out = [HeldOutSet(self.model, valid, HELD_OUT_COUNT, length) for length in args.lengths]

    def all(self) -> None:
        wanted = [(name, steps, seed) for seed in self.args.seeds for name in self.args.variants
                  for steps in self.args.steps]  # fmt: skip
        for name, steps, seed in tqdm([row for row in wanted if key(*row) not in self.rows], desc="rows", disable=None):
            self.rows[key(name, steps, seed)] = self.row(name, steps, seed)
            content = {"settings": self.settings, "rows": self.rows}
            write_bytes(self.file, (json.dumps(content, indent=1) + "\n").encode())
        print(self.table())
        if self.args.masked:
            softmax = [masked_accuracy(self.model, texts.batches, self.mask) for texts in self.held_out]
            print("masked tokens that the teacher restores:", *(f"{x:.3f}" for x in softmax))

    def row(self, name: str, steps: int, seed: int) -> dict[str, Any]:
        attention, options = VARIANTS[name]
        blocks = {} if attention in WITHOUT_BLOCKS else {"block_size": self.args.block_size}
        students = Students(self.model, attention, {**options, **blocks}, self.args.lr, steps, seed)
        for _ in range(steps):
            students.train_step(self.train, self.args.tokens, max(self.args.lengths))
        return {"quality": self.quality(students.students)}

    def quality(self, attentions: Sequence[nn.Module]) -> list[list[float]]:
        """Return the FIGURES for each length."""
        found = [list(texts.similarity(attentions)) for texts in self.held_out]
        if self.args.masked:
            with swapped_attention(list(self.model.encoder.sentence_encoder.layers), attentions):
                for figures, texts in zip(found, self.held_out, strict=True):
                    figures.append(masked_accuracy(self.model, texts.batches, self.mask))
        return found

    def table(self) -> str:
        """The means over the seeds."""
        figures = FIGURES if self.args.masked else FIGURES[:2]
        lines = [["", "steps", *(f"{what} {n}" for n in self.args.lengths for what in figures)]]
        for name in self.args.variants:
            for steps in self.args.steps:
                found = [self.rows[key(name, steps, seed)]["quality"] for seed in self.args.seeds]
                by_column = zip(*([x for pair in quality for x in pair] for quality in found), strict=True)
                means = [sum(values) / len(values) for values in by_column]
                lines.append([name, str(steps), *(f"{mean:.3f}" for mean in means)])
        return aligned(lines)


def key(name: str, steps: int, seed: int) -> str:
    return f"{name}; {steps} steps; seed {seed}"


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.experiments.conversion", __doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 100], help="of the transfer (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512], help="tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each update (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="of Adam (%(default)s)")
    parser.add_argument("--masked", action="store_true", help="of teachers with a language model's head")
    parser.add_argument("--whole", action="store_true", help="every line is a text")
    parser.add_argument("--block-size", type=int, default=32, help="tokens (%(default)s)")
    args = parser.parse_args(argv)
    disable_malloc_trim()
    return run_main(lambda: Conversion(args).all(), "\ninterrupted; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
