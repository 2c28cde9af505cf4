"""Train vision transformers with different attentions (arXiv 2311.13541, A.8.2 and A.8.4): Table 3, Figures 9 and 10.

    python -m scripts.experiments.vit --out runs/vit                            # scikit-learn's digits
    python -m scripts.experiments.vit --out runs/cats --images cats-and-dogs --side 224 --patch 32

The directory of --images has one folder of pictures per class. Of each class, 60 % are for training, 15 % for
validation (dev) and 25 % for testing. The split is the same in every run. With --images the model has the paper's size,
12 layers of width 128. The model for the digits is smaller. If you run a command again, runs with a result.json are not
repeated. Choose another --out for other pictures.

    OUT/NAME/seedN/result.json    losses, accuracies, α and β by epoch
    OUT/figure_9.png, .csv        α and β of every layer during training, a row for each run of LLN
    OUT/figure_10.png, .csv       accuracy on dev against α, fixed (--fixed) or matched; with --fp16, on a GPU, the
                                  inverse loss scale
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.command import UserError, run_main
from scripts.experiments.vit_figures import draw_vit_figures
from scripts.experiments.vit_model import ViTShape
from scripts.experiments.vit_pictures import Pictures, load_digits_pictures, load_folder_pictures
from scripts.experiments.vit_training import ViTRecipe, ViTRun
from scripts.terminal import aligned, at_least_one, program_parser

MATCHED_ATTENTION = "lln"  # the attention whose α and β --fixed sets
PAPER_SIZES = {"layers": 12, "width": 128, "heads": 8, "patch": 32}
DIGITS_SIZES = {"layers": 4, "width": 64, "heads": 4, "patch": 2}


class ViTExperiment:
    """Trains every attention with every seed on one data set, and compares the results."""

    def __init__(self, args: argparse.Namespace, pictures: Pictures) -> None:
        self.args = args
        self.pictures = pictures
        self.out = Path(args.out)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = dict(PAPER_SIZES if args.images else DIGITS_SIZES)
        for name in sizes:
            if getattr(args, name) is not None:
                sizes[name] = getattr(args, name)
        _, channels, side, _ = pictures.pixels.shape
        self.shape = ViTShape(len(pictures.classes), channels, side, **sizes)

    def run_all(self) -> None:
        """Train every attention with every seed, then print the table and draw the figures."""
        quarter = max(self.shape.tokens // 4, 1)
        attentions = self.args.attentions or ["softmax", MATCHED_ATTENTION, f"linformer:projected_length={quarter}"]
        for value in self.args.fixed:
            attentions = [*attentions, f"{MATCHED_ATTENTION}:alpha={value:g},beta={value:g}"]
        results = {attention: self.train_seeds(attention) for attention in attentions}
        print(f"{self.shape}\n{accuracy_table(results)}")
        for path in draw_vit_figures(results, self.out):
            print(path)

    def train_seeds(self, attention: str) -> list[dict[str, Any]]:
        """Train an attention with every seed and return the results in the order of the seeds."""
        args = self.args
        results = []
        for seed in args.seeds:
            directory = self.out / re.sub(r"[^\w.]+", "-", attention) / f"seed{seed}"
            recipe = ViTRecipe(
                attention,
                seed,
                epochs=args.epochs,
                batch=args.batch,
                lr=args.lr,
                weight_decay=args.weight_decay,
                fp16=args.fp16,
            )
            try:
                run = ViTRun(directory, recipe, self.shape, self.pictures, self.device)
            except ValueError as error:
                raise UserError(str(error)) from error
            results.append(run.finish())
        return results


def accuracy_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table of the accuracies on dev and test after the last epoch, one row per attention.

    Args:
        results: for each attention, the results that `ViTRun.finish` returned, one for each seed.
    """
    rows = [("attention", "dev", "test", "seeds")]
    for attention, results_of_attention in results.items():
        dev = [result["history"][-1]["valid"] for result in results_of_attention]
        test = [result["test"] for result in results_of_attention]
        rows.append((attention, format_range(dev), format_range(test), str(len(results_of_attention))))
    return aligned(rows)


def format_range(values: list[float]) -> str:
    """Return "mean (lowest to highest)" of at least one value, each with one decimal."""
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Repeated seeds are dropped."""
    parser = program_parser("python -m scripts.experiments.vit", __doc__)
    parser.add_argument("--out", default="runs/vit", help="directory of all results (default: %(default)s)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="one folder of pictures per class; default: digits")
    parser.add_argument("--side", type=at_least_one, help="scale and crop pictures to this side length in pixels")
    parser.add_argument(
        "--attentions",
        nargs="+",
        metavar="NAME[:OPTION=VALUE,...]",
        help="default: softmax, lln, and linformer with a quarter of the tokens",
    )
    parser.add_argument("--fixed", nargs="*", type=float, default=[], metavar="VALUE", help="fixed values of α = β")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    for name, value in PAPER_SIZES.items():
        help_text = f"default: {value}, {DIGITS_SIZES[name]} for the digits"
        parser.add_argument(f"--{name}", type=at_least_one, help=help_text)
    parser.add_argument("--epochs", type=at_least_one, default=20)
    parser.add_argument("--batch", type=at_least_one, default=64, help="pictures per update")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--fp16", action="store_true", help="half precision with a loss scale; needs a GPU")
    args = parser.parse_args(argv)
    if args.fp16 and not torch.cuda.is_available():
        parser.error("--fp16 needs a GPU, and torch finds none")
    if args.side and not args.images:
        parser.error("--side needs --images: the digits have 8 pixels")
    args.seeds = list(dict.fromkeys(args.seeds))
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parse_arguments(argv)

    def program() -> None:
        if args.images:
            pictures = load_folder_pictures(args.images, args.side)
        else:
            pictures = load_digits_pictures()
        ViTExperiment(args, pictures).run_all()

    return run_main(program, "\ninterrupted; run the same command again, which keeps finished runs")


if __name__ == "__main__":
    sys.exit(main())
