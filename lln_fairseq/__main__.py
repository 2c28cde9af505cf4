"""The command `lln-fairseq` (or `python -m lln_fairseq`), which runs one of the programs in PROGRAMS."""

import argparse
import importlib
import sys
from typing import NamedTuple

from lln_fairseq import register
from lln_fairseq.command import run_main


class Program(NamedTuple):
    """A program of the command.

    Attributes:
        module: the module of this package with the program's `main`.
        description: its line in the help text.
        interrupt_message: the line that is printed after Ctrl-C or SIGTERM.
    """

    module: str
    description: str
    interrupt_message: str = "interrupted"


PROGRAMS = {
    "train": Program("training.train", "pre-train or fine-tune a model with a recipe"),
    "evaluate": Program("inference.evaluate", "score a fine-tuned model on a split of its data"),
    "predict": Program("inference.predict", "write a label or a score for every line of text"),
    "encode": Program("inference.encode", "write a vector for every line of text"),
    "convert": Program("conversion.convert", "convert a Hugging Face or fairseq model to a checkpoint"),
    "export": Program("conversion.export", "convert a checkpoint to Hugging Face format or ONNX"),
    "linearize": Program(
        "linearize.program",
        "replace the softmax attention of a trained encoder",
        "interrupted; run the same command again to resume from the last saved step, if any",
    ),
    "speedup": Program(
        "speedup.program",
        "find out whether a trained model can be faster on your rows",
        "interrupted; run the same command again to continue",
    ),
    "analyze": Program("analysis.analyze", "measure the attention of a trained model"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the program that the first argument names, and return its exit code, see lln_fairseq/command.py.

    `argv` are the arguments of the command; None takes those of this process. SystemExit is raised if the program is
    missing or unknown, and for a program's own usage errors and --help.
    """
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="lln-fairseq", epilog="lln-fairseq PROGRAM --help lists its options.")
    programs = parser.add_subparsers(dest="program", metavar="PROGRAM", required=True)
    for name, program in PROGRAMS.items():
        programs.add_parser(name, help=program.description, add_help=False)
    name = parser.parse_args(arguments[:1]).program
    return run_main(lambda: run_program(name, arguments[1:]), PROGRAMS[name].interrupt_message)


def run_program(name: str, arguments: list[str]) -> None:
    """Import a program, which takes seconds, and run it with the arguments that follow its name."""
    register()  # must come before any other import of fairseq, whose change of the root logger it undoes
    importlib.import_module(f"lln_fairseq.{PROGRAMS[name].module}").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
