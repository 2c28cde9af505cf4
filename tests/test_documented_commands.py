"""Test that every command in a bash block of README and docs/ has an existing program, flags and Hydra overrides."""

import argparse
import importlib
import re
import shlex
import sys
from functools import partial

import pytest
from fairseq import options
from hydra._internal.utils import get_args_parser

import lln_fairseq
from lln_fairseq.__main__ import run_program
from scripts import compare_attentions
from scripts.figures import paper
from scripts.train_tasks import compose_config
from tests.documentation import PAGES, ROOT, code_blocks, text_without_code

COMMAND = re.compile(r"lln-fairseq |python -m (lln_fairseq|scripts|data_prep)\b|fairseq-|scripts/")
LAUNCHER = re.compile(r"^(torchrun .* -m lln_fairseq|srun .*lln-fairseq) ")  # of several processes of a program
SHELL_OPERATORS = {"<", ">", "|", "&&"}
MORE_ARGUMENTS = "..."
# The line of a shell script that starts a Python program of this project.
STARTS_PROGRAM = re.compile(
    r"(?:/program\.sh\"|^exec python -m) ((?:lln_fairseq|scripts|data_prep)\b.*) [\"$].*@", re.MULTILINE
)


def documented_commands():
    """Yield the page and the words of every command in a bash block that runs a program of this project."""
    for page in PAGES:
        for block in code_blocks(page, "bash"):
            for line in block.replace("\\\n", "").splitlines():
                line = LAUNCHER.sub("lln-fairseq ", line)
                if COMMAND.match(line):
                    yield page, command_words(line)


def command_words(line):
    """Return the words of a command up to the first shell operator, without comments and without `...`."""
    words = []
    for word in shlex.split(line, comments=True):
        if word in SHELL_OPERATORS:
            break
        if word != MORE_ARGUMENTS:
            words.append(word)
    return words


def resolve_program(words):
    """Return the program that a command runs and its arguments.

    The program is "lln_fairseq NAME" for a program of lln-fairseq, a module such as "data_prep.glue", a fairseq
    command, or the path of a shell script that starts no single Python program.
    """
    if words[0] == "lln-fairseq":
        return f"lln_fairseq {words[1]}", words[2:]
    if words[:3] == ["python", "-m", "lln_fairseq"]:
        return f"lln_fairseq {words[3]}", words[4:]
    if words[0] == "python":
        return words[2], words[3:]
    if words[0].startswith("scripts/"):
        started = STARTS_PROGRAM.search((ROOT / words[0]).read_text(encoding="utf-8"))
        if started:
            return resolve_program(["python", "-m", *shlex.split(started[1]), *words[1:]])
    return words[0], words[1:]


def check_recipe(arguments):
    """Compose the recipe that a Hydra command line names with its overrides."""
    parsed = get_args_parser().parse_args(arguments)
    compose_config(parsed.config_name, parsed.overrides)


def check_fairseq_train(arguments):
    """Parse the arguments as fairseq-train does."""
    lln_fairseq.register()
    options.parse_args_and_arch(options.get_training_parser(), arguments)


def check_fairseq_validate(arguments):
    """Parse the arguments as fairseq-validate does."""
    lln_fairseq.register()
    options.parse_args_and_arch(options.get_validation_parser(), arguments)


def check_fairseq_preprocess(arguments):
    """Parse the arguments as fairseq-preprocess does."""
    options.get_preprocessing_parser().parse_args(arguments)


def check_comparison(arguments):
    """Compose the pre-training and all fine-tunings of every attention that the comparison would run."""
    args = compare_attentions.parse_arguments(arguments)
    overrides = compare_attentions.Overrides(args)
    for attention in args.attentions:
        compose_config("pretrain", overrides.for_pretraining(attention, 1))
        for task in overrides.tasks:
            compose_config("finetune", overrides.for_finetuning(attention, 1, task, args.data))


# The checks of programs that pass their arguments to Hydra or fairseq, or that interpret Hydra overrides themselves.
CHECKS = {
    "lln_fairseq train": check_recipe,
    "fairseq-hydra-train": check_recipe,
    "fairseq-train": check_fairseq_train,
    "fairseq-validate": check_fairseq_validate,
    "fairseq-preprocess": check_fairseq_preprocess,
    "scripts.compare_attentions": check_comparison,
}


class ArgumentsParsed(BaseException):
    """Stops a program after it has parsed its arguments; `args` are the arguments that its parser does not know."""


def unknown_arguments(program, arguments, monkeypatch):
    """Run a program until it has parsed its arguments, and return those that its own parser does not know."""
    parse_known_args = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(*args):
        _, unknown = parse_known_args(*args)
        raise ArgumentsParsed(*unknown)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    # The runs in the documentation do not exist, so their curves are replaced.
    monkeypatch.setattr(paper, "read_curves", lambda folder: {"loss": [(1, 2.0)]})
    if program.startswith("lln_fairseq "):
        main = partial(run_program, program.removeprefix("lln_fairseq "))
    else:
        main = importlib.import_module(program).main
    with pytest.raises(ArgumentsParsed) as stopped:
        main(arguments)
    return list(stopped.value.args)


def check_program(program, arguments, monkeypatch):
    """Check flags with the program's parser, and the remaining arguments as overrides of the recipe that it uses."""
    overrides = unknown_arguments(program, arguments, monkeypatch)
    if program == "scripts.train_tasks" and arguments[0].startswith("lra"):
        task = "listops" if arguments[0] == "lra_all" else arguments[1]
        compose_config("lra", [f"lra={task}", *overrides])
    elif program == "scripts.train_tasks":
        compose_config("finetune", ["glue=sst2", *overrides])
    else:
        assert not overrides


def check_shell_script(script, arguments):
    """Check that the flags occur in the text of the script."""
    flags = {word for word in arguments if word.startswith("-")}
    assert flags <= set((ROOT / script).read_text(encoding="utf-8").split())


def test_every_page_has_commands():
    assert {page for page, _ in documented_commands()} == set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_in_fenced_blocks_with_language(page):
    assert code_blocks(page, "") == []
    assert not re.search(rf"^\s*({COMMAND.pattern})", text_without_code(page), re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=f"{page.name}: {' '.join(words)[:50]}") for page, words in documented_commands()],
)
def test_documented_command_parses(words, monkeypatch):
    program, arguments = resolve_program(words)
    if program in CHECKS:
        CHECKS[program](arguments)
    elif program.startswith("scripts/"):
        check_shell_script(program, arguments)
    else:
        check_program(program, arguments, monkeypatch)
