"""Redraw the figures of arXiv 2311.13541 and of the separation experiments.

    python -m scripts.paper_figures                                   # the simulated figures
    python -m scripts.paper_figures --only 2 5 --out my_figures
    python -m scripts.paper_figures --only 1 8 9 10 --run lln=runs/pretrain_lln_diag softmax=runs/pretrain_softmax

Each figure is written to OUT/figure_N.png and its numbers to OUT/figure_N.csv. Figures 2, 5, 6, 7 and the separation
figures are simulated. Figures 1, 8, 9 and 10 are drawn from training runs: give the directory of a run or its
TensorBoard directory. Figure 1 needs runs with the probe (--probe-interval), and Figure 10a needs runs of sentence
classification. A figure without data is skipped, and the program says what is missing.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lln_fairseq.analysis.events import Curve, read_curves
from lln_fairseq.command import run_main
from scripts.figures import moments, runs, separation_sweeps, temperatures
from scripts.figures.sheet import FigureSkippedError, Settings, Sheet
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
}
for sweep_name in separation_sweeps.SWEEPS:
    FIGURES[f"separation_{sweep_name}"] = partial(separation_sweeps.separation_figure, sweep_name)


def split_label(text: str) -> tuple[str, Path]:
    """Split LABEL=DIR into the label and the directory. Without a label, the label is the last component of DIR.

    Both parts can contain "=". If the whole text is an existing directory, it is not split. Otherwise it is split at
    the first "=" that is followed by an existing directory, or at the last "=" if there is no such directory.
    """
    candidates = [("", text)]
    for i, letter in enumerate(text):
        if letter == "=":
            candidates.append((text[:i], text[i + 1 :]))
    chosen = candidates[-1]
    for candidate in candidates:
        if Path(candidate[1]).is_dir():
            chosen = candidate
            break
    label = chosen[0]
    directory = Path(chosen[1])
    return label or directory.name, directory


def labeled_run(text: str) -> tuple[str, dict[str, Curve]]:
    """Return the label of a run and its curves by their tags, for the argument LABEL=DIR or DIR.

    Use this function as the `type` of an argparse argument. If the directory has no curves, it raises
    ArgumentTypeError.
    """
    label, directory = split_label(text)
    folder = directory
    if (directory / "tensorboard").is_dir():
        folder = directory / "tensorboard"
    curves = read_curves(folder)
    if not curves:
        raise argparse.ArgumentTypeError(f"no TensorBoard scalars below '{directory}'")
    return label, curves


def draw_figures(names: list[str], out: Path, settings: Settings) -> int:
    """Draw figures into the directory `out`, which is created, and print their paths and notes.

    Args:
        names: keys of FIGURES.
        out: the output directory.
        settings: the input of the figures.

    Returns:
        The exit code: 1 if all figures were skipped, otherwise 0.
    """
    out.mkdir(parents=True, exist_ok=True)
    exit_code = 1
    for name in names:
        try:
            sheet = FIGURES[name](settings)
        except FigureSkippedError as error:
            print(f"figure {name} skipped: {error}")
            continue
        path = out / f"figure_{name}.png"
        sheet.save(path)
        exit_code = 0
        print(f"figure {name}: {path}")
        for note in sheet.notes:
            print(f"  {note}")
    return exit_code


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = program_parser("python -m scripts.paper_figures", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        metavar="FIGURE",
        help=f"figures to draw, from {', '.join(FIGURES)} (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/figures"), help="output directory (default: %(default)s)"
    )
    parser.add_argument(
        "--run",
        nargs="+",
        action="extend",
        type=labeled_run,
        default=[],
        metavar="LABEL=DIR",
        help="runs to draw, by default labeled with the name of their directory",
    )
    parser.add_argument("--fast", action="store_true", help="use tiny sizes, to test the program")
    args = parser.parse_args(argv)
    return draw_figures(args.only, args.out, Settings(args.fast, dict(args.run)))


if __name__ == "__main__":
    sys.exit(run_main(main))
