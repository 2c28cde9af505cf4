"""Every command that stands in an indented block of README or docs/ is understood: program, flags, Hydra overrides."""

import argparse
import importlib
import re
import shlex
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
from fairseq import options
from hydra._internal.utils import get_args_parser

import lln_fairseq
from lln_fairseq.__main__ import run_program
from scripts import compare_attentions, paper_figures
from scripts.compare_attentions import configuration

ROOT = Path(__file__).parents[1]
OURS = r"(?:lln_fairseq|scripts|data_prep)\b"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# The recipe that a program gives its Hydra overrides to, with the task of its arguments.
RECIPES = {
    "scripts.experiments.finetune": lambda *_: ("finetune", "glue=sst2"),
    "scripts.experiments.lra_runs": lambda name, task, *_: ("lra", f"lra={'listops' if name == 'lra_all' else task}"),
}


def commands():
    """The words of every line that begins with a command; `...`, which stands for more of the same, is left out."""
    for page in PAGES:
        for block in re.findall(r"(?:^    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            for line in textwrap.dedent(block).replace("\\\n", "").splitlines():
                if re.match(rf"python -m {OURS}|fairseq-|scripts/", line):
                    yield page, [word for word in shlex.split(line, comments=True) if word != "..."]


def program_of(words):
    """Return what a command starts ("lln_fairseq PROGRAM", a module, or a shell script) and its arguments."""
    if words[:3] == ["python", "-m", "lln_fairseq"]:
        return f"lln_fairseq {words[3]}", words[4:]
    if words[0] == "python":
        return words[2], words[3:]
    if words[0].startswith("scripts/"):
        started = re.search(
            rf"(?:/program\.sh\"|^exec python -m) ({OURS}.*) [\"$].*@", (ROOT / words[0]).read_text(), re.M
        )
        if started:
            return program_of(["python", "-m", *shlex.split(started[1]), *words[1:]])
    return words[0], words[1:]


class Parsed(BaseException):
    """What a program's parser leaves over of its arguments, in the place of the rest of the program."""


def check_program(module, arguments, monkeypatch):
    """Its own parser takes them, up to overrides for a recipe that has them."""
    parse = argparse.ArgumentParser.parse_known_args

    def stop(*given):
        raise Parsed(*parse(*given)[1])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(paper_figures, "read_curves", lambda folder: {"loss": [(1, 2.0)]})  # of runs that are not there
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    if module.startswith("lln_fairseq "):
        program = partial(run_program, module.removeprefix("lln_fairseq "))
    else:
        program = importlib.import_module(module).main
    with pytest.raises(Parsed) as found:
        program(arguments)
    rest = found.value.args
    if module in RECIPES:
        recipe, task = RECIPES[module](*arguments)
        configuration(recipe, [task, *rest])
    else:
        assert not rest


def check_recipe(arguments):
    given = get_args_parser().parse_args(arguments)
    configuration(given.config_name, given.overrides)


def check_fairseq(get_parser, arguments):
    lln_fairseq.register()
    options.parse_args_and_arch(get_parser(), arguments)


def check_comparison(arguments):
    args = compare_attentions.parse(arguments)
    overrides = compare_attentions.Overrides(args)
    for row in args.attentions:
        configuration("pretrain", overrides.of_pretraining(row, 1))
    for task in overrides.tasks:
        configuration("finetune", overrides.of_finetuning(row, 1, task, args.data))


CHECKS = {  # of what is no program of ours that parses its arguments itself
    "lln_fairseq train": check_recipe,
    "fairseq-hydra-train": check_recipe,
    "fairseq-train": partial(check_fairseq, options.get_training_parser),
    "fairseq-eval-lm": partial(check_fairseq, options.get_eval_lm_parser),
    "fairseq-preprocess": lambda arguments: options.get_preprocessing_parser().parse_args(arguments),
    "scripts.compare_attentions": check_comparison,
}


def test_commands_are_found():
    assert {page for page, _ in commands()} == set(PAGES)


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{page.name}: {' '.join(words)[:50]}") for page, words in commands()]
)
def test_a_command_is_understood(words, monkeypatch):
    module, arguments = program_of(words)
    if module in CHECKS:
        CHECKS[module](arguments)
    elif module.startswith("scripts/"):
        assert {word for word in arguments if word.startswith("-")} <= set((ROOT / module).read_text().split())
    else:
        check_program(module, arguments, monkeypatch)
