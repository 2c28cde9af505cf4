"""A vision transformer with different attentions (arXiv 2311.13541, A.8.2 and A.8.4): Table 3, Figures 9 and 10.

    python -m scripts.experiments.vit --out runs/vit                            # scikit-learn's digits
    python -m scripts.experiments.vit --out runs/cats --images cats-and-dogs --side 224 --patch 32

DIR of --images has a sub-folder of pictures for every class. Of every class 60 % are trained on, 15 % are the dev
rows, 25 % the test rows, the same in every run. With pictures of its own the model has the paper's size, 12 layers of
128; the digits have a smaller one. Every finished run and epoch is kept: the same command goes on.

    OUT/NAME/seedN/result.json    losses, accuracies, α and β by epoch
    OUT/figure_9.png, .csv        α and β of every layer while it trains, a row for each run of LLN
    OUT/figure_10.png, .csv       accuracy on dev by α, fixed (--fixed) or matched; with --fp16, on a GPU, the inverse
                                  loss scale
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.command import UserError, run_main
from scripts.experiments.vit_figures import draw
from scripts.experiments.vit_model import Shape
from scripts.experiments.vit_pictures import Pictures, digits, folder
from scripts.experiments.vit_training import Recipe, Run
from scripts.terminal import aligned, at_least_one, program_parser

MATCHED = "lln"  # whose α and β --fixed fixes
PAPER = {"layers": 12, "width": 128, "heads": 8, "patch": 32}
SMALL = {"layers": 4, "width": 64, "heads": 4, "patch": 2}  # for the digits


class Experiment:
    def __init__(self, args: argparse.Namespace, pictures: Pictures) -> None:
        self.args, self.pictures, self.out = args, pictures, Path(args.out)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = dict(PAPER if args.images else SMALL)
        sizes |= {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
        _, channels, side, _ = pictures.pixels.shape
        self.shape = Shape(len(pictures.classes), channels, side, **sizes)

    def runs(self, attention: str) -> list[dict[str, Any]]:
        """The results of an attention, one a seed."""
        args = self.args
        shared = {name: getattr(args, name) for name in ("epochs", "batch", "lr", "weight_decay", "fp16")}
        found = []
        for seed in args.seeds:
            place = self.out / re.sub(r"[^\w.]+", "-", attention) / f"seed{seed}"
            try:
                run = Run(place, Recipe(attention, seed, **shared), self.shape, self.pictures, self.device)
            except ValueError as error:
                raise UserError(str(error)) from error
            found.append(run.finish())
        return found

    def all(self) -> None:
        quarter = max(self.shape.tokens // 4, 1)
        attentions = self.args.attentions or ["softmax", MATCHED, f"linformer:projected_length={quarter}"]
        rows = {attention: self.runs(attention) for attention in attentions}
        for value in self.args.fixed:
            row = f"{MATCHED}:alpha={value:g},beta={value:g}"
            rows[row] = self.runs(row)
        print(f"{self.shape}\n{table(rows)}")
        for path in draw(rows, self.out):
            print(path)


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """Accuracy of every row in per cent, mean (lowest to highest) over its seeds."""
    cells = [("attention", "dev", "test", "seeds")]
    for name, found in rows.items():
        dev, test = [run["history"][-1]["valid"] for run in found], [run["test"] for run in found]
        cells.append((name, spread(dev), spread(test), str(len(found))))
    return aligned(cells)


def spread(values: list[float]) -> str:
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.experiments.vit", __doc__)
    parser.add_argument("--out", default="runs/vit", help="where everything goes (default: %(default)s)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="pictures, a sub-folder a class; default: digits")
    parser.add_argument("--side", type=at_least_one, help="scale and cut pictures to so many pixels")
    parser.add_argument("--attentions", nargs="+", metavar="NAME[:OPTION=VALUE,...]",
                        help="default: softmax, lln, and linformer with a quarter of the tokens")  # fmt: skip
    parser.add_argument("--fixed", nargs="*", type=float, default=[], metavar="VALUE", help="fixed values of α = β")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    for name, value in PAPER.items():
        parser.add_argument(f"--{name}", type=at_least_one, help=f"default: {value}, {SMALL[name]} for the digits")
    parser.add_argument("--epochs", type=at_least_one, default=20)
    parser.add_argument("--batch", type=at_least_one, default=64, help="pictures an update")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW, at its highest")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--fp16", action="store_true", help="half precision with a loss scale, on a GPU")
    args = parser.parse_args(argv)
    if args.fp16 and not torch.cuda.is_available():
        parser.error("--fp16 needs a GPU, and torch finds none")
    args.seeds = list(dict.fromkeys(args.seeds))
    if args.side and not args.images:
        parser.error("--side is for --images: the digits have 8 pixels")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    def program() -> None:
        pictures = folder(args.images, args.side) if args.images else digits()
        Experiment(args, pictures).all()

    return run_main(program, "\ninterrupted; the same command goes on from here")


if __name__ == "__main__":
    sys.exit(main())
