"""Measure how close an encoder stays to its softmax teacher when linear attention replaces the softmax attention.

    python -m scripts.experiments.conversion TEACHER DATA OUT --steps 0 100 --lengths 64 128 512 --seeds 1 2

TEACHER is a checkpoint with softmax attention, and DATA is text binarized with its tokenizer, as for lln-fairseq
linearize. A measurement takes one variant of linear attention, trains it for a number of steps with one seed, and
compares the encoder with the teacher on held-out texts of each length:

    cosine    the cosine between the encoder's and the teacher's mean-pooled vectors of a text
    neighbor  the fraction of texts whose nearest other text is the same as with the teacher
    masked    the fraction of masked tokens that the language model predicts correctly (with --masked)

The table has the means over the seeds. --whole treats each line of the data, such as a protein, as one text.
Measurements in OUT/conversion.json are not repeated.
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
ATTENTIONS_WITHOUT_BLOCKS = ("lln",)
MEASURES = ("cosine", "neighbor", "masked")
MASKED_SHARE = 0.15
FIRST_WORD = 4  # fairseq's special symbols have the ids 0 to 3


class LineStream(TokenStream):
    """A token stream whose batches have whole lines instead of texts that are cut at random positions.

    Args:
        texts: the stream to divide into lines. Each line ends with </s>.
        pad: the id of the padding token.
    """

    def __init__(self, texts: TokenStream, pad: int) -> None:
        super().__init__(texts.tokens, texts.bos, texts.eos)
        ends = (texts.tokens == texts.eos).nonzero().flatten() + 1
        self.lines = torch.tensor_split(texts.tokens, ends)[:-1]
        self.pad = pad

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw random lines that fit into `length` tokens. A line can be drawn more than once.

        Args:
            count: number of lines.
            length: number of tokens per row of the batch, including the <s> in front of the line and its </s>.
            generator: draws the lines.

        Returns:
            Token ids, int64 (count, length). The ends of the rows are filled with padding.

        Raises:
            ValueError: if no line is short enough.
        """
        fitting = [line for line in self.lines if len(line) < length]
        if not fitting:
            raise ValueError(f"no line has fewer than {length} tokens")
        batch = torch.full((count, length), self.pad)
        batch[:, 0] = self.bos
        for row, number in enumerate(torch.randint(len(fitting), (count,), generator=generator)):
            line = fitting[number]
            batch[row, 1 : len(line) + 1] = line
        return batch

    def mixed_batch(self, tokens: int, longest: int, generator: torch.Generator) -> Tensor:
        """Draw one batch of random lines that fit into `longest` tokens, with about `tokens` tokens in total.

        Returns:
            Token ids, int64 (lines, longest). There is at least one line.

        Raises:
            ValueError: if no line is short enough.
        """
        return self.batch(max(1, tokens // longest), longest, generator)


@torch.no_grad()
def masked_accuracy(model: Any, batches: Sequence[Tensor], mask: int) -> float:
    """Return the fraction of masked tokens that the language model predicts correctly.

    Args:
        model: masked language model.
        batches: token ids, each (B, N). About 15 % of the tokens are masked, but never special symbols. The choice is
            random, but the same in every call.
        mask: id of <mask>.
    """
    generator = torch.Generator().manual_seed(SEED)
    correct = []
    for tokens in batches:
        masked = (torch.rand(tokens.shape, generator=generator) < MASKED_SHARE) & (tokens >= FIRST_WORD)
        logits, _ = model(src_tokens=tokens.masked_fill(masked, mask))
        correct.append((logits.argmax(dim=-1) == tokens)[masked])
    return torch.cat(correct).double().mean().item()


class ConversionExperiment:
    """Makes all measurements of the command line. Each one is stored in OUT/conversion.json when it is finished.

    The constructor loads the teacher and the texts.

    Raises:
        UserError: if OUT/conversion.json has measurements with other settings.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.file = args.out / "conversion.json"
        args.out.mkdir(parents=True, exist_ok=True)
        names = ("lengths", "tokens", "lr", "block_size", "masked", "whole")
        self.settings = {name: getattr(args, name) for name in names}
        self.settings["teacher"] = str(args.teacher)
        self.rows: dict[str, dict[str, Any]] = {}
        if self.file.exists():
            stored = json.loads(self.file.read_text())
            if stored["settings"] != self.settings:
                raise UserError(f"{self.file} has rows that were measured with other settings: choose another OUT")
            self.rows = stored["rows"]

        lln_fairseq.register()  # before fairseq is imported: it configures the root logger
        from lln_fairseq.inference.loading import load_model
        from lln_fairseq.linearize.linearize import HELD_OUT_COUNT, read_texts

        self.model, task = load_model(str(args.teacher))
        dictionary = task.source_dictionary
        self.train = read_texts(args.data, "train", dictionary)
        valid = read_texts(args.data, "valid", dictionary)
        if args.whole:
            self.train = LineStream(self.train, dictionary.pad())
            valid = LineStream(valid, dictionary.pad())
        self.mask = dictionary.index("<mask>")
        self.held_out = [HeldOutSet(self.model, valid, HELD_OUT_COUNT, length) for length in args.lengths]

    def run_all(self) -> None:
        """Make the missing measurements and print the table. With --masked, also print the accuracy of the teacher."""
        missing = []
        for seed in self.args.seeds:
            for variant in self.args.variants:
                for steps in self.args.steps:
                    if row_key(variant, steps, seed) not in self.rows:
                        missing.append((variant, steps, seed))
        for variant, steps, seed in tqdm(missing, desc="rows", disable=None):
            self.rows[row_key(variant, steps, seed)] = self.measure_row(variant, steps, seed)
            content = {"settings": self.settings, "rows": self.rows}
            write_bytes(self.file, (json.dumps(content, indent=1) + "\n").encode())
        print(self.format_table())
        if self.args.masked:
            accuracies = [masked_accuracy(self.model, texts.batches, self.mask) for texts in self.held_out]
            print("masked tokens that the teacher predicts:", *(f"{accuracy:.3f}" for accuracy in accuracies))

    def measure_row(self, variant: str, steps: int, seed: int) -> dict[str, Any]:
        """Train the linear attention of a variant and measure it.

        Returns:
            A dict with the entry "quality", the result of `measure_quality`.
        """
        attention, options = VARIANTS[variant]
        if attention not in ATTENTIONS_WITHOUT_BLOCKS:
            options = {**options, "block_size": self.args.block_size}
        students = Students(self.model, attention, options, self.args.lr, steps, seed)
        for _ in range(steps):
            students.train_step(self.train, self.args.tokens, max(self.args.lengths))
        return {"quality": self.measure_quality(students.students)}

    def measure_quality(self, attentions: Sequence[nn.Module]) -> list[list[float]]:
        """Measure the model with these attentions, one for each layer, in place of its own.

        Returns:
            For each length, the list of the MEASURES in their order. Without --masked, the measure "masked" is missing.
        """
        quality = [list(texts.similarity(attentions)) for texts in self.held_out]
        if self.args.masked:
            layers = list(self.model.encoder.sentence_encoder.layers)
            with swapped_attention(layers, attentions):
                for measures, texts in zip(quality, self.held_out, strict=True):
                    measures.append(masked_accuracy(self.model, texts.batches, self.mask))
        return quality

    def format_table(self) -> str:
        """Return the table of the means over the seeds, with one row for each variant and number of steps."""
        measures = MEASURES if self.args.masked else MEASURES[:2]
        header = ["", "steps"]
        for length in self.args.lengths:
            header += [f"{measure} {length}" for measure in measures]
        lines = [header]
        for variant in self.args.variants:
            for steps in self.args.steps:
                qualities = [self.rows[row_key(variant, steps, seed)]["quality"] for seed in self.args.seeds]
                means = torch.tensor(qualities, dtype=torch.float64).mean(dim=0).flatten()
                lines.append([variant, str(steps), *(f"{mean:.3f}" for mean in means.tolist())])
        return aligned(lines)


def row_key(variant: str, steps: int, seed: int) -> str:
    """Return the key of a measurement in OUT/conversion.json."""
    return f"{variant}; {steps} steps; seed {seed}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = program_parser("python -m scripts.experiments.conversion", __doc__)
    parser.add_argument("teacher", type=Path, help="checkpoint with softmax attention")
    parser.add_argument("data", type=Path, help="text binarized with its tokenizer")
    parser.add_argument("out", type=Path, help="directory of the results")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 100], help="training steps (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512], help="in tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an update (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Adam (%(default)s)")
    parser.add_argument("--masked", action="store_true", help="also predict masked tokens; needs a language model")
    parser.add_argument("--whole", action="store_true", help="treat each line as one text")
    parser.add_argument("--block-size", type=int, default=32, help="in tokens (%(default)s)")
    args = parser.parse_args(argv)
    disable_malloc_trim()
    message = "\ninterrupted; run the same command again to continue"
    return run_main(lambda: ConversionExperiment(args).run_all(), message)


if __name__ == "__main__":
    sys.exit(main())
