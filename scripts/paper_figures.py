"""Redraws the figures of arXiv 2311.13541 and of the separation experiments: OUT/figure_N.png, the numbers in .csv.

    python -m scripts.paper_figures                                   # what simulation gives
    python -m scripts.paper_figures --only 2 5 --out my_figures
    python -m scripts.paper_figures --only 1 8 9 10 --run lln=runs/pretrain_lln_diag softmax=runs/pretrain_softmax

Figures 2, 5, 6, 7 and the separation figures are simulated. Figures 1, 8, 9 and 10 are read from runs, given by their
directory or its TensorBoard directory; Figure 1 needs the probe (--probe-interval), Figure 10a runs of a sentence
classification. A figure for which nothing was given is skipped, and the line says what is missing.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.command import run_main
from scripts.figures import moments, runs, separation_sweeps, temperatures
from scripts.figures.sheet import Settings, Sheet, Skipped
from scripts.terminal import program_parser

FIGURES: dict[str, Callable[[Settings], Sheet]] = {
    "1": runs.figure_1,
    "2": temperatures.figure_2,
    "5": moments.figure_5,
    "6": moments.figure_6,
    "7": moments.figure_7,
    "8": runs.figure_8,
    "9": runs.figure_9,
    "10": runs.figure_10,
    **{f"separation_{name}": separation_sweeps.figure(name) for name in separation_sweeps.SWEEPS},
}


def labelled_run(text: str) -> tuple[str, dict]:
    """LABEL=DIR, or DIR, which is then its own label; both may contain a "="."""
    splits = [("", text), *((text[:i], text[i + 1 :]) for i, letter in enumerate(text) if letter == "=")]
    label, directory = next((split for split in splits if Path(split[1]).is_dir()), splits[-1])
    path = Path(directory)
    inner = path / "tensorboard"
    curves = read_curves(inner if inner.is_dir() else path)
    if not curves:
        raise argparse.ArgumentTypeError(f"no TensorBoard scalars below '{path}'")
    return label or path.name, curves


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.paper_figures", __doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="FIGURE",
                        help=f"of {', '.join(FIGURES)}")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/figures"), help="directory (default: %(default)s)")
    parser.add_argument("--run", nargs="+", action="extend", type=labelled_run, default=[], metavar="LABEL=DIR")
    parser.add_argument("--fast", action="store_true", help="tiny sizes: does everything work?")
    args = parser.parse_args(argv)
    settings, drawn = Settings(args.fast, dict(args.run)), 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        try:
            sheet = FIGURES[name](settings)
        except Skipped as reason:
            print(f"figure {name} skipped: {reason}")
            continue
        path = args.out / f"figure_{name}.png"
        sheet.save(path)
        drawn += 1
        print(f"figure {name}: {path}", *(f"  {note}" for note in sheet.notes), sep="\n")
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
